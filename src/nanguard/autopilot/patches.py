"""Wraps the functions of torch that tell what a program does: new optimizers, their steps, backward, loss scaling.

Each is wrapped once and looks as it did: names, signatures and attributes are kept, classes and objects are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, swa_utils
from torch.utils.data import DataLoader

from nanguard import _compat, _compat_data, _compat_modes
from nanguard.autopilot.averages import without_bad_batches
from nanguard.autopilot.closures import step_with_closure, taped
from nanguard.autopilot.monitor import ProgramMonitor
from nanguard.autopilot.plain import NOT_MADE
from nanguard.autopilot.registry import num_calls_of
from nanguard.hosted.clipping import clip_to_norm, clipped_by_value, clipped_to_norm, total_norm
from nanguard.hosted.handshake import announce
from nanguard.hosted.joining import CLAIMED
from nanguard.hosted.optimizers import ProgramCall
from nanguard.state.batch_indices import NotedSampler, begin_noted
from nanguard.state.optimizer_traits import traits_of


class Patches:
    """Installed when made; ``remove`` restores everything."""

    def __init__(self, monitor: ProgramMonitor) -> None:
        self._monitor = monitor
        self._saved: list[tuple[Any, str, Any]] = []
        self._classes: set[type[Optimizer]] = set()
        self._replace(Optimizer, "__init__", self._made)
        self._replace(Optimizer, "__setstate__", self._made)  # of copies and pickles
        self._replace(nn.Module, "__init__", self._module_made)
        self._replace(nn.Module, "__setstate__", self._module_made)
        self._replace(Tensor, "backward", self._tensor_backward)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.autograd, "grad", self._grad)
        self._replace(Optimizer, "zero_grad", self._zero_grad)
        self._replace(nn.Module, "zero_grad", self._zero_grad)
        self._replace(BaseProcess, "start", self._start)
        for owner, name in _compat.recorders():
            self._replace(owner, name, self._aside)
        self._replace(DataLoader, "__iter__", self._iterate)
        self._replace(_compat_data.loader_iterator(), "__next__", self._fetch)
        self._replace(GradScaler, "scale", self._scale)
        self._replace(GradScaler, "step", self._scaler_step)
        self._replace(swa_utils, "update_bn", self._update_bn)
        for name, make in (("clip_grad_norm_", self._clip_norm), ("clip_grad_value_", self._clip_value)):
            self._replace(clip_grad, name, make)
            self._saved.append((nn.utils, name, getattr(nn.utils, name)))
            setattr(nn.utils, name, getattr(clip_grad, name))
        monitor.taper.listen_for_good()

    def remove(self) -> None:
        self._monitor.taper.close()
        while self._saved:
            owner, name, original = self._saved.pop()
            setattr(owner, name, original)
        self._classes.clear()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._saved.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(make(original)))

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        monitor = self._monitor

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if not _compat.is_recording():
                self._guard_class(type(optimizer))  # a scheduler keeps the step that it finds
                if not monitor.is_idle:
                    monitor.made(optimizer)

        return make

    def _module_made(self, original: Callable[..., None]) -> Callable[..., None]:
        monitor, live_modules = self._monitor, self._monitor.registry.live_modules

        def make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if not _compat.is_recording():
                live_modules.add(module)
                if isinstance(module, DistributedDataParallel) and not monitor.is_idle:
                    announce()

        return make

    def _guard_class(self, kind: type[Optimizer]) -> None:
        """Wraps ``step`` in the class that defines it, which others may inherit."""
        definer = next(each for each in kind.__mro__ if "step" in vars(each))
        if definer not in self._classes and definer is not Optimizer:
            self._classes.add(definer)
            self._replace(definer, "step", self._step)

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            is_recording = _compat.is_recording()
            if not (is_recording or args or kwargs or CLAIMED in vars(optimizer)):
                result = monitor.plain.step(optimizer, original)
                if result is not NOT_MADE:
                    return result
            if _compat_modes.current_pass() != -1 and monitor.is_running_again:
                return None
            if is_recording or monitor.is_idle or CLAIMED in vars(optimizer):
                monitor.children.trains()
                return original(optimizer, *args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            traits = traits_of(optimizer)
            is_unchecked = traits.needs_closure or _compat.has_step_pre_hooks(optimizer)  # they may change gradients
            if not callable(closure):
                call = ProgramCall(original, optimizer, *args, **kwargs)
                return monitor.step(optimizer, call, check_afterwards=is_unchecked)
            others = {name: value for name, value in kwargs.items() if name != "closure"}

            def call_with(closure: Any) -> Any:
                return original(optimizer, closure, *args[1:], **others)

            if is_unchecked:
                call = ProgramCall(call_with, taped(monitor, closure))
                return monitor.step(optimizer, call, check_afterwards=True)
            return step_with_closure(monitor, optimizer, call_with, closure, runs_first=traits.calls_closure_once)

        return step

    def _tensor_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        monitor = self._monitor

        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if _compat.is_recording():
                original(tensor, *args, **kwargs)
            elif args or kwargs or not monitor.plain.backward(tensor, original):
                if monitor.taper.is_begun and not monitor.is_idle:
                    monitor.taper.stop()
                original(tensor, *args, **kwargs)

        return backward

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        monitor = self._monitor

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            is_traced = _compat.is_traced_by_compile()
            if not is_traced and monitor.plain.is_noted(tensors):
                original(tensors, *args, **kwargs)
                return
            if is_traced or _compat.is_recording() or monitor.is_aside:
                monitor.children.trains()
                original(tensors, *args, **kwargs)
                return
            monitor.after_forward(tensors, args[0] if args else kwargs.get("grad_tensors"))
            try:
                monitor.first_pass.run(original, tensors, *args, **kwargs)
            except BaseException as error:
                monitor.backward_raised(error)
                raise
            monitor.after_backward(tensors)
            if any(args[1:3]) or kwargs.get("retain_graph") or kwargs.get("create_graph"):
                monitor.begin_taping()  # another loss may be computed of what is there already

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # With create_graph (the third argument after them) the gradients are part of a loss, not of an update.
            is_part = kwargs.get("create_graph") or (len(args) > 2 and args[2])
            if _compat.is_recording() or monitor.is_aside or is_part:
                return original(outputs, inputs, *args, **kwargs)
            if isinstance(inputs, Iterator):  # model.parameters()
                inputs = tuple(inputs)
            monitor.before_grad(outputs, inputs)
            grads = monitor.first_pass.run(original, outputs, inputs, *args, **kwargs)
            return monitor.after_grad(outputs, inputs, grads)

        return grad

    def _zero_grad(self, original: Callable[..., None]) -> Callable[..., None]:
        """It reads and sets ``grad`` of each parameter, which is a torch call each, and none is a row of the tape."""
        monitor = self._monitor

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if _compat_modes.current_pass() != -1 and monitor.is_running_again:
                return
            if _compat.is_recording():
                original(*args, **kwargs)
                return
            was_taping = monitor.taper.is_on and monitor.taper.pause()
            try:
                original(*args, **kwargs)
            finally:
                if was_taping:
                    monitor.taper.go_on(True)
            monitor.note_cleared()
            if not monitor.registry.entries:  # the first step: later a batch, or the end of a step, tells
                monitor.begin_taping()

        return zero_grad

    def _start(self, original: Callable[..., None]) -> Callable[..., None]:
        children = self._monitor.children

        def start(process: BaseProcess) -> None:
            may_train = children.may_train(process)  # before it starts: a process that runs has dropped its target
            is_guarded = children.guard(process)
            original(process)
            children.num_spawned += may_train and not is_guarded

        return start

    def _aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def trace(*args: Any, **kwargs: Any) -> Any:
            with monitor.standing_aside():
                return original(*args, **kwargs)

        return trace

    def _iterate(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            return begin_noted(loader, original, tells=True)[0]

        return iterate

    def _fetch(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        monitor = self._monitor

        def fetch(iterator: Any) -> Any:
            sampler = _compat_data.index_sampler(iterator)
            noted = sampler if isinstance(sampler, NotedSampler) and sampler.tells else None
            was_taping = monitor.taper.pause()  # what a dataset does to its records is no part of the step
            try:
                batch = original(iterator)
            except Exception as error:
                if noted is not None and not isinstance(error, StopIteration):
                    noted.next()  # a record that could not be read: the next batch is another
                raise
            finally:
                monitor.taper.go_on(was_taping)
            if noted is not None:
                monitor.fetched(noted, batch)
            return batch

        return fetch

    def _update_bn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def update(loader: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            data = loader if monitor.is_idle else without_bad_batches(loader, model)
            return original(data, model, *args, **kwargs)

        return update

    def _clip_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def clip(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if _compat.is_recording() or monitor.is_idle:
                return original(parameters, max_norm, *args, **kwargs)
            monitor.taper.stop()  # the losses are complete
            parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
            hosted_steps = monitor.registry.hosted_steps
            norm = None if args or kwargs else clip_to_norm(hosted_steps, parameters, max_norm, monitor.plain.losses)
            if norm is None:
                norm = original(parameters, max_norm, *args, **kwargs)
                clipped_to_norm(hosted_steps, parameters, norm, max_norm)
            return norm

        return clip

    def _clip_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
            if _compat.is_recording() or monitor.is_idle:
                original(parameters, *args, **kwargs)
                return
            parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
            before = total_norm(parameters)
            original(parameters, *args, **kwargs)
            clipped_by_value(monitor.registry.hosted_steps, parameters, before)

        return clip

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not _compat.is_recording() and isinstance(scaled, Tensor) and scaled is not outputs:
                scaled._nanguard_loss = outputs  # type: ignore[attr-defined]
            return scaled

        return scale

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        monitor = self._monitor

        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if _compat.is_recording() or monitor.is_idle or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            before = monitor.before_scaler_step(optimizer, scaler)
            result = original(scaler, optimizer, *args, **kwargs)
            if num_calls_of(optimizer) == before:  # it has found an overflow and skipped the step
                monitor.step(optimizer, ProgramCall(None))
            return result

        return step
