"""The text that ``nanguard explain`` and ``nanguard replay`` print about an incident. Nothing is printed here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import BundleError, RunLogError
from nanguard.incidents.bundle import folders
from nanguard.incidents.files import INCIDENT
from nanguard.incidents.reader import Bundle, load
from nanguard.records.diagnosis import Diagnosis, Source
from nanguard.records.panel import panel
from nanguard.records.printable import printable_lines
from nanguard.records.run import RUN_LOG, can_run_again
from nanguard.records.steps import Incident, Outcome
from nanguard.replay.repeated import RepeatedIncident, by_fault
from nanguard.replay.runs import header_of
from nanguard.runlog.reader import read_run
from nanguard.source.excerpt import excerpt

if TYPE_CHECKING:
    from nanguard.replay.rerun import Replayed

_CONTENTS = (INCIDENT, RUN_LOG, "incidents")
_WRONG = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def is_one(path: Path) -> bool:
    """Whether a path is a run or an incident, and not a folder of runs."""
    return path.is_file() or path.name == "incidents" or any((path / name).exists() for name in _CONTENTS)


def find(path: Path) -> tuple[list[Path], bool]:
    """The incidents at a path, in order, and whether the path is a run.

    A path is the folder of an incident, its ``incident.json``, the folder of a run, its log, or its ``incidents``.
    Raises ``BundleError`` for anything else.
    """
    try:
        if path.name == RUN_LOG and path.is_file():
            return folders(path.parent), True
        if path.is_file() or (path / INCIDENT).exists():
            return [path], False
        if not path.exists():
            raise BundleError(f"{path}: there is no such file or folder")
        if path.name == "incidents" and path.is_dir():
            return folders(path.parent), True
        if (path / "incidents").is_dir() or (path / RUN_LOG).exists():
            return folders(path), True
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    raise BundleError(f"{path}: this is neither a run, as in runs/a, nor an incident, as in runs/a/incidents/0001")


def about(bundles: Sequence[Bundle], run_dir: Path | None, *, brief: bool) -> Iterator[str]:
    """The text about these incidents, in parts. The one of which most is known comes first, in full.

    With ``brief``, a few lines for each fault. ``run_dir`` is None for an incident that was asked for alone.
    """
    faults = by_fault(bundles, () if run_dir is None else _logged(run_dir))
    for place, fault in enumerate(faults if brief else faults[:1]):
        text = fault.told(short(fault.best) if brief else long(fault.best))
        yield f"\n{text}" if place else text
    if run_dir is not None and not brief and len(faults) > 1:
        yield f"\n{_others(faults[1:], run_dir, sum(fault.count for fault in faults))}"


def _logged(path: Path) -> list[Outcome]:
    """The incidents in the log of a run. Without a log, those that were saved are all that is known."""
    try:
        return [incident.outcome for incident in read_run(_run_dir(path)).incidents]
    except RunLogError:
        return []


def _run_dir(path: Path) -> Path:
    """The folder of a run, of its log or of its incidents."""
    return path.parent if path.name in (RUN_LOG, "incidents") else path


def short(bundle: Bundle) -> str:
    """What happened, in a few lines."""
    try:
        return printable_lines(panel(Incident(number=bundle.number, outcome=bundle.outcome)))
    except _WRONG as error:
        raise BundleError(f"{bundle.path} has invalid contents: {type(error).__name__}: {error}") from None


def long(bundle: Bundle) -> str:
    """Everything that is known, with the lines of the program around the faulty one."""
    try:
        parts = [panel(Incident(number=bundle.number, outcome=replace(bundle.outcome, diagnosis=None, bundle="")))]
        diagnosis = bundle.diagnosis
        if diagnosis is None:
            parts.append("not examined, so the cause is not known")
        else:
            parts.append(diagnosis.report())
            if diagnosis.source is not None:
                parts.append("\n".join(_around(diagnosis.source)))
        parts.append("\n".join(_history(bundle)))
        parts.append("\n".join(_kept(bundle)))
        return printable_lines("\n\n".join(filter(None, parts)))
    except _WRONG as error:
        raise BundleError(f"{bundle.path} has invalid contents: {type(error).__name__}: {error}") from None


def as_dict(bundle: Bundle) -> dict[str, Any]:
    """The contents of ``incident.json`` without the data."""
    return {"path": str(bundle.path), **bundle.facts}


def _others(faults: Sequence[RepeatedIncident], run_dir: Path, num_incidents: int) -> str:
    """The other faults of a run, a line for each, and how to see one of them in full."""
    lines = []
    for fault in faults:
        lines += [f"  {fault.in_one_line()}", f"    nanguard explain {shlex.quote(str(fault.best.path))}"]
    head = f"other faults ({num_incidents:,} incidents in {run_dir})"
    return printable_lines("\n".join([head, *lines]))


def nothing_in(path: Path) -> str:
    """A sentence for a run without saved incidents. Raises ``BundleError`` if its log cannot be read."""
    run_dir = _run_dir(path)
    if not (run_dir / RUN_LOG).exists():
        return f"{path}: no incident was saved"
    try:
        num_logged = len(read_run(run_dir).incidents)
    except RunLogError as error:
        raise BundleError(str(error)) from None
    if not num_logged:
        return f"{path}: no incidents in this run"
    return (
        f"{path}: no incident is saved here, since the run had capture='none' or they were removed. {RUN_LOG} lists "
        f"{num_logged:,}:\n  nanguard report {shlex.quote(str(run_dir))}"
    )


def outcome(replayed: Replayed, bundle: Bundle) -> str:
    """The result of running the step again."""
    lines = []
    if replayed.differs:
        lines.append("NOT reproduced: " + "; ".join(replayed.differs))
        if "weights" not in bundle.captured:
            lines.append("   hint      capture='full' (nanguard run --capture full) saves the weights of the step too")
    elif replayed.recorded is None:
        lines.append("reproduced: the step is non-finite here too; the run did not examine it")
    else:
        lines.append(f"reproduced: {_what(replayed.recorded)}")
    lines += [f"   note      {note}" for note in replayed.notes]
    if replayed.diagnosis is not None:
        lines += ["", str(replace(replayed.diagnosis, step=bundle.outcome.verdict.reading.step))]
    return printable_lines("\n".join(lines))


def _what(diagnosis: Diagnosis) -> str:
    where = f" in {diagnosis.module}" if diagnosis.module else ""
    at = f", {diagnosis.source}" if diagnosis.source is not None else ""
    return f"{diagnosis.words}, {diagnosis.op or diagnosis.phase}{where}{at}"


def _around(source: Source) -> Iterator[str]:
    shown = excerpt(source)
    yield f"{source.file}, in {source.function or 'the file itself'}"
    width = len(str(shown.lines[-1][0]))
    for number, line in shown.lines:
        yield f"  {'>' if number == source.line else ' '} {number:>{width}}  {line}".rstrip()
    if shown.note:
        yield f"  {shown.note}"


def _history(bundle: Bundle) -> Iterator[str]:
    recent = bundle.history[-5:]
    if not recent:
        return
    yield "steps before it"
    for reading in recent:
        norms = f", gradient norm {', '.join(f'{norm:.4g}' for norm in reading.norms[:4])}" if reading.norms else ""
        scale = f", loss scale {reading.scale:g}" if reading.scale is not None else ""
        yield f"  step {reading.step:,}: loss {reading.loss:.6g}{norms}{scale}"


def _kept(bundle: Bundle) -> Iterator[str]:
    environment = bundle.facts["environment"]
    names = ("precision", "device", "device_name", "torch", "python", "platform")
    yield "where it ran"
    yield "  " + ", ".join(f"{name} {environment.get(name)}" for name in names if environment.get(name))
    yield f"saved to {bundle.path}"
    yield f"  {', '.join(bundle.captured) or 'only this text'}"
    for each in bundle.facts["left_out"]:
        yield f"  left out: {each['what']} ({each['why']})"
    for note in bundle.facts["notes"]:
        yield f"  {note}"
    if "batch" in bundle.captured or "samples" in bundle.captured:
        where = shlex.quote(str(bundle.path))
        yield "run it again"
        yield f"  nanguard replay {where}{'' if can_run_again(header_of(bundle)) else ' --entry train.py:build'}"


def read(path: Path) -> Bundle:
    """The incident at a path, or the one of a run that ``about`` leads with. Raises ``BundleError``."""
    paths, is_run = find(path)
    if not paths:
        raise BundleError(nothing_in(path))
    return by_fault(load(each) for each in paths)[0].best if is_run else load(paths[0])
