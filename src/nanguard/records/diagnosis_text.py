"""A diagnosis as plain text: the rows of a panel, and the long text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nanguard.records.layout import laid_out, verbatim
from nanguard.records.words import counted, joined, listed

if TYPE_CHECKING:
    from nanguard.records.diagnosis import Diagnosis, Link, Operand, Source, Stretch, Trial

_CAPTURED = {
    "step": "the whole step was replayed",
    "tape": "the calls of the model, and the torch calls around it, were made again",
    "module": "the model was replayed from its captured inputs and the gradient of its output",
    "live": "the step was traced as it ran",
    "graph": "the loss was taken apart before its backward pass; the line was found by reading the program",
    "update": "the optimizer's update was made again, and taken back",
    "none": "nothing could be replayed",
}
_MOST_SAMPLES = 8
_SURE = ("guess", "likely", "certain")
_FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """The name and text of each row of a panel."""
    if diagnosis.network:
        yield "network", diagnosis.network
    if diagnosis.op or diagnosis.module or diagnosis.source is not None:
        yield "where", _where(diagnosis)
    yield "why", ": ".join(filter(None, [diagnosis.words, diagnosis.because]))
    if diagnosis.samples:
        samples, indices = ([*map(str, each)] for each in (diagnosis.samples, diagnosis.dataset_indices))
        places = "index" if len(samples) == 1 else "indices"
        where = f"{places} {listed(samples, _MOST_SAMPLES)} of the batch"
        if indices:
            where += f": dataset {places} {listed(indices, _MOST_SAMPLES)}"
            where += " if collate_fn keeps the order" * diagnosis.is_order_assumed
            if diagnosis.is_record_finite:
                where += f"; read again, record {indices[0]} is finite: the dataset may draw records at random"
        if diagnosis.element:
            where += f", first at {list(diagnosis.element)}"
        yield "sample", where
    if diagnosis.fix.words:
        yield "fix", diagnosis.fix.words
    if tried := _tried(diagnosis):
        yield "tried", tried


def page_of(diagnosis: Diagnosis) -> str:
    """The page of the documentation about the cause."""
    return f"docs/causes/{diagnosis.cause}.md"


def panel_of(diagnosis: Diagnosis) -> str:
    """The diagnosis in a few lines."""
    at = "" if diagnosis.step is None else f"  step {diagnosis.step:,}"
    head = f" nanguard{at}  {diagnosis.words} ({diagnosis.phase}, {diagnosis.confidence})"
    return laid_out(head, [*rows(diagnosis), ("docs", page_of(diagnosis))])


def long_text_of(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, in sections."""
    sections: dict[str, Iterable[str]] = {
        "evidence": facts(diagnosis),
        "path of the bad value": map(_link, diagnosis.chain),
        "largest values inside each module, in the order of the forward pass": _trail(diagnosis.trail),
        "tried on this step": _trials(diagnosis.tried),
        "other non-finite values, which reached neither loss nor gradient": map(_link, diagnosis.harmless),
        "how this was found": how_found(diagnosis),
    }
    parts = [panel_of(diagnosis)]
    for title, lines in sections.items():
        if indented := [f"  {line}" for line in lines]:
            parts.append("\n".join([title, *indented]))
    return "\n\n".join(parts)


def _trail(trail: Sequence[Stretch]) -> Iterator[str]:
    width = max((len(stretch.module or "(top level)") for stretch in trail), default=0)
    for stretch in trail:
        known = stretch.low is not None and stretch.high is not None
        span = f"{stretch.low:>10.3g} .. {stretch.high:<10.3g}" if known else f"{'NaN or Inf':^24}"
        mark = "" if stretch.is_finite else "   <- non-finite"
        yield f"{stretch.module or '(top level)':<{width}}  {span} {format_name(stretch.dtype):<5} {stretch.op}{mark}"


def _trials(tried: Sequence[Trial]) -> Iterator[str]:
    width = min(48, max((len(trial.what) for trial in tried), default=0))
    for trial in tried:
        yield f"{trial.what:<{width}}  {trial.result or 'no result: ' + trial.detail}"


def place_in_words(module: str, source: Source | None = None) -> str:
    """A module as people speak of it, or else the line. Empty if neither is known.

    A module in an ``nn.Sequential`` has only a number, which says nothing alone.
    """
    if module.replace(".", "").isdigit():
        return f"module {module}" + ("" if source is None else f", {source}")
    return module or ("" if source is None else str(source))


def _where(diagnosis: Diagnosis) -> str:
    source, module, op = diagnosis.source, place_in_words(diagnosis.module), diagnosis.op
    line = "" if source is None else f"{'' if diagnosis.is_line_traced else 'probably '}{source}"
    place = ", ".join(filter(None, [line, module and f"in {module}"]))
    if diagnosis.phase == "data" and not diagnosis.is_line_of_maker:
        used = f"first used {'at ' if line else ''}{place}" if place else "in the batch"
        place = used.replace("first used at probably", "probably first used at")
    elif diagnosis.phase == "data":  # the line is where the data come from
        used = f"in {module}" if module else op and f"by {op}"
        place = ", ".join(filter(None, [line and f"{line} makes it", used and f"first used {used}"]))
        op = op if module else ""
    what = ", ".join(filter(None, [op, diagnosis.phase, format_name(diagnosis.dtype)]))
    code = verbatim(source.statement or source.text) if source is not None and source.text else ""
    return (f"{place} ({what})" if place else what) + code


def _tried(diagnosis: Diagnosis) -> str:
    """The fix that was tried on this step. Advice that was not tried is not in it."""
    fix, modules = diagnosis.fix, diagnosis.modules_to_keep
    if fix.worked is None:
        return ""
    what = f"{joined(modules)} in fp32" if modules else "the whole model in fp32"
    if fix.worked:
        result = "make this step finite" if len(modules) > 1 else "makes this step finite"
    else:
        result = "is not enough for this step"
    return f"{what} {result}" + (f":{verbatim(fix.code)}" if fix.code else "")


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
    has_finite = operand.num_nan + operand.num_inf < math.prod(operand.shape)
    span = ""
    if has_finite and operand.low is not None and operand.high is not None:
        span = f", {operand.low:.4g} .. {operand.high:.4g}"
    bad = [f"{number:,} {name}" for number, name in ((operand.num_nan, "NaN"), (operand.num_inf, "Inf")) if number]
    at = "" if operand.value is None else f", {operand.value:.6g} at the offending element"
    return f"{operand.name}: {format_name(operand.dtype)} {shape}{span}{''.join(f', {b}' for b in bad)}{at}"


def format_name(dtype: str) -> str:
    """``fp16`` for ``float16``, and so on."""
    return _FORMATS.get(dtype, dtype)


def _link(link: Link) -> str:
    line = "" if link.source is None else f"{link.source}   {link.source.text}".rstrip()
    return "   ".join(filter(None, [link.became, f"{link.op}, {link.phase}", link.module or "(top level)", line]))


def examined(diagnosis: Diagnosis | None) -> tuple[Any, ...]:
    """How much is known about an incident. A greater tuple is better."""
    if diagnosis is None:
        return (False,)
    is_known = diagnosis.cause != "unknown"
    is_traced = diagnosis.source is not None and diagnosis.is_line_traced
    return True, is_known, diagnosis.depth == "full", _SURE.index(diagnosis.confidence), is_traced


def how_found(diagnosis: Diagnosis) -> Iterator[str]:
    """How the diagnosis was made, one line per fact."""
    replays = f"{counted(diagnosis.num_replays, 'replay')}, {diagnosis.seconds:.2f} s"
    where = f"rank {diagnosis.rank}, {diagnosis.device or 'cpu'}"
    yield f"{_CAPTURED[diagnosis.capture]}; {diagnosis.depth}: {replays}; {where}"
    if diagnosis.microbatch is not None:
        yield f"micro-batch {diagnosis.microbatch} of the step"
    yield from diagnosis.notes
