"""Run the failing step again, traced or under other conditions, and restore everything afterwards."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from nanguard import _compat, _compat_modes
from nanguard.diagnosis.hooks import GradientHooks
from nanguard.diagnosis.look import look
from nanguard.diagnosis.provenance import BATCH, PARAMETER
from nanguard.diagnosis.taped import TapedRun, tensors_in_objects
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun, introduce, introduce_others, introduce_states, tensors_by_kind
from nanguard.source.frames import runs_user_code
from nanguard.source.modules import Modules
from nanguard.state.batches import filled, take
from nanguard.state.module_attributes import ModuleAttributes
from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.trees import named_tensors
from nanguard.step.dry_run import DryRun
from nanguard.step.host_step import HostStep
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

log = logging.getLogger("nanguard")


class Replay:
    """Replays one step. ``seconds`` and ``num`` are the time and the number of replays so far."""

    def __init__(self, parts: StepParts, dry_run: DryRun, pending: PendingStep) -> None:
        self.parts, self.pending = parts, pending
        self._dry_run = dry_run
        self.num = 0
        self.seconds_of_last = 0.0
        self._began = time.monotonic()
        self._written: set[str] = set()
        self._others: list[Tensor] = []  # what else the program writes to: what its hooks sum up, say
        self._state = parts.state
        self._modules = Modules(parts.state.own_model, parts.other_networks())
        self._generators: list[Generator] = []
        self._data = dict(_data(pending))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    # ---- watched -------------------------------------------------------------------------------------------------

    def watched(self, *, update: bool = False) -> WatchedRun:
        """Trace every op of the step, with ``update`` also the optimizers'. Stop at the first non-finite result."""
        saved: dict[str, tuple[Tensor, Tensor]] = {}
        others = [(tensor, tensor.clone()) for tensor in self._others]

        def save(name: str, tensor: Tensor) -> None:
            if not name:
                self._others += _whole_memory(tensor)
                others.extend((each, each.clone()) for each in self._others[len(others) :])
                return
            whole = {name: tensors_by_kind(self._state).get(name, tensor)}
            for each, thing in (self._sharing(tensor) if name in self._data else whole).items():
                saved.setdefault(each, (thing, thing.detach().clone()))

        trace = Trace(self._modules, save)
        self._introduce(trace)
        run, held = WatchedRun(trace), ModuleAttributes(self._state.model.modules())
        try:
            alone = _Alone() if self.parts.ranks.has_others else contextlib.nullcontext()  # type: ignore[no-untyped-call]
            hooks = GradientHooks(self._modules, run.hooks)
            with self._stage(self.pending):
                with _compat.without_compilation(), alone, hooks, trace:
                    for place in range(len(self.pending.microbatches)):
                        self._watch_one(run, place)
                        if run.found:
                            break
                    if update and not run.found:
                        self._watch_update(run)
                run.replaced = held.replaced()
        finally:
            self._written |= {name for name in saved if not name.startswith("buffer ")}
            _write_back([*saved.values(), *others])
            for generator, state in trace.generators.values():
                generator.set_state(state)
                self._generators.append(generator)
        if trace.failure is not None:
            log.debug("some ops could not be followed: %s", trace.failure)
        return run

    def watched_update(self) -> WatchedRun:
        """Trace the optimizers' update alone, with the current gradients, and undo it."""
        trace = Trace(self._modules)
        self._introduce(trace)
        run = WatchedRun(trace)
        with _compat.without_compilation(), trace:
            self._watch_update(run)
        return run

    def _introduce(self, trace: Trace) -> None:
        introduce(trace, self._state)
        others = introduce_others(trace, self._state, self.parts.other_states())
        for name, tensor in self._data.items():
            if not isinstance(tensor, torch.nn.Parameter) and id(tensor) not in others:
                trace.know(name, tensor, BATCH, watched=True)

    def _sharing(self, tensor: Tensor) -> dict[str, Tensor]:
        """The data tensors that share storage with a tensor and can be written to."""
        key = _compat.storage_key(tensor)
        return {n: t for n, t in self._data.items() if _compat.storage_key(t) == key and _can_be_written_to(t)}

    def _watch_one(self, run: WatchedRun, place: int) -> None:
        run.microbatch = place
        try:
            loss = self._dry_run.forward(self.pending, place)
        except Exception:  # the program may raise because of what is non-finite
            run.look_at_end()
            if run.is_finite:
                raise
            return
        with _compat_modes.unwatched():
            run.look_at_loss(loss)
        if not run.is_finite:
            return
        self._dry_run.backward(self.pending, loss)
        with _compat_modes.unwatched():
            run.look_at_gradients(self.parts)
            if run.is_finite:
                run.look_at_writes(self._state)

    @runs_user_code
    def _watch_update(self, run: WatchedRun) -> None:
        """Update one parameter at a time, so that each op belongs to one parameter."""
        parts = self.parts
        grads = [
            (parts.state.name_of(p), p.grad) for group in parts.skippable.groups() for p in group if p.grad is not None
        ]
        if parts.precision.scaler is not None:
            parts.precision.scaler.unscale_([grad for _, grad in grads])
        with _compat_modes.unwatched():
            for name, grad in grads:
                run.trace.know(f"gradient {name}", grad, PARAMETER, owner=name)
            introduce_states(run.trace, self._state)
            before = parts.state.capture_update()
        run.trace.in_update = True
        try:
            for optimizer in parts.state.optimizers:
                for group in optimizer.param_groups:
                    group.update({key: False for key in ("foreach", "fused") if group.get(key, False) is not False})
                optimizer.step()
            with _compat_modes.unwatched():
                run.look_at_update(self._state)
        finally:
            run.trace.in_update = False
            with _compat_modes.unwatched():
                before.put_back()

    # ---- in other conditions -------------------------------------------------------------------------------------

    def is_finite(
        self,
        *,
        fp32: Sequence[str] | None = None,
        samples: Sequence[int] | None = None,
        num: int = 0,
        microbatch: int = 0,
    ) -> bool:
        """True if loss and gradients are finite with modules in fp32 (``[""]``: the whole model), or on samples.

        These are of one micro-batch, which has ``num``; the others are left out then.
        """
        pending = self.pending
        if samples is not None:
            micro = pending.microbatches[microbatch]
            # With another size of the batch torch.compile would compile anew, and later steps would round differently.
            if self.parts.state.device.type != "cpu" or isinstance(micro.loss_fn, (HostStep, TapedRun)):
                samples = filled(samples, num)
            pending = replace(pending, microbatches=[replace(micro, batch=take(micro.batch, samples, num))])
        with self.in_fp32(fp32), self._kept(), self._stage(pending):
            losses = self._dry_run.run(pending)
            parameters = [p for group in self.parts.skippable.groups() for p in group]
            grads = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
            if not all(look(loss).is_finite for loss in losses):
                return False
            scaler = self.parts.precision.scaler  # gradients may overflow by the scale alone, and it can go down
            is_scaled = scaler is not None and scaler.scale.item() > scaler.floor
            return is_scaled or not nonfinite_names(grads)

    def in_fp32(self, names: Sequence[str] | None) -> contextlib.AbstractContextManager[None]:
        """Run these modules in fp32. For ``[""]`` it is the whole step, without autocast and loss scale."""
        return contextlib.nullcontext() if names is None else self._dry_run.in_fp32(self.pending, names)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """What the user's program was seen to write to is put back."""
        live = {**tensors_by_kind(self._state), **self._data} if self._written else {}
        kept = [*(live[name] for name in self._written & set(live)), *self._others]
        saved = [(tensor, tensor.detach().clone()) for tensor in kept]
        try:
            yield
        finally:
            _write_back(saved)

    @contextlib.contextmanager
    def _stage(self, pending: PendingStep) -> Iterator[None]:
        began = time.monotonic()
        self.num += 1
        try:
            untouched = self._state.untouched(self.parts.buffers, self._data.values(), self._generators)
            with untouched, self._dry_run.stage(pending, alone=True):
                yield
        finally:
            self.seconds_of_last = time.monotonic() - began


class _Alone(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse collectives: the other ranks take no part in a replay, so a collective would hang."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _compat.is_collective(func):
            name = func.overloadpacket.__name__.strip("_")
            raise RuntimeError(f"the step talks to other ranks ({name}), and cannot be run again on one alone")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _write_back(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in saved:
        tensor.copy_(copy)


def _whole_memory(tensor: Tensor) -> list[Tensor]:
    """All bytes that a tensor may be a part of; nothing for one that has none of its own, such as a sparse one."""
    if tensor.layout is not torch.strided or tensor.is_meta or _compat.storage_of(tensor) is tensor:
        return []
    with torch.inference_mode(tensor.is_inference()):
        return [torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())]


def _data(pending: PendingStep) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the step's batches, by name."""
    for place, micro in enumerate(pending.microbatches):
        name = "batch" if len(pending.microbatches) == 1 else f"microbatches[{place}]"
        if isinstance(micro.loss_fn, TapedRun):
            in_objects = tensors_in_objects(micro.loss_fn)
            yield from ((f"{name}[{path!r}]", tensor) for path, tensor in in_objects)
        yield from named_tensors(micro.batch, name)


def _can_be_written_to(tensor: Tensor) -> bool:
    """True if no two elements share memory."""
    if tensor.layout is not torch.strided:
        return False
    return all(stride != 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
