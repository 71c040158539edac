"""Facts about the op that made a non-finite value, collected while its operands still exist."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.diagnosis.look import can_look, count_values, largest, look, place_of_first, value_at
from nanguard.records.diagnosis import Operand
from nanguard.state.trees import leaves, mapped, tensors

_MOST_RECOMPUTED = 1 << 28
_MOST_SAMPLES = 4096
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(slots=True)
class Evidence:
    """Facts about one op. ``sources`` are the ops that made the operands, in the same order.

    ``finite_in`` names the wider format in which the same op is finite on the same values, ``""`` if there is none.
    ``wide_reach`` is the largest value in that format. ``dead_rows`` is True if a row of a softmax was all ``-inf``.
    ``count`` is the number of elements of a statistic, ``correction`` its correction of the degrees of freedom.
    """

    operands: tuple[Operand, ...] = ()
    sources: tuple[Any, ...] = ()
    output: Operand | None = None
    element: tuple[int, ...] | None = None
    samples: tuple[int, ...] = ()
    finite_in: str = ""
    is_nan: bool = False
    dead_rows: bool = False
    count: int | None = None
    correction: float = 0.0
    is_mask: bool = False
    wide_reach: float = 0.0

    def operand(self, *names: str) -> Operand | None:
        """The first operand with one of these names; numbers are operands too. None if there is none."""
        for name in names:
            for operand in self.operands:
                if operand.name == name:
                    return operand
        return None

    def source(self, name: str) -> Any:
        """The op that made an operand, or None."""
        for operand, source in zip(self.operands, self.sources, strict=False):
            if operand.name == name:
                return source
        return None


def new_places(output: Tensor, inputs: Sequence[Tensor]) -> Tensor | None:
    """A mask of the elements that a pointwise op made non-finite from finite values. None if there are none."""
    mask = ~torch.isfinite(real_like(output))
    for tensor in inputs:
        if not can_look(tensor):
            continue
        try:
            mask &= torch.isfinite(real_like(tensor)).expand(mask.shape)
        except RuntimeError:
            return None
    return mask if bool(mask.any()) else None


def real_like(tensor: Tensor) -> Tensor:
    return tensor.detach().abs() if tensor.is_complex() else tensor.detach()


def gather(
    func: Any,
    is_pointwise: bool,
    args: Any,
    kwargs: Any,
    values: Sequence[tuple[str, Tensor]],
    sources: Sequence[Any],
    before: Mapping[int, Tensor],
    output: Tensor,
) -> Evidence:
    """``values`` are the operands as they were before the op ran, ``before`` those of them that it wrote to."""
    evidence = Evidence()
    bad = _offending(output, [v for _, v in values] if is_pointwise else [])
    evidence.element = place_of_first(bad) if bad.ndim else ()
    evidence.samples = _rows(bad)
    evidence.is_nan = bool(torch.isnan(real_like(output)[evidence.element]))
    evidence.output = _operand("output", output)
    operands, made_by = [], []
    for (name, tensor), source in zip(values, sources, strict=True):
        is_empty = tensor.numel() == 0 and tensor.is_floating_point()
        if not (can_look(tensor) or is_empty or (is_pointwise and _is_whole(tensor))):
            continue
        value = value_at(tensor, output.shape, evidence.element) if is_pointwise else None
        operands.append(_operand(name, tensor, value))
        made_by.append(source)
    named = {**dict(zip((a.name for a in _compat.schema_arguments(func)), args, strict=False)), **kwargs}
    for name, each in named.items():
        if isinstance(each, (int, float)) and (name == "other" or not isinstance(each, bool)):  # x / (n > 0)
            operands.append(Operand(name=name, value=float(each)))
    evidence.operands, evidence.sources = tuple(operands), tuple(made_by)
    _special(evidence, func, named, values)
    evidence.finite_in, evidence.wide_reach = finite_in_wider(func, args, kwargs, before)
    return evidence


def where_bad(tensor: Tensor) -> Evidence:
    """The non-finite values of data: the first, NaN before Inf; the rows that hold one; how many of each kind."""
    values = _compat.values_of(tensor)
    output = replace(_operand("data", values), shape=tuple(tensor.shape))
    bad, nans = ~torch.isfinite(real_like(values)), torch.isnan(real_like(values))
    evidence = Evidence(output=output, is_nan=bool(nans.any()))
    if values is tensor:
        first = nans if evidence.is_nan else bad
        evidence.element = place_of_first(first) if bad.ndim else ()
        evidence.samples = _rows(bad)
        evidence.output = replace(output, value=value_at(tensor, tensor.shape, evidence.element))
    return evidence


def _offending(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """A mask of the elements to report: prefer new ones to inherited ones, and NaN to Inf."""
    out = real_like(output)
    new = new_places(output, inputs) if inputs else None
    mask = ~torch.isfinite(out) if new is None else new
    nans = torch.isnan(out) & mask
    if new is None:
        for tensor in inputs:
            if can_look(tensor):
                try:
                    nans &= ~torch.isnan(real_like(tensor)).expand(nans.shape)
                except RuntimeError:
                    break
    return nans if bool(nans.any()) else mask


def _is_whole(tensor: Tensor) -> bool:
    """True if a tensor holds integers that can be read: counts, targets."""
    return tensor.dtype in _INTS and not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0


def _rows(bad: Tensor) -> tuple[int, ...]:
    """The indices of the first dimension that have a bad element."""
    if bad.ndim == 0:
        return ()
    rows = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten()
    return tuple(int(row) for row in rows[:_MOST_SAMPLES])


def _operand(name: str, tensor: Tensor, value: float | None = None) -> Operand:
    seen = count_values(tensor)
    return Operand(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        low=seen.low if seen.num else None,
        high=seen.high if seen.num else None,
        num_nan=seen.num_nan,
        num_inf=seen.num_inf,
        value=value,
    )


def _special(evidence: Evidence, func: Any, named: Mapping[str, Any], values: Sequence[tuple[str, Tensor]]) -> None:
    """Facts that only some kinds of ops have. ``named`` are the arguments of the op."""
    op = str(func.overloadpacket.__name__).strip("_")
    first = values[0][1] if values else None
    if first is None:
        return
    if op in ("softmax", "log_softmax", "logsumexp", "safe_softmax"):
        dim = named.get("dim", -1)
        for each in dim if isinstance(dim, (list, tuple)) else [dim]:
            evidence.dead_rows = evidence.dead_rows or bool(torch.isneginf(first.detach()).all(int(each)).any())
    elif "scaled_dot_product" in op:
        evidence.dead_rows = _masks_all(named)
    elif op in ("std", "var", "std_mean", "var_mean", "native_batch_norm", "cudnn_batch_norm"):
        evidence.count = _count(first, named.get("dim"))
        correction = named.get("correction", named.get("unbiased", 1))
        evidence.correction = 1.0 if correction is None else float(correction)
    elif op in ("mean", "sum", "nanmean", "median", "amax", "amin", "native_layer_norm", "native_group_norm"):
        evidence.count = _count(first, named.get("dim"))
    elif op in ("log", "log2", "log10"):
        evidence.is_mask = _is_mask(evidence, first)
    elif ("loss" in op or "cross_entropy" in op or op == "kl_div") and first.numel() == 0:
        evidence.count = 0
    if "nll_loss" in op:
        total = [v for v in values if v[0] == "total_weight"]
        target = next((v for name, v in values if name == "target"), None)
        ignored = named.get("ignore_index", -100)
        if target is not None and not total:
            evidence.count = int((target != ignored).sum())


def _masks_all(named: Mapping[str, Any]) -> bool:
    """True if an attention mask blocks everything for some query."""
    for name in ("attn_mask", "attn_bias"):
        mask = named.get(name)
        if isinstance(mask, Tensor):
            blocked = ~mask if mask.dtype is torch.bool else torch.isneginf(mask)
            if bool(blocked.all(-1).any()):
                return True
    return False


def _count(tensor: Tensor, dim: Any) -> int:
    if dim is None or dim == []:
        return tensor.numel()
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return math.prod(tensor.shape[int(d)] for d in dims) if tensor.ndim else 1


def _is_mask(evidence: Evidence, tensor: Tensor) -> bool:
    """True for the logarithm of zeros and ones only: it is a mask in log-space, and intended."""
    if evidence.is_nan or not can_look(tensor):
        return False
    seen = look(tensor)
    return seen.low == 0.0 and seen.high == 1.0 and bool(((tensor == 0) | (tensor == 1)).all()) and tensor.numel() > 1


def finite_in_wider(func: Any, args: Any, kwargs: Any, before: Mapping[int, Tensor]) -> tuple[str, float]:
    """The narrowest wider format in which the op is finite on the same values, and the largest result in it.

    The format is ``fp32``, ``float64``, or ``""`` if there is none.
    """
    for rounds, name in ((1, "fp32"), (2, "float64")):
        narrow = _narrowest((args, kwargs))
        if narrow is torch.float32 and name == "fp32":
            continue
        try:
            budget = [_MOST_RECOMPUTED]
            wide = mapped((args, kwargs), partial(_widened, before=before, rounds=rounds, budget=budget))
            with torch.no_grad():
                result = func(*wide[0], **wide[1])
        except Exception:  # not every op supports every format, and memory may run out
            return "", 0.0
        outputs = [t for t in tensors(result) if can_look(t)] or [t for t in tensors(wide[0]) if can_look(t)][:1]
        if outputs and all(look(t).is_finite for t in outputs):
            return name, max(largest(t) for t in outputs)
    return "", 0.0


def _narrowest(tree: Any) -> torch.dtype:
    all_leaves = list(leaves(tree))
    kinds = {leaf.dtype for leaf in all_leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    kinds |= {leaf for leaf in all_leaves if isinstance(leaf, torch.dtype)}
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        if kind in kinds:
            return kind
    return torch.float64


def _widened(leaf: Any, before: Mapping[int, Tensor], rounds: int, budget: list[int]) -> Any:
    if isinstance(leaf, Tensor):
        value = before.get(id(leaf), leaf)
        wide = value.dtype
        for _ in range(rounds):
            wide = _WIDER.get(wide, wide)
        if wide is torch.float32 and rounds == 2:
            wide = torch.float64
        budget[0] -= value.numel()
        if budget[0] < 0:
            raise MemoryError
        return value.detach().to(wide).clone() if value is not leaf or wide is not value.dtype else value.detach()
    if isinstance(leaf, torch.dtype):
        for _ in range(rounds):
            leaf = _WIDER.get(leaf, leaf)
        return leaf
    return None
