"""What nanguard raises.

    NanguardError
    ├── NonFiniteError    the policy halts training; nothing is corrupted
    ├── ProtocolError     methods of the guard were called in the wrong order
    ├── BundleError       a folder is not an incident that nanguard wrote, or is incomplete
    ├── RunLogError       a file is not a run log that nanguard wrote, or cannot be read
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
    """The base class of every error that nanguard raises on purpose."""


class NonFiniteError(NanguardError, ArithmeticError):
    """A step was non-finite and the policy says to halt.

    Weights, optimizer state, buffers and schedule are as they were before that step. If they were damaged already, the
    newest good snapshot has been restored; if there is none, the message says so. ``incident`` is the record of the
    step.
    """

    def __init__(self, message: str, incident: Incident) -> None:
        super().__init__(message)
        self.incident = incident

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, Incident]]:
        return type(self), (str(self), self.incident)


class ProtocolError(NanguardError, RuntimeError):
    """Methods were called in the wrong order. The message names both calls."""


class BundleError(NanguardError, ValueError):
    """A folder is not an incident that nanguard wrote, or is incomplete. The message says what, where and why."""


class RunLogError(NanguardError, ValueError):
    """A file is not a run log that nanguard wrote, or cannot be read. The message says what, where and why."""


class LaunchError(NanguardError):
    """The program to run cannot be found. The message says where nanguard looked."""


class ReplayError(NanguardError):
    """A step could not be run again. The message says why, and what to do."""


class ReportError(NanguardError):
    """A report could not be made or written. The message says why, and what to do."""


class ScriptError(NanguardError, ValueError):
    """A program could not be read or parsed. The message says why."""
