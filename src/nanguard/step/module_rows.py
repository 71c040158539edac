"""The rows of a tape that are calls of modules. The tape is paused inside them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nanguard import _compat, _compat_modes
from nanguard.state.trees import PLAIN, mapped
from nanguard.step.calls import Call
from nanguard.step.module_states import ModuleStates
from nanguard.step.older_tapes import OlderRows
from nanguard.step.switched_mode import SwitchedMode
from nanguard.step.tape import CallTape, Made, Outside, Unseen, changed, is_readable

SWEEP_AFTER_CALLS = 32
"""Then rows that nothing depends on any more are removed: an evaluation with gradients on holds its data otherwise."""

_WATCHED_STEPS = 8
"""In these first steps a copy of what modules are given is kept; after them only if a module writes to it."""

_MOST_SEARCHED = 256
"""So many results of rows are searched for losses before another pass: an agent makes passes by the thousand."""

_LARGEST_COPY = 1 << 22
"""In elements: a larger tensor is not copied."""

_NOTHING: dict[str, Any] = {}
_is_grad_enabled, _is_transformed = torch.is_grad_enabled, _compat_modes.is_transformed


class ModuleRows(SwitchedMode):
    """What a tape is written with, and its rows that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: CallTape | None = None
        self._rows: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        self._marks: dict[int, tuple[ref[Tensor], Made]] = {}
        self._older: OlderRows | None = None
        self._outside: dict[int, Outside] = {}
        self._last_call: tuple[int, Call] | None = None
        self._num_calls = self._num_watched = 0
        self._keeps, self._writes_to_data = True, False
        self._states = ModuleStates()

    @abstractmethod
    def _new_token(self, tensor: Tensor) -> Any:
        """Of a tensor that no row of this tape made."""

    @abstractmethod
    def _look_at_length(self) -> None:
        """Removes rows if there are too many."""

    def before_module(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A module that is a row of its own is about to be called, with the tape paused. Returns what is noted."""
        if self._last_call is not None:
            self._note_losses(*self._last_call)
        given, are_new = [], not (self._marks or self._older)  # the first call of a step is given data
        for each in args:
            if are_new and type(each) is Tensor and not _is_transformed(each):
                given.append(self._from_outside(each))
            elif isinstance(each, Tensor):
                given.append(self._token_for_module(each))
            else:
                given.append(each if type(each) in PLAIN else self._noted_for_module(each))
        return tuple(given), self._noted_for_module(kwargs) if kwargs else _NOTHING

    def note_state(self, module: nn.Module) -> None:
        """What it holds in attributes before its first call in this step."""
        if self.tape is not None and id(module) not in self.tape.states and _is_grad_enabled():
            noted = self._states.of(module)
            if noted:
                self.tape.states = {**self.tape.states, id(module): noted}

    def after_module(self, call: Call, made: list[Tensor]) -> None:
        """It has returned the tensors ``made``; ``call.taped`` is what ``before_module`` returned."""
        if self.tape is not None and call.taped is not None and not self._is_inside:
            number, marks = self._next, self._marks
            conditions = _is_grad_enabled(), call.autocast, call.rng
            self._rows[number] = (None, *call.taped, call.code, call.at, *conditions, call)
            for place, tensor in enumerate(made):
                marks[id(tensor)] = ref(tensor), Made(number, place)
            self._next, self.tape.has_calls = number + 1, True
            self._last_call = (number, call) if call.has_values else None
            self._num_calls += 1
            if self._num_calls >= SWEEP_AFTER_CALLS or not number & 63:
                self._look_at_length()

    def _note_losses(self, row: int, call: Call) -> None:
        """Another pass begins: what the one before it ended in, since the program may leave it out. Does not sync."""
        self._last_call = None
        if self._next == row + 1 or call.has_gradients or len(self._marks) > _MOST_SEARCHED:
            return
        alive = [(held(), made) for held, made in self._marks.values() if made.number > row]
        call.losses = [
            (made, tensor.detach(), _compat.version(tensor))
            for tensor, made in alive
            if type(tensor) is Tensor and tensor.numel() == 1 and tensor.requires_grad and not _is_transformed(tensor)
        ]

    def _from_outside(self, tensor: Tensor) -> Outside:
        known, version = self._outside.get(id(tensor)), _compat.version(tensor)
        if known is None or known.version != version:
            kept = _copy_of_data(tensor) if self._keeps and _is_grad_enabled() else None
            known = self._outside[id(tensor)] = Outside(tensor, version, kept)
        return known

    def _learn(self) -> None:
        """The step is over: whether the model writes to its data. Copies are kept in the first steps, or if it does."""
        if self._keeps and self._outside:
            self._num_watched += 1
            self._writes_to_data |= any(each.kept is not None and changed(each) for each in self._outside.values())
            self._keeps = self._writes_to_data or self._num_watched < _WATCHED_STEPS

    def _token_for_module(self, tensor: Tensor) -> Any:
        """What was made unseen is held by the record of the call anyway."""
        mark = self._marks.get(id(tensor))
        if mark is not None and mark[0]() is tensor:
            return mark[1]
        if self._older is None and not _is_transformed(tensor):
            return self._from_outside(tensor)
        found = self._new_token(tensor)
        return self._from_outside(tensor) if type(found) is Unseen else found

    def _noted_for_module(self, tree: Any) -> Any:
        """As ``_noted``, for any container."""
        if isinstance(tree, Tensor):
            return self._token_for_module(tree)
        kind = type(tree)
        if kind in PLAIN:
            return tree
        if kind is tuple:
            return tuple([self._noted_for_module(child) for child in tree])
        if kind is dict:
            return {key: self._noted_for_module(child) for key, child in tree.items()}
        return mapped(tree, lambda leaf: self._token_for_module(leaf) if isinstance(leaf, Tensor) else None)


def _copy_of_data(tensor: Tensor) -> Tensor | None:
    """Of what a model may write to, as in ``x += self.layer(x)``, although the tensor is that of the batch."""
    if tensor.requires_grad or tensor.numel() > _LARGEST_COPY or tensor.is_inference():
        return None
    if not is_readable(tensor) or _compat_modes.is_capturing():
        return None
    with _compat_modes.unwatched():
        return tensor.clone()
