"""Make the calls on a tape again: the model's, and the torch calls around it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.diagnosis.look import look
from nanguard.source.arguments import names_of_parts
from nanguard.source.comprehensions import name_of_entry
from nanguard.source.frames import SavedPosition, standing_in
from nanguard.state.trees import attributes, mapped, named_leaves, named_tensors, tensors
from nanguard.step.calls import cut_off, with_gradient
from nanguard.step.pending import Microbatch
from nanguard.step.tape import (
    CallTape,
    Drawn,
    Made,
    Outside,
    Row,
    TapedLoss,
    Unseen,
    changed,
    filled_in,
    name_of,
    results_of,
    tokens,
    tokens_for_module,
)

_KEEPS_COUNT = frozenset(("batch_norm", "instance_norm"))
"""Functions that write to some of their arguments without that torch counts it."""


class TapedRun:
    """A loss function: makes the calls that one backward pass depends on, and returns its loss.

    The batch is a dict of the tensors from outside. A value that was left out of it is taken from the tape.
    """

    def __init__(self, tape: CallTape, loss: TapedLoss, keys: dict[int, str], device: torch.device) -> None:
        self._tape, self._loss, self._keys, self._device = tape, loss, keys, device
        self._numbers = tape.needed((*loss.roots, *loss.gradients), loss.last)
        self._places: dict[Any, dict[int, int]] = {}  # by position in the code, the order of the rows there

    @property
    def numbered(self) -> list[tuple[int, Row | None]]:
        """The rows with their numbers."""
        return list(zip(self._numbers, self.rows, strict=True))

    def name_of_entry(self, name: str, number: int, row: Row) -> str:
        """The name of an argument, also in a comprehension, which gives all entries of a batch the same name."""
        if isinstance(row.code, SavedPosition) or not name.isidentifier():
            return name
        if not self._places:  # looked up for each argument, and there may be thousands of rows
            for each, raw in self._tape.rows.items():
                same = self._places.setdefault((Row(*raw).code, Row(*raw).at), {})
                same[each] = len(same)
        same = self._places.get((row.code, row.at), {})
        return name_of_entry(name, row.code, row.at, same[number], len(same)) if number in same else name

    @property
    def rows(self) -> list[Row | None]:
        """Those that are needed; None for one that is no longer on the tape."""
        return [self._tape.row(number) for number in self._numbers]

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made: dict[int, list[Tensor]] = {}
        cut: dict[int, Tensor] = {}  # one for all calls: a gradient may be asked for of what a module was given

        def value_of(token: Any) -> Any:
            if isinstance(token, Made):
                trained = self._tape.trained.get((token.number, token.place))
                return made[token.number][token.place] if trained is None else trained
            if isinstance(token, Drawn):
                generator = torch.Generator(token.device)
                generator.set_state(token.state)
                return generator
            held = token.value
            key = self._keys.get(id(held))
            value = held if key is None else batch[key]
            if held is token.kept:  # the calls write to it
                return cut.setdefault(id(token), value.clone())
            return value if value.is_leaf else cut.setdefault(id(value), cut_off(value))

        for number, row in self.numbered:
            assert row is not None
            made[number] = self._run(row, model, value_of)
        losses = [value_of(root) for root in self._loss.roots]
        gradients = [None if each is None else value_of(each) for each in self._loss.gradients]
        gradients += [None] * (len(losses) - len(gradients))
        parts = [
            _as_loss(loss) if gradient is None else with_gradient(loss, gradient)
            for loss, gradient in zip(losses, gradients, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _run(self, row: Row, model: nn.Module, value_of: Any) -> list[Tensor]:
        if row.rng is not None:
            row.rng.restore(self._device)
        with standing_in(row.place), torch.set_grad_enabled(row.is_grad_enabled), self._autocast(row):
            if row.call is not None:
                args, kwargs = _given_to_module(row, value_of)
                return results_of(row, args, (row.call.module or model)(*args, **kwargs))
            args, kwargs = filled_in(row.args, value_of), filled_in(row.kwargs, value_of)
            if name_of(row.function) in _KEEPS_COUNT:
                args, kwargs = mapped((args, kwargs), _copied)
            return results_of(row, args, row.function(*args, **kwargs))

    def _autocast(self, row: Row) -> contextlib.AbstractContextManager[Any]:
        """As it was, unless the whole step is run in fp32."""
        enabled, dtype = row.autocast
        kind = self._device.type
        if not torch.is_autocast_enabled(kind) and self.is_autocast[0]:
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=enabled)

    @functools.cached_property
    def is_autocast(self) -> tuple[bool, torch.dtype]:
        """Whether any call ran under autocast, and in which format."""
        formats = [row.autocast[1] for row in self.rows if row is not None and row.autocast[0]]
        return (True, formats[0]) if formats and formats[0] is not None else (False, torch.bfloat16)


def _as_loss(root: Tensor) -> Tensor:
    """What a backward pass can begin at, also of a result at which the program has ended."""
    total = root.sum() if root.numel() != 1 else root.reshape(())
    return total if total.requires_grad else total.detach().requires_grad_()


def microbatches(
    tape: CallTape, trained: Iterable[Tensor], device: torch.device
) -> tuple[list[Microbatch], tuple[str, ...]]:
    """One for each backward pass that can be made again, and why others cannot be.

    ``trained`` are parameters and buffers: what is changed in them is put back before the calls are made.
    """
    known = {id(tensor) for tensor in trained}
    micros, obstacles = [], []
    for loss in tape.losses:
        batch: dict[str, Tensor] = {}
        keys: dict[int, str] = {}
        run = TapedRun(tape, loss, keys, device)
        obstacle = _obstacle(run, tape, loss, known)
        if obstacle is not None and tape.has_calls:
            run = TapedRun(tape.from_calls_on(), loss, keys, device)
            obstacle = obstacle if _obstacle(run, tape, loss, known) else None
        if obstacle is not None:
            obstacles.append(f"the torch calls of the step could not be made again: {obstacle}")
            continue
        for _, name, tensor in inputs(run, known):
            if id(tensor) not in keys:
                keys[id(tensor)] = name if name not in batch else f"{name} ({len(batch)})"
                batch[keys[id(tensor)]] = tensor
        micros.append(Microbatch(run, batch, None, reduce_gradients=False, autocast=run.is_autocast))
    return micros, tuple(dict.fromkeys(obstacles))


def holds_samples(micro: Microbatch, num: int, *, is_fetched: bool) -> bool:
    """False if a taped step has so many rows in one tensor alone, or if it does not give them all to the model.

    Then they are those of a table, such as a running mean, and not samples. ``is_fetched``: a loader gave the batch.
    """
    if not isinstance(micro.loss_fn, TapedRun) or is_fetched:
        return True
    calls = [row.call for row in micro.loss_fn.rows if row is not None and row.call is not None]
    given = [tensor.shape[0] for call in calls for tensor in tensors((call.args, dict(call.kwargs))) if tensor.ndim]
    if given:
        is_part = any(length % num == 0 for length in given) and _gives_modules(micro.loss_fn, num)
        return num in given or is_part  # or several views of each sample
    return sum(tensor.shape[:1] == (num,) for tensor in tensors(micro.batch)) > 1


def _gives_modules(run: TapedRun, num: int) -> bool:
    """Whether what modules are given is made of a tensor with so many rows, that the step has from outside."""
    rows = {number: row for number, row in run.numbered if row is not None}
    todo = [token for row in rows.values() if row.call is not None for token in row.tokens]
    seen: set[int] = set()
    while todo:
        token = todo.pop()
        if isinstance(token, Outside) and token.tensor.shape[:1] == (num,):
            return True
        if isinstance(token, Made) and token.number not in seen:
            seen.add(token.number)
            todo += rows[token.number].tokens if token.number in rows else ()
    return False


def repeatable(
    tape: CallTape, trained: Iterable[Tensor], device: torch.device, *, from_calls_on: bool = False
) -> tuple[CallTape, tuple[str, ...]]:
    """The passes that can be made again, with the rows that they need, and why others cannot be. To be saved.

    With ``from_calls_on``, what modules were given is data and is not made again.
    """
    known = {id(tensor) for tensor in trained}

    def tried(some: CallTape) -> list[tuple[TapedRun, str | None]]:
        runs = [TapedRun(some, loss, {}, device) for loss in tape.losses]
        return [(run, _obstacle(run, tape, loss, known)) for run, loss in zip(runs, tape.losses, strict=True)]

    found = [] if from_calls_on else tried(tape)
    if from_calls_on or (tape.has_calls and any(obstacle for _, obstacle in found)):
        found = tried(tape.from_calls_on())
    rows = {number: tuple(row) for run, obstacle in found if not obstacle for number, row in run.numbered if row}
    losses = [loss for loss, (_, obstacle) in zip(tape.losses, found, strict=True) if not obstacle]
    kept = CallTape(dict(sorted(rows.items())), losses)
    kept.trained, kept.has_calls = tape.trained, tape.has_calls
    return kept, tuple(dict.fromkeys(obstacle for _, obstacle in found if obstacle))


def tensors_in_objects(run: TapedRun) -> Iterator[tuple[str, Tensor]]:
    """Those inside objects that modules were given, such as a graph, by name. They are data, but not in the batch."""
    for row in run.rows:
        for argument, name in () if row is None or row.call is None else _named_arguments(row):
            for path, leaf in named_leaves(argument):
                if not isinstance(leaf, (Tensor, Made, Outside, Unseen)):
                    (whole,) = names_of_parts(name, [path])
                    for attribute, value in attributes(leaf):
                        yield from named_tensors(value, f"{whole}.{attribute}")


def _named_arguments(row: Row) -> list[tuple[Any, str]]:
    others = [f"argument {place} of {row.name}" for place in range(len(row.args))]
    names = itertools.zip_longest(row.args, row.argument_names[: len(row.args)], others)
    given = [(argument, name or other) for argument, name, other in names]
    return given + [(argument, f"{keyword} of {row.name}") for keyword, argument in row.kwargs.items()]


def inputs(run: TapedRun, trained: set[int]) -> Iterator[tuple[Row, str, Tensor]]:
    """The tensors from outside that are not trained, each with a call and the name that the program gives it there."""
    for number, row in run.numbered:
        for argument, name in () if row is None else _named_arguments(row):
            assert row is not None
            name = run.name_of_entry(name, number, row)
            inside = tokens(argument) if row.call is None else tokens_for_module(argument)
            named = {id(leaf): path for path, leaf in named_leaves(argument)}
            paths = [named.get(id(token), "") for token in inside]  # a slice is no container
            for token, part in zip(inside, names_of_parts(name, paths), strict=True):
                is_from_outside = isinstance(token, Outside) and id(token.tensor) not in trained
                if is_from_outside and not isinstance(token.tensor, nn.Parameter):
                    yield row, part, token.value


def _obstacle(run: TapedRun, tape: CallTape, loss: TapedLoss, trained: set[int]) -> str | None:
    """Which call cannot be made again, and why; None if all can."""
    if any(isinstance(root, Unseen) for root in (*loss.roots, *loss.gradients)):
        return "the loss was made by code that torch cannot see" + (", or long before" if tape.was_cut else "")
    for number, row in run.numbered:
        if row is None:
            return "there were too many of them to keep"
        is_late = tape.transformed is not None and number >= tape.transformed
        for token in row.tokens:
            where = f"{row.name}{_at(row)}"
            if isinstance(token, Unseen):
                return f"{where} was given a tensor from code that torch cannot see, or from an earlier step"
            if isinstance(token, Outside) and id(token.tensor) not in trained and changed(token) and token.kept is None:
                return f"{where} was given a tensor that has been changed in place since"
            if is_late and isinstance(token, Outside) and not look(token.tensor).is_finite:
                return f"{where} was given a non-finite tensor, maybe from torch.func, which cannot be seen"
    return None


def _at(row: Row) -> str:
    place = row.place
    return "" if place is None else f" ({place[0].rpartition('/')[2]}:{place[1]})"


def _given_to_module(row: Row, value_of: Any) -> tuple[Any, Any]:
    def value(leaf: Any) -> Any:
        return value_of(leaf) if isinstance(leaf, (Made, Outside)) else None

    args, kwargs = mapped((row.args, row.kwargs), value)
    return args, kwargs


def _copied(leaf: Any) -> Any:
    """Its own copy of what a function writes to unseen: a running mean of a module that is not trained."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_leaf and not leaf.requires_grad else None
