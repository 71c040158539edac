"""The lines of the user's program around the faulty one, if the file has not changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.records.diagnosis import Source

_AROUND = 3
_LARGEST = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    """Numbered lines. If there is only the faulty one, ``note`` says why."""

    lines: tuple[tuple[int, str], ...]
    note: str = ""


def excerpt(source: Source) -> Excerpt:
    """Opens only Python files: the name comes from a log, and a page with the lines may be shared."""
    alone = ((source.line, source.text),)
    path = Path(source.file)
    try:
        if path.suffix not in (".py", ".pyw") or not path.is_file() or path.stat().st_size > _LARGEST:
            return Excerpt(lines=alone, note="" if source.is_cell else "The file cannot be shown here.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return Excerpt(lines=alone, note="The file cannot be read here.")
    if not 1 <= source.line <= len(lines) or lines[source.line - 1].strip() != source.text.strip():
        return Excerpt(lines=alone, note="The file has changed since. This is the line as it was.")
    first, last = max(1, source.line - _AROUND), min(len(lines), source.line + _AROUND)
    return Excerpt(lines=tuple((n, lines[n - 1].expandtabs(4).rstrip()) for n in range(first, last + 1)))
