"""What an adapter is given, checked when it is given: a wrong option must not come to light when training begins."""

from __future__ import annotations

from typing import Any

from nanguard.step.assembly import check_choice, choose_policy
from nanguard.step.observers import Observers


def checked_options(**options: Any) -> dict[str, Any]:
    """The options of ``HostedLoop`` that every adapter takes. Raises ``ValueError`` if one is wrong."""
    choose_policy(options["policy"])
    Observers(options["observers"])
    for name in ("diagnose", "capture"):
        check_choice(name, options[name])
    return options


def check_given(given: Any, *attributes: str, needed: str) -> None:
    """Raises ``ValueError`` if an object of the framework lacks one of these attributes. ``needed`` says what it is."""
    if not all(hasattr(given, name) for name in attributes):
        raise ValueError(f"attach() needs {needed}, got {given!r:.80}")
