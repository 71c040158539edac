"""Records the calls of the model in the user's own loop, so that they can be made again after a bad step.

Only references are kept: the inputs of the outermost module, random states, and the gradient that reached its output,
if it is small. Nothing here waits for the device.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import setitem
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanguard import _compat, _compat_modes
from nanguard.source.frames import Place, SavedPosition, place_of, position_of
from nanguard.state.names import unwrapped
from nanguard.state.rng import RngReader, RngState, reader_now
from nanguard.state.trees import is_float, mapped, tensors, tensors_returned

if TYPE_CHECKING:
    from nanguard.step.tape import Made
    from nanguard.step.tape_recorder import TapeRecorder

_MOST_CALLS = 16
_LARGEST_GRADIENT = 32 << 20
"""In bytes: a gradient that is kept lives until the step's reading has been heard of."""

_NO_AUTOCAST = (False, torch.bfloat16)
_is_any_autocast_enabled, _is_transforming = _compat_modes.is_any_autocast_enabled, _compat_modes.is_transforming
_is_grad_enabled = torch.is_grad_enabled


@dataclass(init=False, eq=False)  # its own __init__ takes less time, and there is one at each step
class Call:
    """One call of the model, or of one of several modules that train together: ``called``, which may be a wrapper.

    ``code`` and ``at`` are the program's position. ``taped`` is what the tape notes of the arguments, if it does.
    ``has_values``: it can be made again. It was made with gradients on, and not inside ``torch.func.vmap`` or others.
    ``gradients`` are those of its outputs, None if there was none or if it is too large.
    ``outputs`` are the results that are small enough, without their graph, until the backward pass begins.
    If it ``gave_nonfinite`` values, the gradients are not used, in other conditions either.
    ``is_evaluation``: the module was in ``eval()``, and has been called in ``train()`` before.
    ``losses`` are numbers that the program had made of its outputs by the next call, with their rows on the tape.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: RngState | None
    autocast: tuple[bool, torch.dtype]
    code: CodeType | SavedPosition | None
    at: int
    gradients: list[Tensor | None]
    outputs: list[Tensor]
    graphs: list[Callable[[], Any]]
    """Each returns None once the graph of an output is gone."""
    called: nn.Module | None = None
    taped: tuple[Any, Any] | None = None
    has_values: bool = False
    misses_gradients: bool = False
    gave_nonfinite: bool = False
    has_returned: bool = False
    is_evaluation: bool = False
    losses: Sequence[tuple[Made, Tensor, int | None]] = ()

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rng: RngState | None,
        autocast: tuple[bool, torch.dtype],
        code: CodeType | SavedPosition | None = None,
        at: int = 0,
    ) -> None:
        self.args, self.kwargs, self.rng, self.autocast, self.code, self.at = args, kwargs, rng, autocast, code, at
        self.gradients, self.outputs, self.graphs = [], [], []

    @property
    def place(self) -> Place | None:
        """The program's line."""
        return place_of(self.code, self.at)

    @property
    def module(self) -> nn.Module | None:
        """The user's own module that was called; None if that is the model."""
        return None if self.called is None else unwrapped(self.called)

    @property
    def is_discarded(self) -> bool:
        """Whether the program has thrown the outputs away, without a backward pass. Does not sync."""
        if not self.outputs or not self.graphs:
            return False
        for graph in self.graphs:
            if graph() is not None:
                return False
        return not self.has_gradients

    @property
    def inputs(self) -> list[Tensor]:
        """The floating-point tensors among the arguments."""
        return [tensor for tensor in tensors((self.args, dict(self.kwargs))) if is_float(tensor)]

    @property
    def known_gradients(self) -> list[Tensor]:
        return [gradient for gradient in self.gradients if gradient is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether any reached its outputs."""
        return any(gradient is not None for gradient in self.gradients)

    @property
    def is_part_of_step(self) -> bool:
        """Whether a backward pass has reached it. Inside one that is not known yet."""
        return self.misses_gradients or self.has_gradients

    def again(self, model: nn.Module) -> Tensor:
        """Calls the model once more; the backward pass of what comes back gives it the same gradients. Syncs."""
        args, kwargs = cut_off(self.args), cut_off(self.kwargs)
        outputs = _outputs((self.module or model)(*args, **kwargs))
        if any(not bool(torch.isfinite(output.detach()).all()) for output in outputs):
            self.gave_nonfinite = True
        parts = []
        for place, output in enumerate(outputs):
            gradient = self.gradients[place] if place < len(self.gradients) and not self.gave_nonfinite else None
            if gradient is None:
                parts.append((output if output.is_complex() else output.float()).sum())
            else:
                parts.append(with_gradient(output, gradient))
        if not parts:
            raise ValueError("the model gave no tensor that a gradient could reach")
        return torch.stack([part.real if part.is_complex() else part for part in parts]).sum()


def with_gradient(output: Tensor, gradient: Tensor) -> Tensor:
    """A zero whose backward pass gives ``output`` this gradient."""
    zero: Tensor = _Given.apply(output, gradient.detach())  # type: ignore[no-untyped-call]
    return zero


class _Given(torch.autograd.Function):
    """Zero, with this gradient: nothing is computed that could overflow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros((), dtype=None if output.is_complex() else torch.float32)

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return ctx.gradient, None


class _UnderWay(threading.local):
    """Calls of this thread that have not returned, if hooks tell of them; None for one that is not recorded."""

    def __init__(self) -> None:
        self.calls: list[Call | None] = []


class CallRecorder:
    """Records calls of the outermost module; on the tape of ``taper`` one is one row.

    ``rng_reader`` reads the random states; None if it is not known yet what the model draws from.

    A host that knows of each call calls ``begin`` and ``end``. For others ``listen`` adds hooks to the module.
    """

    def __init__(self, device: str, taper: TapeRecorder, rng_reader: RngReader | None = None) -> None:
        self.device, self._taper, self.rng_reader = device, taper, rng_reader
        self._undo: list[Callable[[], Any]] = []
        self._was_in_training = False

    def listen(self, model: nn.Module, opens: Callable[[], list[Call] | None]) -> None:
        """``opens`` gives the list to write to, or None. Copies and pickles of the module do not listen."""
        under_way = _UnderWay()

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            is_taped = self._taper.pause()
            if is_taped:  # one that is on the tape is the outermost: those before it have raised
                under_way.calls.clear()
            call = self.begin(opens(), args, kwargs, sys._getframe(1), is_taped=is_taped, module=module)
            under_way.calls.append(call)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if under_way.calls and (call := under_way.calls.pop()) is not None:
                self.end(module, call, output)

        before = vars(model).get("__prepare_scriptable__")
        self._undo = [
            model.register_forward_pre_hook(UncopiedHook(enter), with_kwargs=True).remove,
            model.register_forward_hook(UncopiedHook(leave)).remove,
            lambda: vars(model).pop("__prepare_scriptable__", None),
        ]
        if before is not None:
            self._undo.append(lambda: vars(model).update(__prepare_scriptable__=before))
        vars(model)["__prepare_scriptable__"] = _Unhooked(model, before)

    def stop(self) -> None:
        """Takes the hooks off again."""
        for undo in self._undo:
            undo()
        self._undo = []

    def begin(
        self,
        calls: list[Call] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: FrameType,
        *,
        is_taped: bool,
        module: nn.Module,
    ) -> Call | None:
        """A call of ``module`` begins. It is recorded in ``calls``, or on the tape, which is paused for it, or None."""
        has_values = _is_grad_enabled() and not _is_transforming()
        if not (is_taped or (has_values and calls is not None)):
            return None
        mode = _NO_AUTOCAST
        if _is_any_autocast_enabled():
            mode = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        code, at = position_of(caller)
        call = Call(args, kwargs, (self.rng_reader or reader_now()).before_call(), mode, code, at)
        call.has_values = has_values
        if has_values and calls is not None:
            if len(calls) >= _MOST_CALLS:
                del calls[0]
            calls.append(call)
        if is_taped:
            call.taped = self._taper.before_module(args, kwargs)
            self._taper.note_state(module)
        return call

    def end(self, module: nn.Module, call: Call, output: Any) -> None:
        """It has returned ``output``."""
        made = [output] if isinstance(output, Tensor) else tensors_returned(output)
        if self.rng_reader is not None and call.rng is not None and call.rng.host is not None:
            self.rng_reader.after_call(call.rng)
        if call.has_values:
            call.is_evaluation = self._was_in_training and not module.training
            self._was_in_training = self._was_in_training or module.training
            _save_gradients(call, made)
        if call.taped is not None:
            self._taper.after_module(call, made)
            self._taper.go_on(True)

    def raised(self, call: Call) -> None:
        """It has not returned."""
        if call.taped is not None:
            self._taper.go_on(True)


def _save_gradients(call: Call, made: list[Tensor]) -> None:
    call.has_returned, gradients = True, call.gradients
    for tensor in made:
        if not tensor.requires_grad:
            continue
        gradients.append(None)
        if tensor.is_leaf or tensor.numel() * tensor.element_size() > _LARGEST_GRADIENT:
            call.misses_gradients = True  # a hook on a leaf, a parameter that is given out, would stay for ever
        else:
            saver = partial(setitem, gradients, len(gradients) - 1)  # nothing of it runs in Python
            _compat.hook_gradient(tensor, saver)
            call.outputs.append(tensor.detach())
            call.graphs.append(weakref.ref(saver))


class UncopiedHook:
    """Does nothing in copies, in pickles, and while torch records the program (``torch.compile``, ``torch.jit``)."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None and not _compat.is_recording():
            self._function(*args)

    def __deepcopy__(self, memo: Any) -> UncopiedHook:
        return UncopiedHook()

    def __reduce__(self) -> tuple[type[UncopiedHook], tuple[()]]:
        return UncopiedHook, ()


class _Unhooked:
    """The model without our hooks, for ``torch.jit.script``, which would try to compile them and raise."""

    def __init__(self, model: nn.Module, before: Callable[[], nn.Module] | None) -> None:
        self._model, self._before = model, before

    def __call__(self) -> nn.Module:
        model = self._model if self._before is None else self._before()
        kind = type(model)
        plain = kind.__new__(kind)
        vars(plain).update(vars(model))
        vars(plain).pop("__prepare_scriptable__", None)
        for name in _compat.FORWARD_HOOKS:
            hooks = vars(model)[name].items()
            vars(plain)[name] = OrderedDict((key, hook) for key, hook in hooks if not isinstance(hook, UncopiedHook))
        return plain


def cut_off(tree: Any) -> Any:
    """Detaches tensors that other modules have made: their graph has been freed."""
    return mapped(tree, lambda t: t.detach().requires_grad_() if isinstance(t, Tensor) and not t.is_leaf else None)


def _outputs(tree: Any) -> list[Tensor]:
    """Tensors that a gradient can reach, in a fixed order."""
    return [tensor for tensor in tensors_returned(tree) if tensor.requires_grad]
