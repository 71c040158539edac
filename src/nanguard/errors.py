"""What nanguard raises.

    NanguardError
    ├── NonFiniteError    the policy says to halt; nothing is corrupted
    ├── ProtocolError     calls came in the wrong order
    ├── BundleError       a folder is not an incident written by nanguard, or is incomplete
    ├── RunLogError       a file is not a run log written by nanguard, or cannot be read
    ├── LaunchError       the program to run cannot be found
    ├── ReplayError       a saved step could not be run again
    ├── ReportError       a report could not be made or written
    └── ScriptError       a program could not be read or parsed

A bad argument is a plain ``ValueError`` that names the value and what is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.records.steps import Incident


class NanguardError(Exception):
    """The root of everything nanguard raises on purpose."""


class NonFiniteError(NanguardError, ArithmeticError):
    """A step was non-finite and the policy says to halt.

    Raised with weights, optimizer state, buffers and schedule as they were before that step. If these were damaged by
    then, the newest good snapshot has been put back; if there is none, the message says so. ``incident`` is the record
    of it.
    """

    def __init__(self, message: str, incident: Incident) -> None:
        super().__init__(message)
        self.incident = incident

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, Incident]]:
        return type(self), (str(self), self.incident)


class ProtocolError(NanguardError, RuntimeError):
    """Calls came in the wrong order; the message names both."""


class BundleError(NanguardError, ValueError):
    """Something is no incident that nanguard wrote, or not all of one. The message says what, where and why."""


class RunLogError(NanguardError, ValueError):
    """Something is no run log that nanguard wrote, or cannot be read. The message says what, where and why."""


class LaunchError(NanguardError):
    """There is no such program to run. The message says what was looked for."""


class ReplayError(NanguardError):
    """A step could not be run again. The message says why, and what to do."""


class ReportError(NanguardError):
    """A report could not be made or written. The message says why, and what to do."""


class ScriptError(NanguardError, ValueError):
    """A program could not be read or parsed. The message says why."""
