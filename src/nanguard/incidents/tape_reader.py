"""Makes a tape again of what ``tape_writer`` wrote. Only torch functions of a fixed table come out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.incidents.call_names import PLAIN_ARGUMENTS, function_named
from nanguard.incidents.files import rng_of_tree
from nanguard.incidents.trees import Lost, restore
from nanguard.source.frames import SavedPosition
from nanguard.state.names import named_weights, plain_name, unwrapped
from nanguard.state.rng import RngState
from nanguard.state.trees import leaves, mapped
from nanguard.step.calls import Call
from nanguard.step.tape import CallTape, Made, Outside, Row, TapedLoss

TAPE = "tape"
_ACCELERATOR = re.compile(r"(cuda|mps|xpu|hpu|mtia)(:[0-9]{1,3})?")
_PREFIX = f"{TAPE}."
_ARGUMENTS = PLAIN_ARGUMENTS | {Made, Outside, type(Ellipsis), torch.layout, torch.memory_format}
_LAYOUTS = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.layout)}
_FORMATS = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.memory_format)
}


def modules_in(data: Any) -> list[str]:
    """The names of the modules that a saved tape calls with gradients on, in order."""
    rows = data.get("rows") if isinstance(data, dict) else None
    named = [row.get("module") for row in rows or () if isinstance(row, dict) and row.get("grad") is True]
    return [name for name in named if type(name) is str]


def tape_of_tree(
    data: Any, tensors: Mapping[str, Tensor], model: nn.Module, fit: Callable[[RngState], RngState]
) -> CallTape:
    """``tensors`` are all of the bundle, by name. ``fit`` makes random states fit this machine.

    Raises ``ValueError`` for anything that ``tree_of_tape`` does not write, and if the model has other weights.
    """
    return _TapeReader(data, tensors, model, fit).tape()


class _TapeReader:
    def __init__(
        self, data: Any, tensors: Mapping[str, Tensor], model: nn.Module, fit: Callable[[RngState], RngState]
    ) -> None:
        if not isinstance(data, dict) or not all(type(data.get(key)) is list for key in ("rows", "losses", "random")):
            raise ValueError("it does not hold the calls of a step")
        self._data, self._saved, self._weights = data, tensors, named_weights(model)
        self._modules = {plain_name(name): module for name, module in unwrapped(model).named_modules()}
        self._mine = {name.removeprefix(_PREFIX): each for name, each in tensors.items() if name.startswith(_PREFIX)}
        self._outside = self._from_outside(restore(data.get("tensors"), self._mine), data.get("parameters"))
        self._states = [fit(rng_of_tree(restore(each, self._mine))) for each in data["random"]]
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self._makers: dict[str, Callable[[Any], Any]] = {
            "$device": lambda content: self._here(torch.device(content)),
            "$made": self._made,
            "$outside": lambda content: self._outside[_index(content)],
            "$saved": lambda content: _token(self._saved[content]),
            "$weight": self._weight,
            "$slice": lambda content: slice(*content),
            "$ellipsis": lambda content: Ellipsis,
            "$layout": lambda content: _LAYOUTS[content],
            "$memory_format": lambda content: _FORMATS[content],
        }
        self._numbers: set[int] = set()

    def tape(self) -> CallTape:
        tape = CallTape()
        for each in self._data["rows"]:
            told = self._restored(each)
            number = _index(told["number"])
            if self._numbers and number <= max(self._numbers):
                raise ValueError("its calls are not in order")
            tape.rows[number] = tuple(self._row(told))
            tape.has_calls = tape.has_calls or "module" in told
            self._numbers.add(number)
        for each in self._data["losses"]:
            told = self._restored(each)
            tape.losses.append(TapedLoss(_tokens(told["roots"]), _tokens(told["gradients"]), _index(told["last"])))
        return tape

    def _row(self, told: Mapping[str, Any]) -> Row:
        args, kwargs = told["args"], told["kwargs"]
        if type(args) is not tuple or type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
            raise ValueError("a call has no arguments")
        dtype = told.get("autocast")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError("a call does not say in which format it ran")
        rng = None if told.get("random") is None else self._states[_index(told["random"])]
        place = _place(told.get("place"))
        position = SavedPosition(place, tuple(str(name) for name in told.get("names") or ()))
        state = position, 0, told["grad"] is True, (dtype is not None, dtype), rng
        if "module" not in told:
            function = function_named(told.get("function"))
            _check_arguments((args, kwargs))
            if function is Tensor.cuda and self._device.type != "cuda":
                function, args, kwargs = Tensor.to, (args[0], self._device), {}
            args, kwargs = mapped((args, kwargs), self._named_here)
            return Row(function, list(args), kwargs, *state)
        if any(isinstance(leaf, Lost) for leaf in leaves((args, kwargs))):
            raise ValueError("an argument of a module was not saved")
        mode = dtype is not None, dtype or torch.bfloat16
        call = Call(args, kwargs, rng, mode, position)
        call.called = self._module(told["module"])
        return Row(None, args, kwargs, *state, call)

    def _here(self, device: torch.device) -> torch.device:
        """The device of the model in the place of an accelerator that the model is not on."""
        return device if device.type in ("cpu", "meta", self._device.type) else self._device

    def _named_here(self, value: Any) -> Any:
        """The same for a device that is given by its name; None for anything else."""
        is_device = type(value) is str and _ACCELERATOR.fullmatch(value)
        return self._here(torch.device(value)) if is_device else None

    def _module(self, name: Any) -> nn.Module | None:
        if name == "":
            return None
        found: nn.Module | None = self._modules.get(name)
        if found is None:
            raise ValueError(f"the model has no module {name!r:.80}")
        return found

    def _restored(self, data: Any) -> dict[str, Any]:
        told = restore(data, self._mine, self._makers)
        if type(told) is not dict:
            raise ValueError("it does not hold the calls of a step")
        return told

    def _made(self, content: Any) -> Made:
        number, place = map(_index, content)
        if number not in self._numbers:
            raise ValueError(f"a call was given the result of call {number}, which is not there before it")
        return Made(number, place)

    def _weight(self, name: Any) -> Outside:
        if name not in self._weights:
            raise ValueError(f"the model has no {name!r:.80}, which a call was given")
        return _token(self._weights[name])

    def _from_outside(self, tensors: Any, parameters: Any) -> list[Outside]:
        if type(tensors) is not list or not all(isinstance(each, Tensor) for each in tensors):
            raise ValueError("its tensors are not there")
        held: list[Tensor] = list(tensors)
        for place in map(_index, parameters or ()):
            held[place] = nn.Parameter(held[place].detach(), requires_grad=held[place].requires_grad)
        return [_token(each) for each in held]


def _check_arguments(value: Any) -> None:
    """Raises ``ValueError`` unless these are tensors and plain values: torch calls methods of other objects."""
    kind = type(value)
    if kind is tuple or kind is list:
        for child in value:
            _check_arguments(child)
    elif kind is dict:
        _check_arguments(list(value.values()))
    elif kind is slice:
        _check_arguments([value.start, value.stop, value.step])
    elif kind not in _ARGUMENTS and not (kind.__module__ == "numpy" and hasattr(kind, "dtype")):
        raise ValueError(f"a torch function was given a {kind.__name__}")


def _token(tensor: Any) -> Outside:
    return Outside(tensor, _compat.version(tensor))


def _tokens(tree: Any) -> tuple[Any, ...]:
    given = tuple(tree)
    if not all(each is None or isinstance(each, (Made, Outside)) for each in given):
        raise ValueError("a backward pass does not begin at tensors")
    return given


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a number of a call or a tensor: {value!r:.40}")
    return value


def _place(told: Any) -> tuple[str, int, str] | None:
    if told is None:
        return None
    file, line, function = told
    if type(file) is not str or type(line) is not int or type(function) is not str:
        raise ValueError("a call does not say where it was made")
    return file, line, function
