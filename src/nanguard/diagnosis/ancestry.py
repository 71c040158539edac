"""How a value was made: questions about the ops behind an operand."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nanguard.diagnosis.provenance import STATE, Leaf, Note

_CARRY_EPS = frozenset(
    ("add", "neg", "sqrt", "abs", "to_copy", "clone", "clamp", "clamp_min", "clamp_max", "mul", "pow", "sub", "rsub")
)
_CARRIES_A_SUM = frozenset(("to_copy", "mul", "sum", "view"))
_FEW = 6


def vanished_eps(source: Note | Leaf | object, depth: int = 4) -> tuple[float, str] | None:
    """An eps that was added on the way to a value and is zero in its format. None if there is none."""
    if not isinstance(source, Note) or depth == 0:
        return None
    if source.op in ("add", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "sub", "rsub"):
        kind = getattr(torch, source.dtype.removeprefix("torch."), torch.float32)
        for scalar in (*source.scalars, *_constants(source)):
            held = torch.tensor(scalar, dtype=torch.float64, device="cpu").to(kind).item()
            if 0 < abs(scalar) < 1e-3 and held == 0:
                return scalar, source.dtype.removeprefix("torch.")
            if 0.9 < scalar < 1 and held == 1:  # clamp(eps, 1 - eps)
                return 1 - scalar, source.dtype.removeprefix("torch.")
    if source.op in _CARRY_EPS:
        for parent in source.parents:
            found = vanished_eps(parent, depth - 1)
            if found is not None:
                return found
    return None


def _constants(note: Note) -> Iterable[float]:
    """The operands that are a tensor with one number: ``torch.tensor(1e-8)``."""
    made = [p for p in note.parents if isinstance(p, Note) and p.op in ("lift", "lift_fresh", "scalar_tensor", "full")]
    return (p.look.low for p in made if not p.shape)


_NORMS = frozenset(("linalg_vector_norm", "norm", "frobenius_norm", "nuclear_norm", "linalg_matrix_norm", "hypot"))
_SUMS = frozenset(("sum", "mean", "dot"))
_PASSES = frozenset(
    ("sum", "mean", "sqrt", "add", "clamp", "clamp_min", "maximum", "to_copy", "clone", "rsub", "abs", "mul", "dot")
)


def is_norm_of(denominator: object, numerator: object, depth: int = 8, *, summed: bool = False) -> bool:
    """True if a denominator is a norm of the numerator: a torch norm, or the root of a sum of squares."""
    if not isinstance(denominator, Note) or depth == 0:
        return False
    summed = summed or denominator.op in _SUMS
    if denominator.op in _NORMS or (summed and _is_square(denominator)):
        reaches = any(parent is numerator or _came_from(parent, numerator) for parent in denominator.parents)
        if reaches:
            return True
    if denominator.op in _NORMS:
        return False
    if denominator.op in _PASSES:
        return any(is_norm_of(parent, numerator, depth - 1, summed=summed) for parent in denominator.parents)
    return False


def _is_square(note: Note) -> bool:
    if note.op == "mul":
        return len(note.parents) == 2 and note.parents[0] is note.parents[1]
    return note.op in ("square", "abs") or (note.op == "pow" and 2.0 in note.scalars)


def _came_from(value: object, other: object, depth: int = 3) -> bool:
    """True if both are the same value, ignoring casts and copies."""
    if value is other:
        return True
    for one, two in ((value, other), (other, value)):
        is_copy = isinstance(one, Note) and one.op in ("to_copy", "clone")
        if isinstance(one, Note) and is_copy and depth and any(_came_from(p, two, depth - 1) for p in one.parents):
            return True
    return False


def is_norm(denominator: object, depth: int = 5) -> bool:
    """True if a denominator is a norm of any value."""
    if not isinstance(denominator, Note) or depth == 0:
        return False
    if denominator.op in _NORMS:
        return True
    if denominator.op in ("clamp", "clamp_min", "add", "mul", "to_copy", "maximum"):
        return any(is_norm(parent, depth - 1) for parent in denominator.parents)
    return False


def is_state(source: object, depth: int = 4) -> bool:
    """True if a value is optimizer state, unchanged or written to in place."""
    if isinstance(source, Leaf):
        return bool(source.roots & STATE)
    if isinstance(source, Note) and depth and source.in_place:
        return bool(source.parents) and is_state(source.parents[0], depth - 1)
    return False


def label_left_out(value: object) -> float | None:
    """The ``ignore_index`` of the loss that makes up ``value``, if it left out all labels: the sum is 0."""
    for _ in range(_FEW):
        if not isinstance(value, Note):
            return None
        if "nll_loss" in value.op:
            return value.scalars[-1] if value.look.low == value.look.high == 0 and value.scalars else None
        value = value.parents[0] if value.parents and value.op in _CARRIES_A_SUM else None
    return None
