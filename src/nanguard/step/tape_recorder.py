"""Writes the tape: a mode of torch that is told of every torch call, outside modules and backward passes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nanguard import _compat_modes
from nanguard.source.frames import position_of
from nanguard.state.rng import RngState
from nanguard.state.trees import PLAIN, tensors
from nanguard.step.module_rows import SWEEP_AFTER_CALLS, ModuleRows
from nanguard.step.older_tapes import OlderRows, follow
from nanguard.step.tape import (
    CallTape,
    Drawn,
    Made,
    Outside,
    TapedLoss,
    Unseen,
    changed,
    is_readable,
    sets_data_of_trained,
)
from nanguard.step.tape_functions import FUNCTION_CALLS, CompiledCalls
from nanguard.step.tape_kinds import BACKWARD, CARRIES, CUTS, DRAWS, MAKES, ROW, WRITES, kind_of
from nanguard.step.tape_warnings import WarnedLines

_MOST_ROWS = 4096
"""A longer tape is cut: what is older cannot be run again."""

_SWEEP_AFTER_ROWS = 1024
"""Then rows that nothing depends on any more are removed: an evaluation with gradients on holds its data otherwise."""

_get_ident = threading.get_ident
_NOTHING: dict[str, Any] = {}
_NO_AUTOCAST: tuple[bool, torch.dtype | None] = (False, None)
_is_grad_enabled, _is_any_autocast_enabled = torch.is_grad_enabled, _compat_modes.is_any_autocast_enabled
_is_transformed, _requires_grad_ = _compat_modes.is_transformed, Tensor.requires_grad_


class TapeRecorder(ModuleRows):
    """One thread writes at a time: the one that begins. ``note`` gives the random states; ``device`` is a type.

    While it is on, all torch calls of the thread pass through it. It is off inside modules that are rows of their own
    (``pause``), in compiled code, and from each backward pass until the next forward pass (``stop``).
    """

    def __init__(self, note: Callable[[], RngState | None], device: str) -> None:
        super().__init__()
        self._note, self.device = note, device
        self._first: OlderRows | None = None
        self._kinds: dict[Any, int] = {}
        self._sweep_at = _SWEEP_AFTER_ROWS
        self._compiled: list[tuple[int, Any]] = []  # the compiled call that is under way, if there is one
        self._compiled_calls = CompiledCalls(self._enter_compiled, self._leave_compiled, self._compiled)
        self._warnings = WarnedLines(TapeRecorder.__torch_function__.__code__)
        self._listens_for_good = self._hears_functions = self._was_refused = False

    # ---- when it is on -------------------------------------------------------------------------------------------

    def begin(self, tape: CallTape, *, keeps_older: bool = False, is_refused: bool = False) -> None:
        """Goes on writing, to ``tape``. With ``keeps_older``, rows may use what the tape before it made.

        ``is_refused`` says that the step before was: of several such steps in a row the first tape is kept, too.
        """
        thread = _get_ident()
        if self.is_begun and self._thread != thread:
            return
        if tape is not self.tape:
            self._turn_to(tape, keeps_older=keeps_older, is_refused=is_refused)
        if not self.is_begun:
            if self.active.mode is not None:
                self.active.mode.stop()
            calls = self._compiled_calls
            if not (calls.has_begun or calls.begin()):  # compiled code would depend on whether we are on
                return
            if not self._listens_for_good:
                self._listen()
            self._thread, self.is_begun, self.active.mode = thread, True, self
        self.go_on(True)  # or a module that was called has raised

    def listen_for_good(self) -> None:
        """To what torch does not tell its modes of: also between ``stop`` and ``begin``, until ``close``."""
        self._compiled_calls.begin()
        self._listen()
        self._listens_for_good = True

    def _listen(self) -> None:
        self._warnings.begin()
        if not self._hears_functions:
            self._hears_functions = True
            FUNCTION_CALLS.add(self)

    def _stop_listening(self) -> None:
        self._compiled_calls.end()
        self._warnings.end()

    def close(self) -> None:
        """Nothing of ours is left in torch."""
        self.forget()
        self._stop_listening()
        self._listens_for_good = self._hears_functions = False
        FUNCTION_CALLS.remove(self)

    def _turn_to(self, tape: CallTape, *, keeps_older: bool, is_refused: bool) -> None:
        if not (is_refused and self._was_refused):
            self._first = self._older = None
        self._was_refused = is_refused
        self._learn()
        if self.tape is not None and (keeps_older or (is_refused and self._first is None)):
            self._first, self._older = follow(self._first, self.tape.rows, self._marks)
        self.tape, self._rows, self._marks, self._outside = tape, tape.rows, {}, {}
        self._sweep_at, self._num_calls, self._last_call = _SWEEP_AFTER_ROWS, 0, None

    def stop(self) -> None:
        """Until ``begin``. Not by another thread, nor from inside a call that is being noted."""
        if not self.is_begun or self._is_inside or self._thread != _get_ident():
            return
        self.pause()
        if not self._listens_for_good:
            self._stop_listening()
        self._compiled.clear()
        self.is_begun, self.active.mode = False, None

    def forget(self) -> None:
        """The step is over: nothing of it is held here any more."""
        self.stop()
        self._learn()
        self.tape, self._rows, self._marks, self._outside, self._first, self._older = None, {}, {}, {}, None, None
        self._last_call = None

    # ---- rows ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every torch call. Written for speed: on a slow host a microsecond here is a percent of a step."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if not kind:
            return func(*args, **kwargs) if kwargs else func(*args)
        is_grad, rows, is_plain = _is_grad_enabled(), self._rows, kind == ROW
        if not is_plain and (kind == BACKWARD or (kind & WRITES and not (is_grad or rows))):  # an average, say
            self._is_inside = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._is_inside = False
        given: list[Any] = []
        marks = self._marks
        for each in args:
            mark = marks.get(id(each))
            if mark is not None and mark[0]() is each:
                given.append(mark[1])
            elif isinstance(each, Tensor):
                given.append(self._new_token(each))
            else:
                given.append(each if type(each) in PLAIN else self._noted(each))
        named = _NOTHING
        if kwargs:
            named = {key: each if type(each) in PLAIN else self._noted(each) for key, each in kwargs.items()}
        rng = None if is_plain or not kind & DRAWS else self._note()
        self._is_inside = True
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except Exception:
            raw = func, given, named, *position_of(sys._getframe(1)), is_grad, _NO_AUTOCAST, rng
            self._note_raised(raw, (args, kwargs))
            raise
        finally:
            self._is_inside = False
        if not is_plain:
            if kind & (WRITES | CUTS) and given and self._is_no_row(kind, func, given[0], args, result):
                return result
            if kind & MAKES and named.get("device") is None and isinstance(result, Tensor):
                named = {**named, "device": result.device}
        if type(result) is not Tensor or kind & MAKES:
            self._add(func, given, named, rng, args, result, sys._getframe(1))
            return result
        code, at = position_of(sys._getframe(1))
        autocast = self._autocast() if _is_any_autocast_enabled() else _NO_AUTOCAST
        number = self._next
        self._next = number + 1
        rows[number] = func, given, named, code, at, is_grad, autocast, rng
        marks[id(result)] = ref(result), Made(number, 0)
        if not number & 63:
            self._look_at_length()
        return result

    def _is_no_row(self, kind: int, func: Any, first: Any, args: Any, result: Any) -> bool:
        """Whether a write to the first argument, or a cut of it from its graph, is no part of the step."""
        if not kind & WRITES:
            return type(first) is Unseen  # what the program keeps from an earlier step is data from here on
        if kind & CARRIES:
            self._marks.pop(id(result), None)
            return True
        if self.tape is not None and type(first) is Outside and changed(first) and not args[0].requires_grad:
            self.tape.note_change(func, args, position_of(sys._getframe(2)))
            return True  # data that are being prepared
        is_trained = type(result) is Tensor and result.is_leaf and result.requires_grad and func is not _requires_grad_
        if is_trained and not self._is_of_step(first):
            self._marks.pop(id(result), None)  # an update of what is trained, which belongs to the step before
            return True
        return False

    def _is_of_step(self, token: Any) -> bool:
        """Whether a tensor with gradients was made in this step, before a backward pass, as samples of a model are."""
        return type(token) is Made and self.tape is not None and not self.tape.losses

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function that is one row, whatever it does inside, such as a Function of autograd."""
        given, named, rng = self._noted(args), self._noted(kwargs), self._note()
        was_on = self.pause()
        try:
            result = function(*args, **kwargs)
        finally:
            self.go_on(was_on)
        self._add(function, given, named, rng, args, result, sys._getframe(1))
        return result

    def note_losses(
        self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None] = (), trained: Sequence[Tensor] = ()
    ) -> None:
        """A backward pass begins at these. ``trained`` are tensors that the program trains without an optimizer."""
        if self.tape is not None and self.is_own():
            for tensor in trained:
                mark = self._marks.get(id(tensor))
                if mark is not None and mark[0]() is tensor:
                    self.tape.note_trained(mark[1], tensor)
            roots = (self._token(losses[0]),) if len(losses) == 1 else tuple(map(self._token, losses))
            given = tuple([None if gradient is None else self._token(gradient) for gradient in gradients])
            self.tape.losses.append(TapedLoss(roots, given, self._next - 1))

    def held(self) -> Iterator[tuple[Made, Tensor]]:
        """The results of rows that still exist, the last one first."""
        for ref_, made in sorted(self._marks.values(), key=lambda mark: -mark[1].number):
            tensor = ref_()
            if tensor is not None:
                yield made, tensor

    def _note_raised(self, raw: tuple[Any, ...], args: Any) -> None:
        """Of tensors on a CPU only: others would have to be waited for."""
        given = [tensor for tensor in tensors(args) if is_readable(tensor) and tensor.device.type == "cpu"]
        if self.tape is not None and any(not tensor.isfinite().all() for tensor in given):
            self.tape.raised = self._next
            self._append(raw, [])

    def _noted(self, tree: Any) -> Any:
        """The arguments of a call, with tokens for tensors."""
        kind = type(tree)
        if kind in PLAIN:
            return tree
        if isinstance(tree, Tensor):
            return self._token(tree)
        if kind is tuple:
            return tuple([self._noted(child) for child in tree])
        if kind is list or kind is torch.Size:
            return [self._noted(child) for child in tree]
        if kind is dict:
            return {key: self._noted(child) for key, child in tree.items()}
        if kind is slice:
            return slice(self._noted(tree.start), self._noted(tree.stop), self._noted(tree.step))
        if kind is torch.Generator:
            return Drawn(tree.device, tree.get_state())
        return tree

    def _token(self, tensor: Tensor) -> Any:
        mark = self._marks.get(id(tensor))
        return mark[1] if mark is not None and mark[0]() is tensor else self._new_token(tensor)

    def _new_token(self, tensor: Tensor) -> Any:
        """Of a tensor that no row of this tape made."""
        if self._older is not None:
            mark = self._older[1].get(id(tensor))
            if mark is not None and mark[0]() is tensor and self.tape is not None:
                self.tape.older = self._older[0]
                return mark[1]
        if _is_transformed(tensor):
            if self.tape is not None and self.tape.transformed is None:
                self.tape.transformed = self._next
            return Unseen()
        if tensor.grad_fn is not None and id(tensor) not in self._outside:  # a module may have been given it
            return Unseen()
        return self._from_outside(tensor)

    def _add(
        self, func: Any, args: Any, kwargs: Any, rng: RngState | None, given: Any, result: Any, frame: FrameType | None
    ) -> None:
        if isinstance(result, Tensor):
            made = [result]
        elif isinstance(result, (tuple, list)):
            made = list(tensors(result))
        elif result is None and given and isinstance(given[0], Tensor):
            if sets_data_of_trained(func, given[0]) and not self._is_of_step(args[0]):
                self._marks.pop(id(given[0]), None)
                return
            made = [given[0]]
        else:
            return
        if made:
            code, at = position_of(frame)
            autocast = self._autocast() if _is_any_autocast_enabled() else _NO_AUTOCAST
            self._append((func, args, kwargs, code, at, _is_grad_enabled(), autocast, rng), made)

    def _autocast(self) -> tuple[bool, torch.dtype | None]:
        return torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def _append(self, raw: tuple[Any, ...], made: list[Tensor]) -> None:
        number, self._next = self._next, self._next + 1
        self._rows[number] = raw
        for place, tensor in enumerate(made):
            self._marks[id(tensor)] = ref(tensor), Made(number, place)
        if not number & 63:
            self._look_at_length()

    def _look_at_length(self) -> None:
        tape = self.tape
        if tape is not None and (len(tape.rows) >= self._sweep_at or self._num_calls >= SWEEP_AFTER_CALLS):
            self._sweep(tape)
            self._rows = tape.rows

    def _sweep(self, tape: CallTape) -> None:
        """Removes the rows that no living tensor and no backward pass depends on."""
        self._marks = {key: mark for key, mark in self._marks.items() if mark[0]() is not None}
        wanted = [mark[1] for mark in self._marks.values()]
        wanted += [root for loss in tape.losses for root in loss.roots if isinstance(root, Made)]
        kept = set(tape.needed(wanted, self._next))
        tape.rows = {number: raw for number, raw in tape.rows.items() if number in kept}
        if len(tape.rows) >= _MOST_ROWS:
            tape.rows, tape.losses, tape.older, tape.was_cut, self._marks = {}, [], {}, True, {}
        self._outside = {}
        self._sweep_at, self._num_calls = max(_SWEEP_AFTER_ROWS, 2 * len(tape.rows)), 0

    # ---- compiled code -------------------------------------------------------------------------------------------

    def _enter_compiled(self, frame: FrameType) -> None:
        """Off, or compiled code would depend on us. The whole call is one row."""
        if not self.may_call():
            return
        known = frame.f_locals  # of torch's own function
        function, args, kwargs = known.get("fn"), known.get("args", ()), known.get("kwargs", {})
        noted = function, self._noted(args), self._noted(kwargs), self._note(), args
        self.pause()
        self._compiled[:] = [(id(frame), noted)]

    def _leave_compiled(self, frame: FrameType) -> None:
        if not self._compiled or self._compiled[0][0] != id(frame):
            return
        _, (function, args, kwargs, rng, given) = self._compiled.pop()
        self.go_on(True)
        result = frame.f_locals.get("result")
        if callable(function) and result is not None:
            self._add(function, args, kwargs, rng, given, result, frame)
