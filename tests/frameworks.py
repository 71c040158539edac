"""Helpers for tests with real training frameworks."""

from __future__ import annotations

import importlib.util
import sys


def hide_broken_torchvision() -> None:
    """A torchvision that was built for another torch cannot be imported, and transformers would try to."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
