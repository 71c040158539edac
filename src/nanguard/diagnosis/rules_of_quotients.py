"""The rules for divisions: by a zero or a norm, and inside ops that invert or decompose a matrix."""

from __future__ import annotations

import math

from nanguard.diagnosis.ancestry import is_norm, is_norm_of, label_left_out, vanished_eps
from nanguard.diagnosis.provenance import Note
from nanguard.diagnosis.rules import SPREADS, Case, Found, fraction, number, value_of
from nanguard.records.diagnosis import Operand

_SOLVES = frozenset(
    (
        *("cholesky_inverse", "cholesky_solve", "linalg_inv_ex", "linalg_ldl_solve", "linalg_lu_solve"),
        *("linalg_solve_ex", "linalg_solve_triangular", "lu_solve", "triangular_solve"),
    )
)
_EQUAL = {
    "linalg_eig": "differences of eigenvalues, and two are equal",
    "linalg_eigh": "differences of eigenvalues, and two are equal",
    "linalg_qr": "the diagonal of R, and columns are linearly dependent",
    "linalg_svd": "singular values and their differences, and two are equal or one is 0",
}
"""What the derivatives of decompositions divide by."""

_SAME_VALUES = frozenset(("clone", "detach", "expand", "sqrt", "squeeze", "to_copy", "unsqueeze", "view"))
"""Ops that give zero for zero."""


# ---- operands --------------------------------------------------------------------------------------------------------


def _as_number(operand: Operand | None) -> str:
    """Words for a denominator that is no tensor: to add an eps to it would hide the mistake."""
    is_number = operand is not None and not operand.dtype
    return ": the divisor is a number of the program, such as a setting or a count" if is_number else ""


def _why_zero(denominator: object) -> str:
    """Words for a mean by hand over nothing, and for data that are normalised although they do not differ."""
    while isinstance(denominator, Note) and denominator.op in _SAME_VALUES and denominator.parents:
        denominator = denominator.parents[0]
    if not isinstance(denominator, Note):
        return ""
    if denominator.op in SPREADS:
        return ": the denominator is the spread of values that are all equal"
    if denominator.op == "sub":
        return ": the denominator is a difference of equal values, such as the maximum and the minimum"
    is_sum = denominator.op in ("sum", "mean") and bool(denominator.parents) and denominator.parents[0].look.low >= 0
    return ": the denominator is a sum of zeros, such as a mask that leaves nothing" * is_sum


def ignored_label(case: Case) -> float | None:
    """The label that the loss leaves out, if it is a mean over no other labels."""
    given = case.evidence.operand("ignore_index")
    return label_left_out(case.evidence.source("self")) if given is None else given.value


# ---- rules -----------------------------------------------------------------------------------------------------------


def divide(case: Case) -> Found:
    return _of_matrix(case) or _of_quotient(case)


def _of_quotient(case: Case) -> Found:
    if case.op not in ("div", "true_divide", "divide", "reciprocal", "addcdiv", "rsqrt", "remainder", "fmod"):
        return None
    top, below, name = fraction(case)
    divisor, dividend = value_of(below), value_of(top)
    if divisor is None:
        return None
    source, over = case.evidence.source(name), case.evidence.source("self" if case.op != "addcdiv" else "tensor1")
    if case.op == "rsqrt" and divisor < 0:
        return "sqrt_of_negative", f"rsqrt of {number(divisor)}"
    if divisor == 0:
        eps = vanished_eps(source)
        if eps is not None:
            why = f"the eps of {eps[0]:g} that was added to the denominator is 0 in {eps[1]}"
            return ("optimizer_eps_underflow" if case.note.phase == "optimizer" else "eps_underflow"), why
        if dividend == 0:
            if is_norm_of(source, over):
                return "division_by_near_zero_norm", "a vector of zeros is divided by its own norm"
            ignored = ignored_label(case)
            if ignored is not None:
                return "all_labels_ignored", f"every label is {number(ignored)}, which the loss leaves out: 0 / 0"
            return "zero_over_zero", "0 / 0" + (_why_zero(source) or _as_number(below))
        if is_norm_of(source, over) or (is_norm(source) and not is_norm(over)):
            return "division_by_near_zero_norm", f"{number(dividend)} is divided by a norm of 0"
        return "div_by_zero", f"{number(dividend)} / 0{_why_zero(source) or _as_number(below)}"
    if not case.is_birth or dividend is None or not math.isfinite(divisor):
        return None
    if case.op == "addcdiv" and abs(dividend / divisor) <= (65504.0 if case.dtype == "float16" else 3.4e38):
        return None  # not the quotient is too large, but its factor
    if abs(divisor) < 1e-4 and case.evidence.finite_in != "fp32":
        if is_norm_of(source, over) or is_norm(source):
            return "division_by_near_zero_norm", f"{number(dividend)} is divided by a norm of {number(divisor)}"
        return "div_by_zero", f"{number(dividend)} / {number(divisor)} leaves {case.dtype}"
    return None


def _of_matrix(case: Case) -> Found:
    """A matrix that cannot be inverted, or a decomposition that is not unique and so has no derivative."""
    note = case.note
    if note.phase == "backward" and not note.in_user_code and note.node in _EQUAL:
        return "div_by_zero", f"the derivative of {note.node} divides by {_EQUAL[note.node]}"
    if case.op not in _SOLVES or note.phase != "forward" or not case.is_birth:
        return None
    if case.evidence.finite_in:
        return "div_by_zero", f"the matrix is nearly singular, and what {case.op} gives exceeds {case.dtype}"
    return "div_by_zero", f"the matrix is singular, so {case.op} divides by 0"
