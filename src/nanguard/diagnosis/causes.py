"""The table of causes: one row per cause.

To add a cause, add a row here and its page, ``docs/causes/<name>.md``. The rules of the rows are tried from the top;
the first that applies names the cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from nanguard.diagnosis import rules, rules_of_means, rules_of_norms, rules_of_quotients
from nanguard.diagnosis.rules import Case, Found, Rule
from nanguard.records.diagnosis import Diagnosis, Fix


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseRow:
    """A cause: its ``name``, its ``title`` in words, and what to do about it.

    ``fix`` is the advice in words; ``fixes`` is better advice for some ops, by patterns of their names. ``helps`` names
    what helps, the best first: fix_code, fix_data, fp32, skip, clip, lower_lr. ``rule`` finds the cause from an op and
    its operands; a rule may also return the name of a related row. It is None if a rule of another row, or another part
    of the diagnosis, finds this cause.
    """

    name: str
    title: str
    fix: str
    helps: tuple[str, ...] = ("fix_code", "skip")
    rule: Rule | None = None
    fixes: tuple[tuple[str, str], ...] = ()

    @property
    def page(self) -> str:
        """The page of the documentation, relative to ``docs/``."""
        return f"causes/{self.name}.md"


def name_cause(case: Case) -> tuple[str, str]:
    """The name of the cause, and the sentence that gives the reason in numbers."""
    cause, because = _first_found(TABLE, case) or ("unknown", "no rule fits what was seen")
    node = case.note.name
    if node != case.op and "derivative" not in because:  # the program shows no such op
        because = f"in the derivative of {node}, {because}"
    return cause, because


def row_of(cause: str) -> CauseRow:
    """Raise ``ValueError`` if the table has no such row."""
    for row in TABLE:
        if row.name == cause:
            return row
    raise ValueError(f"cause {cause!r} has no row in diagnosis/causes.py; add one to TABLE")


def titled(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the title of its cause."""
    return replace(diagnosis, title=row_of(diagnosis.cause).title)


def with_remedy(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the title of its cause and what to do about it."""
    row = row_of(diagnosis.cause)
    words = next((words for pattern, words in row.fixes if fnmatchcase(diagnosis.op, pattern)), row.fix)
    if diagnosis.cause == "parameter_corrupted" and diagnosis.confidence == "certain":  # by this line, in this step
        words = "correct this line: keep what it divides by, or takes the root or logarithm of, away from 0"
    if diagnosis.cause == "overflow_any_precision" and rules.factor_of(diagnosis.op, diagnosis.operands):
        words = "lower this number, or the values that it is used with"
    return replace(diagnosis, title=row.title, fix=Fix(words=words), remedies=row.helps)


def _first_found(rows: Iterable[CauseRow], case: Case) -> Found:
    return next(filter(None, (row.rule(case) for row in rows if row.rule is not None)), None)


def _custom_backward(case: Case) -> Found:
    if not (case.note.is_custom and case.note.in_user_code and case.note.phase == "backward"):
        return None
    inner = _first_found(_BY_VALUE, case)
    why = f": {inner[1]}" if inner else ""
    return "custom_backward_bug", f"the hand-written backward of {case.note.node} makes it of finite values{why}"


_MASKS = ("masked_fill", "where", "index_put", "fill", "full*", "scatter", "index_fill")
_UNMASKED = "mask with a large negative finite number, or keep what is masked or impossible out of the loss"
_REGULAR = "keep the matrix away from singular: add eps * torch.eye(n), or keep its diagonal above 0"
_COUNTED = "leave out what has no elements, or sum and divide by max(number of elements, 1)"

_BY_ORIGIN = (
    CauseRow(
        name="uninitialized_memory",
        title="uninitialised memory",
        fix="initialise it: torch.empty leaves whatever was in memory",
        helps=("fix_code",),
        rule=rules.given,
    ),
    CauseRow(
        name="nonfinite_constant",
        title="a number that is NaN or Inf",
        fix="find where the program computes this number: a weight, a schedule, a running mean",
        helps=("fix_code", "skip"),
        fixes=tuple((op, _UNMASKED) for op in _MASKS),
    ),
    CauseRow(
        name="ctc_inf",
        title="CTC target that cannot be aligned",
        fix="leave out targets that are too long (a repeated label needs one frame more), or pass zero_infinity=True",
        helps=("skip", "fix_data", "fix_code"),
        rule=rules.ctc,
    ),
    CauseRow(
        name="custom_backward_bug",
        title="a bug in a hand-written backward",
        fix="correct the formula in the hand-written backward",
        rule=_custom_backward,
    ),
    CauseRow(
        name="zero_times_inf",
        title="zero times infinity",
        fix="keep the infinity out: exp(x.clamp(max=0)) inside torch.where, masked_fill instead of a product with 0, "
        "torch.xlogy(p, p) instead of p * log(p)",
        rule=rules.discarded,
        fixes=(("log*", "keep the argument of the logarithm away from 0 where the result is not used, too: clamp it"),),
    ),
    CauseRow(
        name="sqrt_grad_at_zero",
        title="derivative of a root at zero",
        fix="put an eps under the root: torch.sqrt(x + 1e-12)",
        rule=rules.root_gradient,
        fixes=(
            ("pow", "put an eps under the power: (x + 1e-12) ** p"),
            ("hypot", "put an eps under the root: torch.sqrt(x * x + y * y + 1e-12)"),
        ),
    ),
)
"""What kind of op it is, or how its result was used, decides."""

_BY_VALUE = (
    CauseRow(
        name="exp_overflow",
        title="overflow of an exponential",
        fix="clamp the argument, or compute in log-space (logsumexp, softplus)",
        rule=rules.exp,
    ),
    CauseRow(
        name="log_of_zero",
        title="logarithm of zero",
        fix="clamp the argument away from 0, or use the log-space form (log_softmax, logsigmoid)",
        rule=rules.log,
        fixes=(
            *((op, _UNMASKED) for op in _MASKS),
            ("*gamma*", "keep the argument above 0: add an eps to it, or 1"),
        ),
    ),
    CauseRow(
        name="log_of_negative",
        title="logarithm of a negative number",
        fix="keep the argument positive: clamp it, or take the log of its absolute value",
        rule=rules.determinant,
    ),
    CauseRow(
        name="div_by_zero",
        title="division by zero",
        fix="add an eps to the denominator, or clamp it away from 0",
        rule=rules_of_quotients.divide,
        fixes=(
            ("linalg_qr", "start from linearly independent columns, and keep them so"),
            *((op, "keep eigenvalues and singular values apart and above 0") for op in ("linalg_eig*", "linalg_svd*")),
            *((op, _REGULAR) for op in ("linalg_*", "cholesky_*", "lu_*", "triangular_*")),
        ),
    ),
    CauseRow(
        name="sqrt_of_negative",
        title="root of a negative number",
        fix="clamp the argument at 0 before the root",
        rule=rules.sqrt,
        fixes=(
            ("*batch_norm*", "reset the running variance, and find what wrote to it: a checkpoint, a conversion"),
            ("linalg_*", _REGULAR),
        ),
    ),
    CauseRow(
        name="pow_negative_base",
        title="fractional power of a negative number",
        fix="keep the base non-negative: clamp it or take its absolute value",
        rule=rules.power,
    ),
    CauseRow(
        name="acos_asin_domain",
        title="argument outside the domain",
        fix="clamp the argument into the open domain: x.clamp(-1 + 1e-6, 1 - 1e-6)",
        rule=rules.domain,
        fixes=(
            ("acosh", "clamp the argument into the open domain: x.clamp(min=1 + 1e-6)"),
            ("*ndtri", "clamp the argument into the open domain: x.clamp(1e-6, 1 - 1e-6)"),
        ),
    ),
    CauseRow(
        name="label_out_of_domain",
        title="a target outside the domain of the loss",
        fix="clean the targets, or choose a loss whose domain they are in",
        helps=("fix_data", "skip", "fix_code"),
        rule=rules.gamma,
    ),
    CauseRow(
        name="all_labels_ignored",
        title="no label counts",
        fix="leave out samples without a label, or divide the summed loss by the number of labels, at least 1",
        helps=("skip", "fix_data", "fix_code"),
        rule=rules_of_means.ignored_labels,
    ),
    CauseRow(
        name="std_of_single_element",
        title="deviation of a single element",
        fix="use unbiased=False, or drop a last batch of one (drop_last=True)",
        helps=("fix_code", "skip", "fix_data"),
        rule=rules_of_means.statistic,
    ),
    CauseRow(
        name="masked_softmax_all_neg_inf",
        title="softmax of a row that is masked entirely",
        fix="leave every row at least one entry, or mask with a large negative finite number",
        helps=("fix_code", "skip", "fix_data"),
        rule=rules.softmax,
    ),
    CauseRow(
        name="eps_underflow",
        title="an eps that is zero in this format",
        fix="use an eps that this format can hold (1e-4 in fp16; next to 1, 1e-6 in fp32), or a wider format",
        helps=("fp32", "fix_code", "skip"),
        rule=rules_of_norms.normalisation,
    ),
    CauseRow(
        name="division_by_near_zero_norm",
        title="division by a norm that is zero",
        fix="torch.nn.functional.normalize(x, eps=1e-6), or leave out vectors of zeros",
        rule=rules_of_norms.norm_inside,
    ),
    CauseRow(
        name="inf_minus_inf",
        title="infinity minus infinity",
        fix="mask with a large negative finite number instead of -inf",
        rule=rules.infinities,
    ),
    CauseRow(
        name="overflow_fp16",
        title="overflow of fp16",
        fix="scale down before this op, normalise, or run it in bf16 or fp32",
        helps=("fp32", "fix_code", "skip"),
        rule=rules.overflow,
    ),
    CauseRow(
        name="overflow_any_precision",
        title="overflow in any precision",
        fix="bound the values: normalise between layers, clamp, or leave out extreme inputs",
        helps=("fix_code", "skip", "fix_data"),
        fixes=(("*prod", "compute in log-space: the sum of the logarithms, torch.cumsum(x.log(), 0)"),),
    ),
    CauseRow(
        name="zero_over_zero",
        title="zero divided by zero",
        fix="clamp the denominator, y.clamp(min=eps) or max(y, eps); skip what has no elements",
        rule=rules_of_means.over_nothing,
        fixes=tuple((op, _COUNTED) for op in ("*loss*", "*cross_entropy*", "fill", "mean", "segment_reduce")),
    ),
)
"""The values of the operands decide."""

_FOUND_ELSEWHERE = (
    CauseRow(
        name="input_nonfinite",
        title="non-finite data",
        fix="clean the data, or mask such entries before they are used",
        helps=("skip", "fix_data"),
    ),
    CauseRow(
        name="learning_rate_too_high",
        title="learning rate far too high",
        fix="lower the learning rate by some powers of ten, or warm it up",
        helps=("lower_lr", "fix_code"),
    ),
    CauseRow(
        name="weight_decay_too_high",
        title="weight decay far too high",
        fix="lower the weight decay: weights shrink only if the learning rate times the weight decay is below 1",
        helps=("fix_code",),
    ),
    CauseRow(
        name="gradient_explosion",
        title="exploding gradients",
        fix="lower the learning rate and clip the gradient norm",
        helps=("clip", "lower_lr", "fix_code"),
    ),
    CauseRow(
        name="parameter_corrupted",
        title="corrupted parameter",
        fix="find what wrote to this parameter: an update (learning rate), initialisation, checkpoint, weight surgery",
        helps=("fix_code",),
    ),
    CauseRow(
        name="buffer_corrupted",
        title="corrupted buffer",
        fix="find what wrote to the buffer (a batch like this one, a checkpoint), and reset it",
        helps=("fix_code", "fix_data"),
    ),
    CauseRow(
        name="optimizer_state_corrupted",
        title="corrupted optimizer state",
        fix="find what wrote to the optimizer's state; restore it from a good checkpoint",
        helps=("fix_code", "fix_data"),
    ),
    CauseRow(
        name="optimizer_eps_underflow",
        title="an optimizer eps that is zero in this format",
        fix="use an eps that the parameters' format can hold (1e-8 in fp32, 1e-4 in fp16), or fp32 parameters",
        helps=("fp32", "fix_code"),
    ),
    CauseRow(
        name="loss_scale_overflow",
        title="loss scale too large",
        fix="lower the loss scale, or let it adapt by itself",
        helps=("skip", "fix_code"),
    ),
    CauseRow(
        name="attention_logit_growth",
        title="attention logits that keep growing",
        fix="scale or normalise queries and keys (QK-norm), or lower their learning rate",
        helps=("lower_lr", "fp32", "fix_code"),
    ),
    CauseRow(
        name="nondeterministic_hardware_fault",
        title="a fault that does not repeat: hardware, or a race",
        fix="nothing in the program: skip the step; if it happens again, take the device out",
        helps=("skip",),
    ),
    CauseRow(
        name="unknown",
        title="unknown",
        fix="look at the operands, which nanguard explain prints, and at the line that made them",
        helps=("skip",),
    ),
)
"""Found by ``state_faults``, ``op_faults``, ``process`` and ``Examiner``."""

TABLE: tuple[CauseRow, ...] = (*_BY_ORIGIN, *_BY_VALUE, *_FOUND_ELSEWHERE)
