"""The result of a checkup: facts about the machine, and findings with what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "advice"]
"""``error``: training fails or learns the wrong thing. ``warning``: it may fail or is slow. ``advice``: better ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptLine:
    """A line of a program."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckupFinding:
    """Something to change. ``place`` is None if it is about the machine."""

    rule: str
    severity: Severity
    what: str
    why: str
    change: str
    place: ScriptLine | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact about the machine."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """All facts and findings. ``script`` is None if no program was given."""

    facts: tuple[Fact, ...]
    findings: tuple[CheckupFinding, ...]
    script: str | None = None

    @property
    def status(self) -> int:
        """1 if there is something to change, else 0."""
        return 1 if self.findings else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "status": self.status,
            "script": self.script,
            "machine": {fact.name: fact.value for fact in self.facts},
            "findings": [asdict(finding) for finding in self.findings],
        }
