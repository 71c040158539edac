"""What is known about steps and runs, as frozen records.

Import the types that nanguard returns from here: ``from nanguard.records import Incident, Run``. Needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.records.alert import Alert
    from nanguard.records.diagnosis import Diagnosis, Fix, Link, Operand, Source, Stretch, Trial
    from nanguard.records.run import EventRecord, IncidentRecord, Run, StepRecord
    from nanguard.records.steps import Action, Flags, Incident, Means, Outcome, Progress, Reading, Verdict

__all__ = [
    "Action",
    "Alert",
    "Diagnosis",
    "EventRecord",
    "Fix",
    "Flags",
    "Incident",
    "IncidentRecord",
    "Link",
    "Means",
    "Operand",
    "Outcome",
    "Progress",
    "Reading",
    "Run",
    "Source",
    "StepRecord",
    "Stretch",
    "Trial",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    """Imports a record when it is first used, so that ``nanguard --help`` stays fast."""
    if name in __all__:
        for module in ("steps", "run", "diagnosis", "alert"):
            if (value := getattr(import_module(f"nanguard.records.{module}"), name, None)) is not None:
                return value
    raise AttributeError(f"module 'nanguard.records' has no attribute {name!r}")
