"""Batches that the program may meet: extreme, but legal by what is known of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanguard.preflight_checks.ranges import TensorRange, ranges_of, relations_of
from nanguard.state.batches import num_samples, take
from nanguard.state.trees import exchanged, mapped, named_tensors

SCALES = (10.0, 0.1, 1e-4)
MORE = 4
"""How many times more samples."""

_SHORTEST = 2
"""Tokens. A shorter sequence has no next token to predict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stress:
    """``words`` say what is special about the batch. ``is_larger``: its values are larger than those of the data."""

    words: str
    batch: Any
    is_larger: bool = False


class LegalBatches:
    """Makes stressed batches from given ones."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._base = batches[0]
        self._num = num_samples(self._base)
        self.ranges = ranges_of(batches)
        self._relations = relations_of(batches, self.ranges)

    def widen(self, embedded: Mapping[str, tuple[int, int | None]]) -> None:
        """Indices of an embedding may be any of its entries, and the one for padding too."""
        for name, (size, padding) in embedded.items():
            known = self.ranges.get(name)
            if known is not None and known.kind in ("index", "flag", "length") and known.low >= 0:
                self.ranges[name] = replace(known, kind="index", low=0.0, high=size - 1.0, padding=padding)

    def __iter__(self) -> Iterator[Stress]:
        """From the ordinary to the rare."""
        yield from self._fewer_samples()
        for each in self.ranges.values():
            yield from self._partial(each)
        for each in self.ranges.values():
            yield from self._constants(each)
        yield from self._copies()
        yield from self._all_at_once()
        yield from self._scaled()
        yield from self._shorter()
        yield from self._more_samples()

    # ---- the kinds -----------------------------------------------------------------------------------------------

    def _fewer_samples(self) -> Iterator[Stress]:
        num = self._num
        if num is not None and num > 1:
            yield Stress(words="a batch of one sample", batch=take(self._base, [0], num))

    def _more_samples(self) -> Iterator[Stress]:
        num = self._num
        if num is not None:
            yield Stress(words=f"{MORE} times as many samples", batch=take(self._base, [*range(num)] * MORE, num))

    def _partial(self, each: TensorRange) -> Iterator[Stress]:
        """A mask that leaves one entry, or all but one; a probability of 1, and a unit vector along an axis."""
        if each.rule in ("sums to 1", "has length 1"):
            batch = self._changed({each.name: partial(_with_one, is_one=True)}, is_whole=False)
            if batch is not None:
                yield Stress(words=f"the first sample of {each.name} is 1 and then 0", batch=batch)
        for is_one in (True, False):
            if each.kind == "flag" and each.shapes[0] and each.shapes[0][-1] > 1:
                batch = self._changed({each.name: partial(_with_one, is_one=is_one)}, is_whole=False)
                if batch is not None:
                    what = "has only one 1" if is_one else "has only one 0"
                    yield Stress(words=f"the first sample of {each.name} {what}", batch=batch)

    def _constants(self, each: TensorRange) -> Iterator[Stress]:
        """One sample of a tensor, or all of it, with one value: an empty mask, padding, a repeated token, silence."""
        for value in _values(each):
            for is_whole in (False, True):
                batch = self._changed({each.name: _filling(value)}, is_whole=is_whole)
                if batch is not None:
                    which = "all of" if is_whole else "the first sample of"
                    yield Stress(words=f"{which} {each.name} is {value:g}", batch=batch)

    def _copies(self) -> Iterator[Stress]:
        """The same sample twice, and nothing but the same sample."""
        num = self._num
        if num is not None and num > 1:
            twice = [0, 0, *range(2, num)]
            yield Stress(words="the first two samples are equal", batch=take(self._base, twice, num))
            yield Stress(words="all samples are equal", batch=take(self._base, [0] * num, num))

    def _all_at_once(self) -> Iterator[Stress]:
        """A whole sample that is constant, in all its numbers and masks."""
        real = [each for each in self.ranges.values() if each.is_free or each.kind == "flag"]
        for level, value_of in _LEVELS.items():
            values = {each.name: value_of(each) for each in real}
            changes = {name: _filling(value) for name, value in values.items() if value is not None}
            if len(changes) < 2:
                continue
            for is_whole in (False, True):
                batch = self._changed(changes, is_whole=is_whole)
                if batch is not None:
                    which = "all numbers and masks are" if is_whole else "all numbers and masks of the first sample are"
                    yield Stress(words=f"{which} {level}", batch=batch)

    def _scaled(self) -> Iterator[Stress]:
        for each in self.ranges.values():
            for scale in SCALES:
                if not each.is_free or (scale > 1 and each.is_bounded) or (scale < 1 and not each.has_zero):
                    continue
                for is_whole in (False, True):
                    batch = self._changed({each.name: partial(torch.mul, other=scale)}, is_whole=is_whole)
                    if batch is not None:
                        which = "all of" if is_whole else "the first sample of"
                        words = f"{which} {each.name} times {scale:g}"
                        yield Stress(words=words, batch=batch, is_larger=scale > 1)

    def _shorter(self) -> Iterator[Stress]:
        """Sequences of tokens, with all that has the same length, cut to the shortest length."""
        lengths = {
            each.shapes[0][1]
            for each in self.ranges.values()
            if each.kind == "index" and len(each.shapes) == 1 and len(each.shapes[0]) == 2
        }
        for length in sorted(lengths):
            if length > _SHORTEST and length != self._num:
                words = f"sequences of {_SHORTEST} instead of {length}"
                yield Stress(words=words, batch=mapped(self._base, partial(_cut, length=length)))

    # ---- making them ---------------------------------------------------------------------------------------------

    def _changed(self, changes: dict[str, Callable[[Tensor], Tensor]], *, is_whole: bool) -> Any:
        """The batch with these tensors changed, in all samples or in the first one. None if nothing is different."""
        tensors = dict(named_tensors(self._base))
        new: dict[int, Tensor] = {}
        for name, change in changes.items():
            old = tensors.get(name)
            if old is None or (not is_whole and (old.ndim == 0 or self._num is None or old.shape[0] != self._num)):
                continue
            if not is_whole and self._num == 1:
                continue
            made = old.detach().clone()
            if is_whole:
                made.copy_(change(old.detach()))
            else:
                made[0] = change(old.detach()[:1])[0]
            if not torch.equal(made, old):
                new[id(old)] = made
        self._repair(tensors, new)
        if all(torch.equal(new.get(id(old), old), old) for old in tensors.values()):
            return None
        return exchanged(self._base, new)

    def _repair(self, tensors: dict[str, Tensor], new: dict[int, Tensor]) -> None:
        """What holds in all data holds in what was made, too."""
        for relation in self._relations:
            mask, index = tensors[relation.mask], tensors.get(relation.index)
            if id(mask) not in new and (index is None or id(index) not in new):
                continue
            flags = new.get(id(mask), mask).detach().clone()
            if index is None:
                flags[..., list(relation.columns)] = 1
            else:
                places = new.get(id(index), index).long().unsqueeze(-1)
                flags.scatter_(-1, places, torch.ones_like(places, dtype=flags.dtype))
            new[id(mask)] = flags


def _values(each: TensorRange) -> list[float]:
    """Constants that a tensor may consist of."""
    if each.rule:
        return []
    if each.kind == "flag":
        return [0.0, 1.0]
    if each.kind == "index":
        padding = [] if each.padding is None else [float(each.padding)]
        return list(dict.fromkeys([*padding, each.low, each.common, each.high]))
    if each.kind == "length":
        return list(dict.fromkeys([1.0, each.low, each.high]))
    if each.kind == "real":
        return list(dict.fromkeys([*([0.0] if each.has_zero else []), each.low, each.high]))
    return []


_LEVELS: dict[str, Callable[[TensorRange], float | None]] = {
    "0": lambda each: 0.0 if each.has_zero or each.kind == "flag" else None,
    "as low as they get": lambda each: each.low,
    "as high as they get": lambda each: each.high,
}


def _with_one(tensor: Tensor, is_one: bool) -> Tensor:
    """All 0 but the first entry of each row, or all 1 but the first entry."""
    made = torch.full_like(tensor, not is_one)
    made[..., 0] = is_one
    return made


def _filling(value: float) -> Callable[[Tensor], Tensor]:
    return partial(torch.full_like, fill_value=value)


def _cut(leaf: Any, length: int) -> Any:
    """A tensor with ``length`` entries in some dimension but the first, or lengths up to it, shortened."""
    if not isinstance(leaf, Tensor):
        return None
    places = [dim for dim in range(1, leaf.ndim) if leaf.shape[dim] == length]
    if not places:
        is_length = leaf.ndim == 1 and not leaf.is_floating_point() and leaf.numel() and int(leaf.max()) == length
        return leaf.clamp(max=_SHORTEST) if is_length else None
    cut: Tensor = leaf
    for dim in places:
        cut = cut.narrow(dim, 0, _SHORTEST)
    return cut.clone()
