"""The records of a preflight: what broke, what nearly did, and what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nanguard.records.diagnosis import Diagnosis
from nanguard.records.diagnosis_text import page_of
from nanguard.records.diagnosis_text import rows as diagnosis_rows
from nanguard.records.layout import laid_out, verbatim
from nanguard.records.plain import plain

Severity = Literal["broke", "nearly"]
"""``broke``: the step is non-finite with the given weights and legal data. ``nearly``: it takes more, such as inputs
or a learning rate that are ten times larger, or other weights; or it is finite, and a value has no room left."""

Reach = Literal["data", "input", "gradients", "larger", "settings", "weights"]
"""What it takes: the ``data`` as they are; an ``input`` in the range of the data; ``gradients`` that a layer may get;
an input that is ten times ``larger``; other ``settings``, such as a higher learning rate; ``weights`` that training
can reach."""

_TAKES = {
    "data": "the data as they are",
    "input": "an input in the range of the data",
    "gradients": "gradients that a layer may get",
    "larger": "an input that is ten times larger",
    "settings": "other settings",
    "weights": "weights that training can reach",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightFinding:
    """One thing to mend. ``stress`` says in words what was done to the step; ``also`` counts further ways to get there.

    ``diagnosis`` says where and why. ``bundle`` is the folder of the saved step, empty if it was not saved; ``entry``
    names the function that builds the program for ``nanguard replay``.
    """

    severity: Severity
    reach: Reach
    stress: str
    diagnosis: Diagnosis
    also: int = 0
    bundle: str = ""
    entry: str = "FILE:FUNCTION"

    def __str__(self) -> str:
        """The panel."""
        diagnosis = self.diagnosis
        head = f" nanguard  preflight  {self.severity}: {diagnosis.words}, with {_TAKES[self.reach]}"
        more = f" (and {self.also} more)" if self.also else ""
        rows = [
            ("input" if self.reach in ("input", "larger") else "when", f"{self.stress}{more}"),
            *diagnosis_rows(diagnosis),
        ]
        rows.append(("docs", page_of(diagnosis)))
        if self.bundle:
            replay = f"nanguard replay {self.bundle} --entry {self.entry}"
            rows.append(("saved to", f"{self.bundle}{verbatim(replay)}"))
        return laid_out(head, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightReport:
    """What a preflight found. ``num_steps`` were run in ``seconds``.

    ``cut_short`` lists what there was too little time for, ``refused`` what the program itself refused with an error.
    """

    findings: tuple[PreflightFinding, ...]
    num_steps: int
    seconds: float
    cut_short: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """0 if nothing was found, else 1."""
        return 1 if self.findings else 0

    def with_entry(self, entry: str) -> PreflightReport:
        """The same, with the function that builds the program."""
        return replace(self, findings=tuple(replace(finding, entry=entry) for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, as JSON can hold them."""
        whole: dict[str, Any] = plain({"schema": 1, "status": self.status, **asdict(self)})
        return whole

    def __str__(self) -> str:
        """All panels, and a line at the end."""
        return "\n\n".join([*map(str, self.findings), self.summary])

    @property
    def summary(self) -> str:
        """One line."""
        broke = sum(finding.severity == "broke" for finding in self.findings)
        nearly = len(self.findings) - broke
        counts = [f"{broke} broke"] * bool(broke) + [f"{nearly} nearly did"] * bool(nearly)
        found = ", ".join(counts) or "nothing found"
        cut = f"; cut short: {', '.join(self.cut_short)}. More minutes would help" if self.cut_short else ""
        return f"preflight: {found} ({self.num_steps:,} steps in {self.seconds:.0f} s){cut}"
