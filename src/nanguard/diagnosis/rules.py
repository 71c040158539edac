"""The rules that name a cause from an op and the values of its operands.

A rule returns the name of the cause and the reason in numbers, or None if it does not apply. It looks at values, never
at names of programs. ``causes.TABLE`` lists the rules in the order in which they are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanguard.diagnosis.ancestry import is_state, vanished_eps
from nanguard.diagnosis.blame import (
    ASKS_FOR_LOGS,
    PRODUCTS,
    TraceFinding,
    ancestors,
    computes_with_inf,
    feeds_a_module,
)
from nanguard.diagnosis.evidence import Evidence
from nanguard.diagnosis.provenance import BATCH, Note, TraceEvent
from nanguard.diagnosis.trace import Trace
from nanguard.records.diagnosis import Operand
from nanguard.source.frames import source_of


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

SPREADS = frozenset(("std", "var", "std_mean", "var_mean"))
_ADDS = frozenset(
    (
        *("add", "baddbmm", "cumsum", "lerp", "logaddexp", "logcumsumexp", "logsumexp", "mean", "native_layer_norm"),
        *("rsub", "sub", "sum", *SPREADS),
    )
)


# ---- operands --------------------------------------------------------------------------------------------------------


def _argument(case: Case) -> Operand | None:
    """The argument of a function with one argument."""
    return case.evidence.operand("self", "input", "x")


def value_of(operand: Operand | None) -> float | None:
    return None if operand is None else operand.value


def fraction(case: Case) -> tuple[Operand | None, Operand | None, str]:
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
    if case.event.kind != "given" or case.note.node in SPREADS:
        return None
    if not case.event.has_nan and not computes_with_inf(case.event):
        return None
    notes = [n for n in case.trace.notes if n.place == case.note.place and n.module == case.note.module]
    near = [n.op for n in notes]
    if case.op == "fill" and case.event.has_nan and any(0 in n.shape for n in notes):  # so torch says it
        return "zero_over_zero", "a mean over nothing: the tensor has no elements"
    if any("slogdet" in op or "linalg_det" in op for op in near) and case.op in ("scalar_tensor", "where", "full"):
        return "log_of_negative", "logdet of a matrix whose determinant is negative"
    if case.note.constants:
        number = "NaN" if any(map(math.isnan, case.note.constants)) else str(case.note.constants[0])
        return "nonfinite_constant", f"{case.op} is given a number of the program that is {number}"
    return "uninitialized_memory", f"{case.op} gives memory that nothing was written to"


def ctc(case: Case) -> Found:
    if "ctc_loss" not in case.op or case.note.phase == "backward":
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
        base, exponent = value_of(case.evidence.operand("self")), value_of(case.evidence.operand("exponent"))
        if base == 0 and exponent is not None and exponent < 0:
            return "sqrt_grad_at_zero", f"the derivative of x**{exponent + 1:g} at 0 is infinite"
    return None


def _divides_by_zero(case: Case) -> bool:
    _, below, _ = fraction(case)
    return value_of(below) == 0


def exp(case: Case) -> Found:
    source = case.evidence.source("self")
    if case.op == "sum" and case.is_birth and isinstance(source, Note) and source.op == "exp":
        words = f"the sum of exponentials up to {number(source.look.high)} exceeds {case.dtype}"
        return None if case.evidence.finite_in == "fp32" else ("exp_overflow", words)
    if case.op not in ("exp", "expm1", "exp2", "sinh", "cosh") or not case.is_birth:
        return None
    top = _argument(case)
    limit = {"float16": 11.1, "bfloat16": 88.7, "float64": 709.8, "complex128": 709.8}.get(case.dtype, 88.7)
    if case.dtype.startswith("complex"):
        return "exp_overflow", f"{case.op} exceeds {case.dtype}: the real part of its argument may be about {limit}"
    return "exp_overflow", f"{case.op} of {number(value_of(top))} exceeds {case.dtype}: it ends at about {limit}"


def determinant(case: Case) -> Found:
    if case.op not in ("linalg_slogdet", "slogdet", "logdet"):
        return None
    if case.evidence.is_nan:
        return "log_of_negative", "the determinant is negative"
    return "log_of_zero", "the determinant is 0"


def log(case: Case) -> Found:
    if case.op == "div" and case.note.node in _LOGARITHMS and case.note.phase == "backward" and case.is_birth:
        return _derivative_of_log(case)
    if case.op not in (*_LOGARITHMS, "logit", "xlogy", "special_xlogy", "xlog1py", "log_sigmoid"):
        return None
    name = "other" if "xlog" in case.op else "self"
    value = value_of(case.evidence.operand(name, "self"))
    if value is None:
        return None
    shifted = value + 1 if case.op in ("log1p", "xlog1py") else value
    if case.op == "logit":
        shifted = min(value, 1 - value)
    if shifted < 0 and case.note.node == "pow":
        return "pow_negative_base", f"the derivative of x ** p by p is a logarithm of x, and x is {number(value)}"
    if shifted < 0:
        if is_label(case):
            return "label_out_of_domain", f"{case.op} of a target of {number(value)}: it must not be negative"
        return "log_of_negative", f"{case.op} of {number(value)}, which is outside its domain"
    if shifted == 0:
        eps = vanished_eps(case.evidence.source(name))
        if eps is not None:
            return "eps_underflow", f"{case.op} of 0: the eps of {eps[0]:.2g} that was added is 0 in {eps[1]}"
        return "log_of_zero", f"{case.op} of {number(value)}" + (" (exactly)" if value else "")
    return None


def _derivative_of_log(case: Case) -> Found:
    divisor = value_of(case.evidence.operand("other"))
    if divisor is None or divisor == 0 or case.note.in_user_code:
        return None
    why = f"the derivative of {case.note.node} at {number(divisor)} exceeds {case.dtype}"
    return "log_of_zero", f"{why}, although the logarithm itself does not"


def sqrt(case: Case) -> Found:
    value = value_of(_argument(case))
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
    base, exponent = (value_of(case.evidence.operand(name)) for name in ("self", "exponent"))
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
    value = value_of(_argument(case))
    if case.op not in ("acos", "asin", "acosh", "atanh", "erfinv", "special_ndtri") or value is None:
        return None
    return "acos_asin_domain", f"{case.op} of {value:.8g}, which is at or beyond the end of its domain"


def gamma(case: Case) -> Found:
    value = value_of(_argument(case))
    if case.op not in ("lgamma", "digamma", "polygamma", "mvlgamma", "special_gammaln", "igamma", "igammac"):
        return None
    if value is None or value > 0:
        return None
    if is_label(case):
        return (
            "label_out_of_domain",
            f"{case.op} of {number(value)}, made of the batch alone",
        )
    return "log_of_zero", f"{case.op} has a pole at {number(value)}"


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
    if case.op in PRODUCTS:
        return "zero_times_inf", "an infinity is multiplied by 0, or added to one of the other sign, in this product"
    is_log = any(event.note.op.startswith("log") for event in ancestors(case.event.parents))
    return "zero_times_inf", "0 is multiplied by an infinity" + ", the logarithm of 0" * is_log


def _hidden(case: Case) -> Found:
    """An infinity of a mask reaches the loss: by a logarithm, because the loss picks a masked entry, or as it is."""
    asks = next((e.note for e in case.finding.chain if e.note.op in ASKS_FOR_LOGS), None)
    if asks is not None:
        at = "" if asks.place is None else f" ({asks.op} at {source_of(asks.place)})"
        return (
            "log_of_zero",
            f"{case.op} puts an infinity where the loss asks for the log of a probability, which is 0{at}",
        )
    is_put = case.event.kind == "given" or any(parent.is_mask and parent.note.op for parent in case.event.parents)
    if not is_put or case.finding.chain[-1].has_nan:
        return None
    why = "it is a mask, or the log of a probability that is 0, outside of the support of a distribution"
    return "nonfinite_constant", f"an infinity is put into a value that the loss adds up: {why}"


def overflow(case: Case) -> Found:
    """The op is finite in a wider format, or it is one that grows beyond every format."""
    if not case.is_birth:
        return None
    wide, dtype = case.evidence.finite_in, case.dtype
    biggest = max((reach(operand) for operand in case.evidence.operands), default=0.0)
    if wide == "fp32" and dtype == "float16":
        words = "the result exceeds 65504, where fp16 ends; in fp32 this op is finite"
        return "overflow_fp16", f"{_in_words(case, biggest)} and {words}"
    if case.op in ("add", "sub") and biggest == torch.finfo(getattr(torch, dtype)).max:
        words = f"twice -{biggest:.3g} exceeds {dtype}; combine them with torch.minimum instead"
        return "overflow_any_precision", f"two masks of finfo.min are added: {words}"
    if wide or (case.op in _GROWS and not case.evidence.is_nan):  # too large for float64 too
        words = "the result exceeds 3.4e38, where fp32 and bf16 end"
        return "overflow_any_precision", f"{_in_words(case, biggest)} and {words}"
    return None


def _in_words(case: Case, biggest: float) -> str:
    """What the op was given. A number of the program that is larger than all values is what to look at."""
    factor = factor_of(case.op, case.evidence.operands)
    if factor is None:
        return f"operands reach {biggest:.3g}"
    known = value_of(case.evidence.operand("self"))
    done = "raised to the power of" if case.op == "pow" else "multiplied by"
    value = f"{biggest:.3g}" if known is None else number(known)
    return f"{value} is {done} {factor:.3g}, a number of the program such as a setting,"


def factor_of(op: str, operands: Sequence[Operand]) -> float | None:
    """A factor or exponent of the program that is larger than all values that it is used with: ``loss * 1e38``."""
    numbers = (each.value for each in operands if each.name in ("other", "exponent") and not each.dtype)
    factor = next(numbers, None)
    if op not in ("mul", "pow") or factor is None or not math.isfinite(factor):
        return None
    values = (reach(each) for each in operands if each.dtype and each.name != "output")
    return factor if abs(factor) > max(values, default=0.0) else None
