"""The rules for ops that divide by a norm or by a spread inside."""

from __future__ import annotations

from nanguard.diagnosis.rules import Case, Found

_SMALLEST = 2.0**-150
"""This and smaller numbers are 0 in fp32, which normalisations compute in."""

_NORMALISES = frozenset(
    ("native_layer_norm", "native_batch_norm", "native_group_norm", "batch_norm", "fused_rms_norm", "rms_norm")
)


def norm_inside(case: Case) -> Found:
    """Ops that divide by a norm internally."""
    if "weight_norm" not in case.op and case.op not in ("renorm", "cosine_similarity", "normalize"):
        return None
    return "division_by_near_zero_norm", f"{case.op} divides a vector of zeros by its norm"


def normalisation(case: Case) -> Found:
    if case.op not in _NORMALISES:
        return None
    eps = given.value if (given := case.evidence.operand("eps")) is not None else None
    if not case.is_birth or eps is None:
        return None
    spread = case.evidence.operand("running_var")
    if spread is not None and spread.low is not None and spread.low < -eps:
        return "sqrt_of_negative", f"running_var holds {spread.low:.3g}, and no variance is negative"
    if eps == 0 and not case.evidence.finite_in:
        return "zero_over_zero", "a row without variance is divided by the root of eps=0"
    if 0 < eps <= _SMALLEST and case.dtype != "float64":
        return "eps_underflow", f"a row without variance is divided by the root of eps={eps:g}, which is 0 in fp32"
    return None
