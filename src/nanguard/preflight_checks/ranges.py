"""What is known of the data from the batches: the kind, the range and the size of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nanguard.state.trees import named_tensors

ValueKind = Literal["flag", "index", "length", "real", "other"]
"""``flag``: only 0 and 1, as in a mask. ``index``: whole numbers, as tokens and classes. ``length``: whole numbers
from 1 up to the size of another tensor. ``real``: numbers."""

RowRule = Literal["", "rises", "sums to 1", "has length 1"]
"""What holds for each row of a tensor in all data: it rises, as times do; its numbers sum to 1, as probabilities do; it
is a unit vector."""

_MOST_VALUES = 1 << 22
_BY_CHANCE = 1e-3
"""A relation that unrelated data would have with a higher probability than this is not one."""

_NEARLY = 1e-2
"""Half precision rounds sums and lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRange:
    """One tensor of the batches: ``low`` and ``high`` bound its finite values in all of them.

    ``common`` is the most frequent value of an ``index``, ``padding`` the one that stands for nothing, None if that is
    not known. ``shapes`` are those that were seen. ``rule`` says what holds for each row.
    """

    name: str
    kind: ValueKind
    low: float
    high: float
    common: float
    shapes: tuple[tuple[int, ...], ...]
    padding: float | None = None
    rule: RowRule = ""

    @property
    def is_free(self) -> bool:
        """Whether each number can be changed without the others."""
        return self.kind == "real" and not self.rule

    @property
    def is_bounded(self) -> bool:
        """Whether the values look as if they were brought into [-1, 1] or [0, 1]."""
        return self.low >= -1 and self.high <= 1

    @property
    def has_zero(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskRelation:
    """Entries of a mask that are 1 in all data.

    Either those that an ``index`` picks, such as a legal action, or ``columns`` of a mask that is not one of padding.
    """

    mask: str
    index: str = ""
    columns: tuple[int, ...] = ()


def ranges_of(batches: Sequence[Any]) -> dict[str, TensorRange]:
    """By name, in the order of the batch."""
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, tensor in named_tensors(batch):
            found.setdefault(name, []).append(tensor.detach())
    sizes = {size for tensors in found.values() for tensor in tensors for size in tensor.shape[1:]}
    return {name: _range_of(name, tensors, sizes) for name, tensors in found.items()}


def _range_of(name: str, tensors: list[Tensor], sizes: set[int]) -> TensorRange:
    shapes = tuple(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))
    dense = [t for t in tensors if t.layout is torch.strided and not t.is_complex()]
    values = torch.cat([t.reshape(-1)[:_MOST_VALUES].to("cpu", torch.float64) for t in dense] or [torch.zeros(0)])
    values = values[torch.isfinite(values)]
    if not values.numel() or len(dense) < len(tensors):
        return TensorRange(name=name, kind="other", low=math.nan, high=math.nan, common=math.nan, shapes=shapes)
    low, high = values.min().item(), values.max().item()
    kind: ValueKind = "real"
    common = 0.0
    if bool((values == values.round()).all()):
        kind, common = "index", values.mode().values.item()
        if low >= 0 and high <= 1:
            kind = "flag"
        elif low >= 1 and all(len(shape) == 1 for shape in shapes) and high in sizes:
            kind = "length"
    rule = _rule_of(dense) if kind == "real" or (kind == "index" and all(t.is_floating_point() for t in dense)) else ""
    return TensorRange(name=name, kind=kind, low=low, high=high, common=common, shapes=shapes, rule=rule)


def _rule_of(tensors: Sequence[Tensor]) -> RowRule:
    """Not by chance: rows that have no order rise with a probability of 1 / n!."""
    if any(tensor.ndim == 0 or tensor.shape[-1] < 2 for tensor in tensors):
        return ""
    rows = [tensor.reshape(-1, tensor.shape[-1]).double() for tensor in tensors]
    if all(bool((row.diff(dim=-1) > 0).all()) for row in rows):
        chance = math.exp(-sum(len(row) * math.lgamma(row.shape[-1] + 1) for row in rows))
        return "rises" if chance < _BY_CHANCE else ""
    if all(bool((row >= 0).all()) and _are_one(row.sum(-1)) for row in rows):
        return "sums to 1"
    return "has length 1" if all(_are_one(row.norm(dim=-1)) for row in rows) else ""


def _are_one(values: Tensor) -> bool:
    return bool(((values - 1).abs() < _NEARLY).all())


# ---- relations -------------------------------------------------------------------------------------------------------


def relations_of(batches: Sequence[Any], ranges: Mapping[str, TensorRange]) -> list[MaskRelation]:
    """Those that hold in all batches, and not by chance."""
    named = [dict(named_tensors(batch)) for batch in batches]
    found = []
    for mask in (each for each in ranges.values() if each.kind == "flag" and each.low < each.high):
        rows = [tensors[mask.name] for tensors in named if mask.name in tensors]
        if columns := _fixed_columns(rows):
            found.append(MaskRelation(mask=mask.name, columns=columns))
        for index in ranges.values():
            pairs = [(tensors.get(index.name), tensors.get(mask.name)) for tensors in named]
            if index.kind in ("index", "flag") and index is not mask and _is_picked(pairs, index):
                found.append(MaskRelation(mask=mask.name, index=index.name))
    return found


def _fixed_columns(masks: list[Tensor]) -> tuple[int, ...]:
    """The columns that are always 1, and by chance would not be.

    Empty for a mask of padding: there an entry is 1 because rows are not empty.
    """
    if not masks or any(mask.ndim == 0 or mask.shape[-1] != masks[0].shape[-1] for mask in masks):
        return ()
    rows = torch.cat([mask.reshape(-1, mask.shape[-1]).to("cpu", torch.float64) for mask in masks])
    falls, rises = (rows.diff(dim=-1) <= 0).all(), (rows.diff(dim=-1) >= 0).all()
    fixed = rows.amin(0) == 1
    chance = float(rows[:, ~fixed].mean()) ** len(rows)
    if bool(falls) or bool(rises) or not chance < _BY_CHANCE:
        return ()
    return tuple(torch.nonzero(fixed).flatten().tolist())


def _is_picked(pairs: Sequence[tuple[Tensor | None, Tensor | None]], index: TensorRange) -> bool:
    """Whether the entry that the index picks is 1 in each row, and by chance would not be."""
    chance = 1.0
    for places, flags in pairs:
        if places is None or flags is None or flags.ndim != places.ndim + 1 or flags.shape[:-1] != places.shape:
            return False
        if places.is_floating_point() or index.low < 0 or index.high >= flags.shape[-1]:
            return False
        rows, picks = flags.reshape(-1, flags.shape[-1]).double(), places.reshape(-1).long()
        if not bool(rows.gather(-1, picks[:, None]).bool().all()):
            return False
        chance *= float(rows.mean(0)[picks].prod())
    return chance < _BY_CHANCE
