"""The cells of a notebook as files."""

from __future__ import annotations

import re
import sys
from typing import Any

_OLD_NAME = re.compile(r"<ipython-input-(\d+)-.*>")
_IN = re.compile(r"In\[(\d+)\]")


def cell_of(file: str) -> str:
    """``cell 3`` if this is the name under which IPython has compiled the third cell. Empty for any other file."""
    if old := _OLD_NAME.fullmatch(file):
        return f"cell {old[1]}"
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    told = name_of(file) if name_of is not None else None
    match = _IN.search(str(told)) if told else None
    return f"cell {match[1]}" if match else ""
