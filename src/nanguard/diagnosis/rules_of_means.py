"""The rules for means and deviations over too few elements."""

from __future__ import annotations

from nanguard.diagnosis.rules import SPREADS, Case, Found, number
from nanguard.records.words import counted


def ignored_labels(case: Case) -> Found:
    """A mean over the targets that count, and none does."""
    if "nll_loss" not in case.op or not case.is_birth or case.evidence.count != 0 or _is_empty(case):
        return None
    ignored = case.evidence.operand("ignore_index")
    label = number(None if ignored is None else ignored.value)
    return "all_labels_ignored", f"every label is {label}, which the loss leaves out: a mean over nothing"


def _is_empty(case: Case) -> bool:
    """True if an operand has no elements."""
    return any(0 in operand.shape for operand in case.evidence.operands)


def statistic(case: Case) -> Found:
    count = case.evidence.count
    if count is not None and case.op in SPREADS and count <= case.evidence.correction:
        words = f"{case.op} over {counted(count, 'element')}"
        return "std_of_single_element", f"{words} divides by {count} - {case.evidence.correction:g}"
    if case.note.node in SPREADS and not case.note.in_user_code and not case.evidence.finite_in:
        return "std_of_single_element", f"the derivative of {case.note.node} over one element divides by 1 - 1"
    if count == 0:
        return "zero_over_zero", f"{case.op} over nothing: the tensor has no elements"
    return None


def over_nothing(case: Case) -> Found:
    """A mean over no elements, inside an op."""
    if not case.is_birth or case.evidence.finite_in:
        return None
    if case.op == "segment_reduce":
        return "zero_over_zero", "a segment has no elements"
    if "loss" in case.op:
        return "zero_over_zero", f"{case.op} averages over nothing: no target counts"
    return None
