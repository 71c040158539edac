"""Writes the tape of a step down as plain values: torch functions by name, tensors by where the bundle has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.incidents.call_names import PLAIN_ARGUMENTS, name_of_function
from nanguard.incidents.files import BundleDraft, tree_of_rng
from nanguard.records.words import reason
from nanguard.state.names import named_weights, plain_name, unwrapped
from nanguard.state.rng import RngState
from nanguard.state.snapshots.codec import Tagged, encode, unfit_tensor
from nanguard.state.trees import mapped
from nanguard.step.tape import CallTape, Drawn, Made, Outside, Row, TapedLoss, Unseen, name_of

RepeatableTape = Callable[[bool], tuple[CallTape, tuple[str, ...]]]
"""Gives what of a tape can be run again, and why the rest cannot be; with True, what modules were given is data."""


def add_tape(draft: BundleDraft, repeatable: RepeatableTape, model: nn.Module, limit: int) -> None:
    """Adds the tape, or says why it is left out. What led to the inputs of modules is left out if it is too large."""
    try:
        tape, obstacles = repeatable(False)
        if not tape.losses:
            draft.leave_out("tape", "; ".join(obstacles) or "no backward pass was seen")
            return
        is_added = draft.add("tape", {"tape": tree_of_tape(tape, model, draft.tensors)}, limit)
        if not is_added and tape.has_calls:
            smaller, _ = repeatable(True)
            draft.left_out.pop()
            draft.add("tape", {"tape": tree_of_tape(smaller, model, draft.tensors)}, limit)
    except Exception as error:  # the arguments of a call may be of any class
        draft.leave_out("tape", reason(error))


def tree_of_tape(tape: CallTape, model: nn.Module, saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tape for ``flatten``. ``saved`` are the tensors that the bundle holds already, by name.

    Raises ``ValueError`` that names the first call that cannot be written down, and says why.
    """
    return _TapeWriter(tape, model, saved).tree()


class _TapeWriter:
    def __init__(self, tape: CallTape, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        self._tape = tape
        self._modules, self._weights = _names(tape, model)
        self._saved = {id(tensor): name for name, tensor in saved.items()}
        self._tensors: dict[int, Tensor] = {}
        self._states: dict[Any, RngState] = {}

    def tree(self) -> dict[str, Any]:
        rows = [self._row(number, Row(*raw)) for number, raw in self._tape.rows.items()]
        losses = [self._loss(loss) for loss in self._tape.losses]
        outside = list(self._tensors.values())
        return {
            "rows": rows,
            "losses": losses,
            "tensors": outside,
            "parameters": [place for place, tensor in enumerate(outside) if isinstance(tensor, nn.Parameter)],
            "random": [tree_of_rng(state) for state in self._states.values()],
        }

    def _row(self, number: int, row: Row) -> dict[str, Any]:
        try:
            told = self._called(row)
        except ValueError as error:
            raise ValueError(f"{_in_words(row)} {error}") from None
        told |= {"number": number, "place": None if row.place is None else list(row.place)}
        told |= {"names": row.argument_names, "grad": row.is_grad_enabled}
        if row.autocast[0]:
            told["autocast"] = row.autocast[1]
        if row.rng is not None:
            told["random"] = self._state(row.rng)
        return told

    def _called(self, row: Row) -> dict[str, Any]:
        if row.call is not None:
            args, kwargs = mapped((row.args, dict(row.kwargs)), self._leaf)
            return {"module": self._module(row), "args": args, "kwargs": kwargs}
        name = name_of_function(row.function)
        if name is None:
            raise ValueError("is not a torch function that can be found again by its name")
        return {"function": name, "args": self._value(tuple(row.args)), "kwargs": self._value(dict(row.kwargs))}

    def _module(self, row: Row) -> str:
        module = None if row.call is None else row.call.module
        if module is None:
            return ""
        name = self._modules.get(id(unwrapped(module)))
        if name is None:
            raise ValueError("is no part of the model that is trained")
        return name

    def _loss(self, loss: TapedLoss) -> dict[str, Any]:
        return {"roots": self._value(loss.roots), "gradients": self._value(loss.gradients), "last": loss.last}

    def _value(self, value: Any) -> Any:
        """An argument of a torch function."""
        kind = type(value)
        if kind in PLAIN_ARGUMENTS:
            return value
        if kind is tuple or kind is list:
            return kind(self._value(child) for child in value)
        if kind is dict:
            return {key: self._value(child) for key, child in value.items()}
        if kind is slice:
            return Tagged("$slice", [self._value(each) for each in (value.start, value.stop, value.step)])
        if value is Ellipsis:
            return Tagged("$ellipsis", None)
        if kind in (torch.layout, torch.memory_format):
            return Tagged(f"${kind.__name__}", str(value).removeprefix("torch."))
        return self._token(value)

    def _leaf(self, value: Any) -> Any:
        """An argument of a module, in any container; None for one that is written as it is."""
        return None if type(value) in PLAIN_ARGUMENTS else self._token(value)

    def _token(self, value: Any) -> Any:
        if isinstance(value, Made):
            held = self._tape.trained.get((value.number, value.place))
            return Tagged("$made", [value.number, value.place]) if held is None else self._tensor(held)
        if isinstance(value, Outside):
            return self._tensor(value.value)
        if isinstance(value, Unseen):
            raise ValueError("was given a tensor that no call on the tape made")
        if isinstance(value, Drawn):
            raise ValueError("draws from a random generator of the program's own")
        try:
            encode(value)  # a number of NumPy's
        except ValueError:
            raise ValueError(f"was given something that is no plain value: {type(value).__name__}") from None
        return value

    def _tensor(self, tensor: Tensor) -> Tagged:
        name = self._weights.get(id(tensor))
        if name is not None:
            return Tagged("$weight", name)
        if id(tensor) in self._saved:
            return Tagged("$saved", self._saved[id(tensor)])
        if trouble := unfit_tensor(tensor):
            raise ValueError(f"was given {trouble} which cannot be saved")
        self._tensors.setdefault(id(tensor), tensor)
        return Tagged("$outside", list(self._tensors).index(id(tensor)))

    def _state(self, state: RngState) -> int:
        """The number of a random state. Many calls begin with the same one."""
        python, numpy = state.host or (None, None)
        of_numpy = None if numpy is None else (numpy[0], numpy[1].tobytes(), *numpy[2:])
        key = bytes(state.cpu.tolist()), state.cuda, python, of_numpy
        self._states.setdefault(key, state)
        return list(self._states).index(key)


def _names(tape: CallTape, model: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """Names of modules and of weights, by identity. If only one module is called, they begin inside it.

    Weights outside the modules that are called have none: whoever runs the program again finds these modules alone.
    """
    inner = unwrapped(model)
    calls = [row.call for row in (Row(*raw) for raw in tape.rows.values()) if row.call is not None]
    parts = {id(module) for module in inner.modules()}
    called = {id(module): module for module in (unwrapped(call.module or inner) for call in calls)}
    called = {key: module for key, module in called.items() if key in parts}
    if len(called) == 1:
        (inner,) = called.values()
    modules = {id(module): plain_name(name) for name, module in inner.named_modules()}
    owned = {id(each) for module in called.values() for each in (*module.parameters(), *module.buffers())}
    return modules, {id(each): name for name, each in named_weights(inner).items() if id(each) in owned or not called}


def _in_words(row: Row) -> str:
    """``Squash.apply (train.py:12)``."""
    owner = getattr(row.function, "__self__", None)
    name = f"{owner.__name__}.{name_of(row.function)}" if isinstance(owner, type) else row.name
    return name if row.place is None else f"{name} ({row.place[0].rpartition('/')[2]}:{row.place[1]})"
