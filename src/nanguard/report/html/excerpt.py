"""The lines of the user's program around the one to blame, if they are still what they were."""

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
    """Numbered lines; ``note`` says why there is only one where there is."""

    lines: tuple[tuple[int, str], ...]
    note: str = ""


def excerpt(source: Source, around: int = _AROUND) -> Excerpt:
    """Only Python files are opened: the name comes from a log, and what is shown may be passed on with the page."""
    alone = ((source.line, source.text),)
    path = Path(source.file)
    try:
        if path.suffix not in (".py", ".pyw") or not path.is_file() or path.stat().st_size > _LARGEST:
            return Excerpt(lines=alone, note="The file is not here to be shown.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return Excerpt(lines=alone, note="The file cannot be read here.")
    if not 1 <= source.line <= len(lines) or lines[source.line - 1].strip() != source.text.strip():
        return Excerpt(lines=alone, note="The file has changed since; this is the line as it was.")
    first, last = max(1, source.line - around), min(len(lines), source.line + around)
    return Excerpt(lines=tuple((n, lines[n - 1].expandtabs(4).rstrip()) for n in range(first, last + 1)))
