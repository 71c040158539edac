"""A diagnosis as plain text: the rows of a panel, and the long text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.records.diagnosis import Diagnosis, Link, Operand, Source

_CAPTURED = {
    "step": "the whole step was replayed",
    "module": "the model was replayed from its captured inputs and the gradient of its output",
    "live": "the step was traced as it ran",
    "graph": "the loss was taken apart before its backward pass; the line was found by reading the program",
    "update": "the optimizer's update was made again, and taken back",
    "none": "nothing could be replayed",
}
_FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """The name and text of each row of a panel."""
    if diagnosis.op or diagnosis.module or diagnosis.source is not None:
        yield "first in" if diagnosis.phase == "data" else "born in", _birth(diagnosis)
    yield "because", f"{diagnosis.words}: {diagnosis.because}"
    if diagnosis.samples:
        places = "index" if len(diagnosis.samples) == 1 else "indices"
        yield "samples", f"{places} {_numbers(diagnosis.samples)} of the batch{_element(diagnosis)}"
    fix = _fix(diagnosis)
    if fix:
        yield "fix", fix


def panel_of(diagnosis: Diagnosis) -> str:
    """The diagnosis in a few lines."""
    at = "" if diagnosis.step is None else f"  step {diagnosis.step:,}"
    head = f" nanguard{at}  {diagnosis.words} ({diagnosis.phase}, {diagnosis.confidence})"
    return "\n".join([head, *(f"   {name:<9} {text}" for name, text in rows(diagnosis))])


def long_text_of(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, in sections."""
    parts = [panel_of(diagnosis)]
    evidence = [f"  {fact}" for fact in facts(diagnosis)]
    if evidence:
        parts.append("\n".join(["evidence", *evidence]))
    if diagnosis.chain:
        parts.append("\n".join(["from birth to where it showed", *(f"  {_link(link)}" for link in diagnosis.chain)]))
    if diagnosis.trail:
        width = max(len(stretch.module or "(top level)") for stretch in diagnosis.trail)
        lines = [
            f"  {stretch.module or '(top level)':<{width}}  {_bound(stretch.low):>10} .. {_bound(stretch.high):<10} "
            f"{format_name(stretch.dtype):<5} {stretch.op}{'' if stretch.is_finite else '   <- non-finite'}"
            for stretch in diagnosis.trail
        ]
        parts.append("\n".join(["largest values inside each module, in the order of the forward pass", *lines]))
    if diagnosis.tried:
        lines = [f"  {trial.what:<48} {trial.result or 'not tried: ' + trial.detail}" for trial in diagnosis.tried]
        parts.append("\n".join(["tried on this step", *lines]))
    if diagnosis.harmless:
        lines = [f"  {_link(link)}" for link in diagnosis.harmless]
        parts.append("\n".join(["other non-finite values, which reached neither loss nor gradient", *lines]))
    parts.append("\n".join(["how this was found", *(f"  {line}" for line in how_found(diagnosis))]))
    return "\n\n".join(parts)


def _birth(diagnosis: Diagnosis) -> str:
    what = ", ".join(filter(None, [diagnosis.op, diagnosis.phase, format_name(diagnosis.dtype)]))
    where = diagnosis.module or "(top level)"
    line = _line(diagnosis.source)
    return "   ".join(filter(None, [where, what, line if diagnosis.is_line_traced or not line else f"probably {line}"]))


def _line(source: Source | None) -> str:
    return "" if source is None else f"{source}   {source.text}".rstrip()


def _fix(diagnosis: Diagnosis) -> str:
    fix = diagnosis.fix
    text = ", or  ".join(filter(None, [fix.words, fix.code]))
    if not text:
        return ""
    tried = {True: "tried on this step: finite", False: "tried on this step: not enough", None: "not tried"}[fix.worked]
    return f"{text}   ({tried})"


def _element(diagnosis: Diagnosis) -> str:
    return f", first at {list(diagnosis.element)}" if diagnosis.element else ""


def facts(diagnosis: Diagnosis) -> Iterator[str]:
    """The evidence, one line per fact."""
    yield from diagnosis.evidence
    for operand in diagnosis.operands:
        yield _operand(operand)
    if diagnosis.since_step is not None:
        yield f"the state was still good before step {diagnosis.since_step:,}"


def _operand(operand: Operand) -> str:
    if not operand.dtype:
        return operand.name if operand.value is None else f"{operand.name} = {operand.value:g}"
    shape = " x ".join(map(str, operand.shape)) or "scalar"
    span = "" if operand.low is None or operand.high is None else f", {operand.low:.4g} .. {operand.high:.4g}"
    bad = [f"{number:,} {name}" for number, name in ((operand.num_nan, "NaN"), (operand.num_inf, "Inf")) if number]
    at = "" if operand.value is None else f", {operand.value:.6g} at the offending element"
    return f"{operand.name}: {format_name(operand.dtype)} {shape}{span}{''.join(f', {b}' for b in bad)}{at}"


def format_name(dtype: str) -> str:
    """``fp16`` for ``float16``, and so on."""
    return _FORMATS.get(dtype, dtype)


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _link(link: Link) -> str:
    where = link.module or "(top level)"
    return "   ".join(filter(None, [link.became, f"{link.op}, {link.phase}", where, _line(link.source)]))


def how_found(diagnosis: Diagnosis) -> Iterator[str]:
    """How the diagnosis was made, one line per fact."""
    replays = f"{diagnosis.num_replays} replay{'s' * (diagnosis.num_replays != 1)}, {diagnosis.seconds:.2f} s"
    where = f"rank {diagnosis.rank}, {diagnosis.device or 'cpu'}"
    yield f"{_CAPTURED[diagnosis.capture]}; {diagnosis.depth}: {replays}; {where}"
    if diagnosis.microbatch is not None:
        yield f"micro-batch {diagnosis.microbatch} of the step"
    yield from diagnosis.notes


def _numbers(values: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
