"""What nanguard raises.

    NanguardError
    ├── NonFiniteError    the policy ran out of patience: training halts, nothing is corrupted
    ├── ProtocolError     the guard's calls came in an order that makes no sense
    ├── BundleError       a folder is no incident that nanguard wrote, or not all of one
    ├── RunLogError       a file is no run log that nanguard wrote, or cannot be read
    ├── LaunchError       a program that nanguard is to run cannot be found
    ├── ReplayError       a step that was kept could not be run again
    ├── ReportError       a report could not be made or written
    └── ScriptError       a program could not be read, to look at it

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
