"""The tape: the torch calls that a program makes outside modules, so that they can be made again after a bad step.

Each call is a row: the function, its arguments, and the position in the code that made it. A tensor that an earlier row
made is written down by its number, never held: no activation lives longer because of the tape. A tensor from outside (a
batch, a parameter) is held, with its version. Calls of the model are rows too. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from nanguard import _compat, _compat_modes
from nanguard.source.arguments import argument_names, name_of_iterated, names_beside_number
from nanguard.source.frames import Place, SavedPosition, place_of
from nanguard.state.rng import RngState
from nanguard.state.trees import PLAIN, is_float, mapped, tensors, tensors_returned
from nanguard.step.calls import Call
from nanguard.step.module_states import NotedState


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_VIEWS = words(
    "__get__ __getitem__ as_strided chunk data detach diagonal expand expand_as flatten movedim narrow permute reshape "
    "select split squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze view view_as "
    "contiguous to float type"
)
"""Functions whose result may share memory with their first argument."""

_MAY_MAKE_NAN = words(
    "div_ true_divide_ divide_ log_ log2_ log10_ log1p_ sqrt_ rsqrt_ reciprocal_ pow_ exp_ acos_ asin_"
)
"""Functions that may make NaN or Inf of finite numbers, in place."""


# What stands for tensors in the arguments of a row. Not dataclasses, which count as containers of tensors.


class Made:
    """A tensor that a row made: ``place`` is its position among the tensors of the row's result."""

    __slots__ = ("number", "place")

    def __init__(self, number: int, place: int) -> None:
        self.number, self.place = number, place


class Outside:
    """A tensor that no row made, and how often it had been written to by then. ``kept`` is a copy, or None."""

    __slots__ = ("kept", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None, kept: Tensor | None = None) -> None:
        self.tensor, self.version, self.kept = tensor, version, kept

    @property
    def value(self) -> Tensor:
        """What it held by then: the copy, if it has been written to since."""
        return self.tensor if self.kept is None or not changed(self) else self.kept


class Unseen:
    """A tensor of the step that no row made. It is not held, since it would keep its graph alive."""

    __slots__ = ()


class Drawn:
    """A random generator of the program's, with its state before the call."""

    __slots__ = ("device", "state")

    def __init__(self, device: torch.device, state: Tensor) -> None:
        self.device, self.state = device, state


class Row(NamedTuple):
    """A call: ``function`` of torch, or ``call`` of a module. ``code`` and ``at`` are the program's position in it."""

    function: Any
    args: Any
    kwargs: Any
    code: CodeType | SavedPosition | None
    at: int
    is_grad_enabled: bool
    autocast: tuple[bool, torch.dtype | None]
    rng: RngState | None
    call: Call | None = None

    @property
    def name(self) -> str:
        """What the program would call it."""
        if self.call is not None:
            return type(self.call.module).__name__ if self.call.module is not None else "the model"
        return name_of(self.function)

    @property
    def place(self) -> Place | None:
        return place_of(self.code, self.at)

    @property
    def argument_names(self) -> list[str]:
        """What the program calls the arguments, as its source code has them. Empty if that is not known."""
        if isinstance(self.code, SavedPosition):
            return list(self.code.names)
        is_method = self.function is not None and getattr(Tensor, self.name, None) is self.function
        if self.name == "unbind" and (iterated := name_of_iterated(self.code, self.at)):
            return [iterated, *[""] * (len(self.args) - 1)]
        if len(self.args) == 2 and not tokens(self.args[1]):
            return names_beside_number(
                self.code, self.at, is_reflected=self.name.startswith("__r"), is_method=is_method
            )
        return argument_names(self.code, self.at, len(self.args), is_method=is_method)

    @property
    def tokens(self) -> list[Any]:
        """What stands for tensors in its arguments."""
        given = self.args, self.kwargs
        return tokens(given) if self.call is None else tokens_for_module(given)

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument, or another one, in place."""
        return self.call is None and (is_write(name_of(self.function)) or "out" in self.kwargs)


class TapedLoss(NamedTuple):
    """A backward pass: the tensors it began at, and their gradients, None for 1. ``last`` is the last row before it."""

    roots: tuple[Any, ...]
    gradients: tuple[Any, ...]
    last: int


class CallTape:
    """The rows of one step by number, and its backward passes.

    One is made for each step, so what few steps have is an attribute of the class, until it is set.

    ``older`` are the rows of the tape before, if rows refer to them. A tape does not hold that tape itself, which would
    hold the one before it in turn, and so all tapes of the run.

    ``trained`` are the tensors that a program without an optimizer trains, if a row made them: such as
    ``w = (w - lr * grad).detach().requires_grad_()``. They are held, and nothing before them belongs to the step.
    ``has_calls`` says that some rows are calls of modules, ``is_settled`` that the model was called to train: what
    comes before is data that the program prepares. ``evaluations`` counts the calls of each module before that, without
    gradients. ``raised`` is the last call that raised and was given something non-finite. ``changes`` are changes in
    place of data, with their position: which function, and of which tensor. ``transformed`` is the first row inside
    ``torch.func.grad``, ``vmap`` or others, whose results are not known.
    """

    trained: Mapping[tuple[int, int], Tensor] = MappingProxyType({})
    older: Mapping[int, tuple[Any, ...]] = MappingProxyType({})
    was_cut = has_calls = is_settled = False
    evaluations: Mapping[int, int] = MappingProxyType({})
    raised: int | None = None
    transformed: int | None = None
    changes: Mapping[tuple[CodeType | None, int], tuple[str, ref[Tensor]]] = MappingProxyType({})
    states: Mapping[int, Sequence[NotedState]] = MappingProxyType({})
    """By the identity of the module that was called: what it and those inside it held before its first call."""

    def __init__(self, rows: dict[int, tuple[Any, ...]] | None = None, losses: list[TapedLoss] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.losses = [] if losses is None else losses

    def note_trained(self, made: Made, tensor: Tensor) -> None:
        """The program trains this tensor, which a row made, without an optimizer."""
        self.trained = {**self.trained, (made.number, made.place): tensor}

    def note_evaluation(self, module: int) -> None:
        """The module of this identity is called without gradients."""
        self.evaluations = {**self.evaluations, module: self.evaluations.get(module, 0) + 1}

    def note_change(self, function: Any, args: Any, position: tuple[CodeType | None, int]) -> None:
        """The program changes data in place: what they were before is gone. Not a division by a number."""
        if name_of(function) in _MAY_MAKE_NAN and (len(args) < 2 or isinstance(args[1], Tensor)):
            self.changes = {**self.changes, position: (name_of(function), ref(args[0]))}

    def changes_of(self, storage: int) -> list[tuple[str, Place]]:
        """The functions that may have made NaN or Inf in this memory, in place, and their lines."""
        found = []
        for (code, at), (name, changed_) in self.changes.items():
            tensor, place = changed_(), place_of(code, at)
            if tensor is not None and place is not None and _compat.storage_key(tensor) == storage:
                found.append((name, place))
        return found

    def row(self, number: int) -> Row | None:
        """None if the row is no longer there: the tape was cut, since it had become too long."""
        raw = self.rows.get(number) or self.older.get(number)
        return None if raw is None else Row(*raw)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Those of the program that make the calls: file and name."""
        places = [Row(*raw).place for raw in self.rows.values()]
        return list(dict.fromkeys((place[0], place[2]) for place in places if place is not None))

    def needed(self, wanted: Iterable[Any], last: int) -> list[int]:
        """The numbers of the rows that these values depend on, in order, up to ``last``.

        Includes writes to memory that such a row's tensor may share.
        """
        known = {**self.older, **self.rows}
        rows = {number: Row(*raw) for number, raw in known.items() if number <= last}
        found: set[int] = set()
        todo = self._numbers(wanted)
        writes = [(number, self._base(rows, number)) for number, row in rows.items() if row.writes]
        while todo:
            while todo:
                number = todo.pop()
                if number not in found:
                    found.add(number)
                    if number in rows:
                        todo += self._numbers(rows[number].tokens)
            bases = {self._base(rows, number) for number in found}
            end = max(found)
            todo = [number for number, base in writes if base in bases and number < end and number not in found]
        return sorted(found)

    def _numbers(self, found: Iterable[Any]) -> list[int]:
        made = [token for token in found if isinstance(token, Made)]
        return [token.number for token in made if (token.number, token.place) not in self.trained]

    def unrepeatable(self) -> set[int]:
        """The numbers of the rows that cannot be made again, and of those that depend on them. Does not sync."""
        gone: set[int] = set()
        rows = {number: Row(*raw) for number, raw in self.rows.items()}
        for number, row in rows.items():
            if any(self._is_lost(token, gone) for token in row.tokens):
                gone.add(number)
                if row.writes and self._writes_to_made(rows, row):
                    return set(rows)  # views of what it wrote to may be anywhere
        return gone

    def _writes_to_made(self, rows: dict[int, Row], row: Row) -> bool:
        """Whether a row may write to memory that a row made.

        Not so an average of weights, ``average.detach().lerp_(weight, 0.1)``: of what was there before, torch counts
        the writes, also through views. Only those through ``data`` are not counted.
        """
        written = tokens((row.args[:1], row.kwargs.get("out")))
        bases = {self._base(rows, token.number) for token in written if isinstance(token, Made)}
        return any((base := rows.get(number)) is None or not _is_view_of_outside(base) for number in bases)

    def _is_lost(self, token: Any, gone: set[int]) -> bool:
        if isinstance(token, Made):
            is_held = (token.number, token.place) in self.trained
            return token.number in gone or not (is_held or token.number in self.rows or token.number in self.older)
        return isinstance(token, Unseen) or changed(token)

    def from_calls_on(self) -> CallTape:
        """The same tape, with the inputs of modules that need no gradient as data, not as something to make again."""
        rows = dict(self.rows)
        for number, raw in rows.items():
            row = Row(*raw)
            if row.call is not None:
                held = tensors((row.call.args, dict(row.call.kwargs)))
                args, kwargs = _as_data((row.args, row.kwargs), held)
                rows[number] = row._replace(args=args, kwargs=kwargs)
        other = copy(self)
        other.rows = rows
        return other

    def _base(self, rows: dict[int, Row], number: int) -> int:
        """The row whose memory the result of this row may share."""
        row = rows.get(number)
        while row is not None and row.call is None and (row.writes or name_of(row.function) in _VIEWS):
            first = next((token for token in row.args if isinstance(token, Made)), None)
            if first is None:
                break
            number, row = first.number, rows.get(first.number)
        return number


def _is_view_of_outside(row: Row) -> bool:
    is_view = row.call is None and name_of(row.function) in _VIEWS - {"__get__"}
    return is_view and bool(row.args) and isinstance(row.args[0], Outside)


def name_of(function: Any) -> str:
    """The name of a function, also of a property's getter."""
    return str(getattr(function, "__name__", type(function).__name__))


def sets_data_of_trained(function: Any, tensor: Tensor) -> bool:
    """Whether it sets the data of a tensor that the program trains: ``w.data = ...``, ``w.data -= ...``."""
    of = getattr(getattr(function, "__self__", None), "__name__", "")
    return name_of(function) == "__set__" and of == "data" and tensor.is_leaf and tensor.requires_grad


def is_write(name: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


def is_readable(tensor: Tensor) -> bool:
    """Whether it is a plain dense tensor of floating-point numbers, which can be looked at whatever torch does now."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not _compat_modes.is_transformed(tensor)
    return is_plain and is_float(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def tokens(tree: Any) -> list[Any]:
    """What stands for tensors in the arguments of a row. Asked for each row before a model is called: in few calls."""
    found: list[Any] = []
    _collect((tree,), found)
    return found


def _collect(children: Iterable[Any], found: list[Any]) -> None:
    for child in children:
        kind = type(child)
        if kind in PLAIN:
            continue
        if kind is Made or kind is Outside or kind is Unseen:
            found.append(child)
        elif isinstance(child, (tuple, list)):
            if child:
                _collect(child, found)
        elif isinstance(child, dict):
            if child:
                _collect(child.values(), found)
        elif kind is slice:
            _collect((child.start, child.stop, child.step), found)


def tokens_for_module(tree: Any) -> list[Any]:
    """The same for the arguments of a module, which may be in any container."""
    found: list[Any] = []
    mapped(tree, found.append)
    return [each for each in found if isinstance(each, (Made, Outside))]


def _as_data(tree: Any, held: Iterator[Tensor]) -> Any:
    """The arguments of a module, with the tensors that were ``held`` if they need no gradient."""

    def data(leaf: Any) -> Any:
        if not isinstance(leaf, (Made, Outside)):
            return None
        tensor = next(held)
        return None if tensor.requires_grad else Outside(tensor, _compat.version(tensor))

    return mapped(tree, data)


def filled_in(tree: Any, value_of: Any) -> Any:
    """The arguments of a row, with ``value_of(token)`` for what stands for a tensor or a generator."""
    kind = type(tree)
    if kind in (Made, Outside, Unseen, Drawn):
        return value_of(tree)
    if kind is tuple or kind is list:
        return kind(filled_in(child, value_of) for child in tree)
    if kind is dict:
        return {key: filled_in(child, value_of) for key, child in tree.items()}
    if kind is slice:
        return slice(*(filled_in(child, value_of) for child in (tree.start, tree.stop, tree.step)))
    return tree


def results_of(row: Row, args: Any, result: Any) -> list[Tensor]:
    """The tensors that a row made, in order. A call that returns None has changed its first argument."""
    if row.call is not None:
        return tensors_returned(result)
    return [args[0]] if result is None else list(tensors(result))


def changed(token: Outside) -> bool:
    """Whether a tensor from outside has been written to since."""
    return _compat.version(token.tensor) != token.version
