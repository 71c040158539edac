"""Records as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """The value with NaN and Inf as strings, and tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
