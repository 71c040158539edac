"""The rules that name a cause from an op and the values of its operands.

A rule returns the name of the cause and the reason in numbers, or None if it does not apply. It looks at values, never
at names of programs. ``causes.TABLE`` lists the rules in the order in which they are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanguard.diagnosis.ancestry import is_norm, is_norm_of, is_state, label_left_out, vanished_eps
from nanguard.diagnosis.blame import TraceFinding, ancestors, computes_with_inf, feeds_a_module
from nanguard.diagnosis.evidence import Evidence
from nanguard.diagnosis.provenance import BATCH, Note, TraceEvent
from nanguard.diagnosis.trace import Trace
from nanguard.records.diagnosis import Operand
from nanguard.records.words import counted


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a rule: the trace, and the event to blame."""

    trace: Trace
    finding: TraceFinding

    @property
    def event(self) -> TraceEvent:
        return self.finding.event

    @property
    def note(self) -> Note:
        return self.event.note

    @property
    def evidence(self) -> Evidence:
        return self.event.evidence

    @property
    def op(self) -> str:
        return self.note.op

    @property
    def is_birth(self) -> bool:
        return self.event.kind == "birth"

    @property
    def dtype(self) -> str:
        return self.note.dtype.removeprefix("torch.")


Found = tuple[str, str] | None
Rule = Callable[[Case], Found]


_LOGARITHMS = ("log", "log2", "log10", "log1p")
_GROWS = frozenset(("add", "addmm", "baddbmm", "bmm", "cumprod", "cumsum", "dot", "mm", "mul", "pow", "prod", "sum"))

_PICKS = frozenset(("gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward", "take"))
_SPREADS = frozenset(("std", "var", "std_mean", "var_mean"))
_ADDS = frozenset(
    (
        *("add", "baddbmm", "cumsum", "lerp", "logaddexp", "logcumsumexp", "logsumexp", "mean", "native_layer_norm"),
        *("rsub", "sub", "sum", *_SPREADS),
    )
)


# ---- operands --------------------------------------------------------------------------------------------------------


def _argument(case: Case) -> Operand | None:
    """The argument of a function with one argument."""
    return case.evidence.operand("self", "input", "x")


def _value(operand: Operand | None) -> float | None:
    return None if operand is None else operand.value


def _fraction(case: Case) -> tuple[Operand | None, Operand | None, str]:
    """The numerator, the denominator, and the name of the denominator's argument."""
    evidence = case.evidence
    if case.op in ("reciprocal", "rsqrt"):
        return Operand(name="one", value=1.0), evidence.operand("self"), "self"
    if case.op == "addcdiv":
        return evidence.operand("tensor1"), evidence.operand("tensor2"), "tensor2"
    return evidence.operand("self"), evidence.operand("other"), "other"


def is_label(case: Case) -> bool:
    """True if the value depends on the batch alone and the model never gets it: a target, not an input."""
    roots = case.note.roots
    if roots != BATCH or case.note.phase != "forward":
        return False
    return not feeds_a_module(case.trace, case.note)


def number(value: float | None) -> str:
    if value is None:
        return "?"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e5 else f"{value:.3g}"


def reach(operand: Operand | None) -> float:
    """The largest absolute finite value."""
    if operand is None or operand.low is None or operand.high is None:
        return 0.0
    return max(abs(operand.low), abs(operand.high))


# ---- rules -----------------------------------------------------------------------------------------------------------


def given(case: Case) -> Found:
    """A value that does not come from operands: uninitialised memory, or a number of the program or of torch."""
    if case.event.kind != "given" or case.note.node in _SPREADS:
        return None
    if not case.event.has_nan and not computes_with_inf(case.event):
        return None
    near = [n.op for n in case.trace.notes if n.place == case.note.place and n.module == case.note.module]
    if any("slogdet" in op or "linalg_det" in op for op in near) and case.op in ("scalar_tensor", "where", "full"):
        return "log_of_negative", "logdet of a matrix whose determinant is negative"
    if case.note.constants:
        number = "NaN" if any(map(math.isnan, case.note.constants)) else str(case.note.constants[0])
        return "nonfinite_constant", f"{case.op} is given a number of the program that is {number}"
    return "uninitialized_memory", f"{case.op} gives memory that nothing was written to"


def ctc(case: Case) -> Found:
    if "ctc_loss" not in case.op and "ctc_loss" not in case.note.node:
        return None
    return "ctc_inf", "no alignment exists: a target is too long for its input, and the loss of it is infinite"


def discarded(case: Case) -> Found:
    if not case.finding.discarded or (case.event.has_nan and case.note.phase == "forward"):
        return None
    where = f"{case.note.name} is infinite where its result is not used"
    return "zero_times_inf", f"{where}; dropped in the forward pass, it meets a gradient of 0 in the derivative"


def root_gradient(case: Case) -> Found:
    """The derivative of a root at zero, or of acos and asin at the ends of their domain."""
    if case.note.phase != "backward" or case.note.in_user_code:
        return None
    node = case.note.node
    if node in ("acos", "asin", "acosh", "atanh", "erfinv", "linalg_vector_norm_angle"):
        return "acos_asin_domain", f"the derivative of {node} is infinite at the end of its domain"
    if node in ("sqrt", "hypot", "cdist", "euclidean_dist", "norm", "linalg_vector_norm", "std", "pairwise_distance"):
        if case.evidence.finite_in and not _divides_by_zero(case):
            return None
        return "sqrt_grad_at_zero", f"the derivative of {node} at 0 is infinite, and an operand is exactly 0"
    if node == "pow" and case.op == "pow":
        base, exponent = _value(case.evidence.operand("self")), _value(case.evidence.operand("exponent"))
        if base == 0 and exponent is not None and exponent < 0:
            return "sqrt_grad_at_zero", f"the derivative of x**{exponent + 1:g} at 0 is infinite"
    if node.startswith("linalg_") and node.removeprefix("linalg_") in ("svd", "eigh", "eig", "qr", "svdvals"):
        return "div_by_zero", f"the derivative of {node} divides by differences of singular values, and two are equal"
    return None


def _divides_by_zero(case: Case) -> bool:
    _, below, _ = _fraction(case)
    return _value(below) == 0


def exp(case: Case) -> Found:
    if case.op not in ("exp", "expm1", "exp2", "sinh", "cosh") or not case.is_birth:
        return None
    top = _argument(case)
    limit = {"float16": 11.1, "bfloat16": 88.7, "float64": 709.8}.get(case.dtype, 88.7)
    return "exp_overflow", f"{case.op} of {number(_value(top))} exceeds {case.dtype}: it ends at about {limit}"


def log(case: Case) -> Found:
    if case.op in ("linalg_slogdet", "slogdet", "logdet"):
        return ("log_of_negative" if case.evidence.is_nan else "log_of_zero"), "the determinant is not positive"
    if case.op == "div" and case.note.node in _LOGARITHMS and case.note.phase == "backward" and case.is_birth:
        return _derivative_of_log(case)
    if case.op not in (*_LOGARITHMS, "logit", "xlogy", "special_xlogy", "xlog1py", "log_sigmoid"):
        return None
    name = "other" if "xlog" in case.op else "self"
    value = _value(case.evidence.operand(name, "self"))
    if value is None:
        return None
    shifted = value + 1 if case.op in ("log1p", "xlog1py") else value
    if case.op == "logit":
        shifted = min(value, 1 - value)
    if shifted < 0:
        if is_label(case):
            return "label_out_of_domain", f"{case.op} of a target of {number(value)}: it must not be negative"
        return "log_of_negative", f"{case.op} of {number(value)}, which is outside its domain"
    if shifted == 0:
        eps = vanished_eps(case.evidence.source(name))
        if eps is not None:
            return "eps_underflow", f"{case.op} of 0: the eps of {eps[0]:g} that was added is 0 in {eps[1]}"
        return "log_of_zero", f"{case.op} of {number(value)}" + (" (exactly)" if value else "")
    return None


def _derivative_of_log(case: Case) -> Found:
    divisor = _value(case.evidence.operand("other"))
    if divisor is None or divisor == 0 or case.note.in_user_code:
        return None
    why = f"the derivative of {case.note.node} at {number(divisor)} exceeds {case.dtype}"
    return "log_of_zero", f"{why}, although the logarithm itself does not"


def _as_number(operand: Operand | None) -> str:
    """Words for a denominator that is no tensor: to add an eps to it would hide the mistake."""
    is_number = operand is not None and not operand.dtype
    return ": the divisor is a number of the program, such as a setting or a count" if is_number else ""


def divide(case: Case) -> Found:
    if case.op not in ("div", "true_divide", "divide", "reciprocal", "addcdiv", "rsqrt", "remainder", "fmod"):
        return None
    top, below, name = _fraction(case)
    divisor, dividend = _value(below), _value(top)
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
            return "zero_over_zero", "0 / 0" + (_sum_of_zeros(source) or _as_number(below))
        if is_norm_of(source, over) or (is_norm(source) and not is_norm(over)):
            return "division_by_near_zero_norm", f"{number(dividend)} is divided by a norm of 0"
        return "div_by_zero", f"{number(dividend)} / 0{_as_number(below)}"
    if not case.is_birth or dividend is None or not math.isfinite(divisor):
        return None
    if case.op == "addcdiv" and abs(dividend / divisor) <= (65504.0 if case.dtype == "float16" else 3.4e38):
        return None  # not the quotient is too large, but its factor
    if abs(divisor) < 1e-4 and case.evidence.finite_in != "fp32":
        if is_norm_of(source, over) or is_norm(source):
            return "division_by_near_zero_norm", f"{number(dividend)} is divided by a norm of {number(divisor)}"
        return "div_by_zero", f"{number(dividend)} / {number(divisor)} leaves {case.dtype}"
    return None


def ignored_label(case: Case) -> float | None:
    """The label that the loss leaves out, if it is a mean over no other labels."""
    given = case.evidence.operand("ignore_index")
    return label_left_out(case.evidence.source("self")) if given is None else given.value


def _sum_of_zeros(denominator: object) -> str:
    """Words for a mean by hand over a mask or weights that leave nothing."""
    if not isinstance(denominator, Note) or denominator.op != "sum" or not denominator.parents:
        return ""
    summed = denominator.parents[0].look
    return ": the denominator is a sum of zeros, such as a mask that leaves nothing" * (summed.low == summed.high == 0)


def sqrt(case: Case) -> Found:
    value = _value(_argument(case))
    if case.op != "sqrt" or value is None or value >= 0:
        return None
    if is_label(case):
        return "label_out_of_domain", f"sqrt of a target of {number(value)}"
    if case.note.phase == "optimizer" and is_state(case.evidence.source("self")):
        return "optimizer_state_corrupted", f"sqrt of {number(value)}: a second moment can never be negative"
    return "sqrt_of_negative", f"sqrt of {number(value)}"


def power(case: Case) -> Found:
    if case.op not in ("pow", "float_power"):
        return None
    base, exponent = (_value(case.evidence.operand(name)) for name in ("self", "exponent"))
    if base is None or exponent is None:
        return None
    if base < 0 and exponent != int(exponent):
        if is_label(case):
            return "label_out_of_domain", f"a target of {number(base)} to the power of {exponent:g}"
        return "pow_negative_base", f"{number(base)} to the power of {exponent:g}"
    if base == 0 and exponent < 0:
        return "div_by_zero", f"0 to the power of {exponent:g}"
    return None


def domain(case: Case) -> Found:
    value = _value(_argument(case))
    if case.op not in ("acos", "asin", "acosh", "atanh", "erfinv", "special_ndtri") or value is None:
        return None
    return "acos_asin_domain", f"{case.op} of {value:.8g}, which is at or beyond the end of its domain"


def gamma(case: Case) -> Found:
    value = _value(_argument(case))
    if case.op not in ("lgamma", "digamma", "polygamma", "mvlgamma", "special_gammaln", "igamma", "igammac"):
        return None
    if value is None or value > 0:
        return None
    if is_label(case):
        return (
            "label_out_of_domain",
            f"{case.op} of {number(value)}, made of the batch alone: a target is out of domain",
        )
    return "log_of_zero", f"{case.op} has a pole at {number(value)}"


def ignored_labels(case: Case) -> Found:
    """A mean over the targets that count, and none does."""
    if "nll_loss" not in case.op or not case.is_birth or case.evidence.count != 0:
        return None
    ignored = case.evidence.operand("ignore_index")
    return (
        "all_labels_ignored",
        f"every label is {number(_value(ignored))}, which the loss leaves out: a mean over nothing",
    )


def statistic(case: Case) -> Found:
    count = case.evidence.count
    if count is not None and case.op in _SPREADS and count <= case.evidence.correction:
        words = f"{case.op} over {counted(count, 'element')}"
        return "std_of_single_element", f"{words} divides by {count} - {case.evidence.correction:g}"
    if case.note.node in _SPREADS and not case.note.in_user_code and not case.evidence.finite_in:
        return "std_of_single_element", f"the derivative of {case.note.node} over one element divides by 1 - 1"
    if count == 0:
        return "zero_over_zero", f"{case.op} over nothing: the tensor has no elements"
    return None


def softmax(case: Case) -> Found:
    if not case.evidence.dead_rows:
        return None
    return "masked_softmax_all_neg_inf", "every entry of a row is -inf: the mask leaves nothing to attend to or choose"


def infinities(case: Case) -> Found:
    if case.is_birth:
        return None
    if case.event.kind in ("given", "heir"):
        return _hidden(case)
    values = [operand.value for operand in case.evidence.operands if operand.value is not None]
    if case.op in _ADDS:
        return "inf_minus_inf", "two infinities are subtracted from each other"
    if case.note.node in ("logsumexp", "log_softmax", "softmax", "logcumsumexp"):
        return "inf_minus_inf", "two infinities are subtracted from each other in the derivative"
    if case.op in ("softmax", "log_softmax", "cos", "sin", "tan"):
        return "inf_minus_inf", f"{case.op} of an infinity"
    if case.op in ("div", "addcdiv", "true_divide") and len(values) > 1 and all(map(math.isinf, values[:2])):
        return "inf_minus_inf", "an infinity is divided by an infinity"
    is_log = any(event.note.op.startswith("log") for event in ancestors(case.event.parents))
    return "zero_times_inf", "0 is multiplied by an infinity" + ", the logarithm of 0" * is_log


def _hidden(case: Case) -> Found:
    """An infinity of a mask reaches the loss: through a logarithm, or because the loss picks a masked entry."""
    ops = {event.note.op for event in case.finding.chain}
    if not ops & {"log_softmax", "logsumexp", "log", *_PICKS}:
        return None
    return "log_of_zero", f"{case.op} puts an infinity where the loss asks for the log of a probability, which is 0"


def overflow(case: Case) -> Found:
    """The op is finite in a wider format, or it is one that grows beyond every format."""
    if not case.is_birth:
        return None
    wide, dtype = case.evidence.finite_in, case.dtype
    biggest = max((reach(operand) for operand in case.evidence.operands), default=0.0)
    if wide == "fp32" and dtype == "float16":
        words = "the result exceeds 65504, where fp16 ends; in fp32 this op is finite"
        return "overflow_fp16", f"operands reach {biggest:.3g} and {words}"
    if wide or (case.op in _GROWS and not case.evidence.is_nan):  # too large for float64 too
        words = f"operands reach {biggest:.3g} and the result exceeds 3.4e38, where fp32 and bf16 end"
        return "overflow_any_precision", words
    return None


def loss_over_nothing(case: Case) -> Found:
    if "loss" in case.op and case.is_birth and not case.evidence.finite_in:
        return "zero_over_zero", f"{case.op} averages over nothing: no target counts"
    return None
