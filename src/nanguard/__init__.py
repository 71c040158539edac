"""nanguard keeps mixed-precision PyTorch training finite."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.autopilot.entry import install
    from nanguard.errors import NanguardError, NonFiniteError, ProtocolError
    from nanguard.guard import Guard
    from nanguard.monitor.observer import Monitor
    from nanguard.numerics.clip import AGC, ZScore
    from nanguard.policy.divergence import Divergence
    from nanguard.policy.policy import Policy
    from nanguard.policy.rungs import (
        CallFunction,
        DropBadGradients,
        Halt,
        LowerLR,
        RaisePrecision,
        Rollback,
        Skip,
        TakeSnapshot,
    )
    from nanguard.preflight_checks.flight import preflight
    from nanguard.records.diagnosis import Diagnosis
    from nanguard.runlog.reader import read_run
    from nanguard.standalone import diagnose
    from nanguard.state.snapshots.options import Snapshots
    from nanguard.step.observers import Observer
    from nanguard.step.precision import LossScale

__all__ = [
    "AGC",
    "CallFunction",
    "Diagnosis",
    "Divergence",
    "DropBadGradients",
    "Guard",
    "Halt",
    "LossScale",
    "LowerLR",
    "Monitor",
    "NanguardError",
    "NonFiniteError",
    "Observer",
    "Policy",
    "ProtocolError",
    "RaisePrecision",
    "Rollback",
    "Skip",
    "Snapshots",
    "TakeSnapshot",
    "ZScore",
    "__version__",
    "diagnose",
    "install",
    "preflight",
    "read_run",
]

__version__ = "0.1.0"

_HOME = {
    "AGC": "numerics.clip",
    "CallFunction": "policy.rungs",
    "Diagnosis": "records.diagnosis",
    "Divergence": "policy.divergence",
    "DropBadGradients": "policy.rungs",
    "Guard": "guard",
    "Halt": "policy.rungs",
    "LossScale": "step.precision",
    "LowerLR": "policy.rungs",
    "Monitor": "monitor.observer",
    "NanguardError": "errors",
    "NonFiniteError": "errors",
    "Observer": "step.observers",
    "Policy": "policy.policy",
    "ProtocolError": "errors",
    "RaisePrecision": "policy.rungs",
    "Rollback": "policy.rungs",
    "Skip": "policy.rungs",
    "Snapshots": "state.snapshots.options",
    "TakeSnapshot": "policy.rungs",
    "ZScore": "numerics.clip",
    "diagnose": "standalone",
    "install": "autopilot.entry",
    "preflight": "preflight_checks.flight",
    "read_run": "runlog.reader",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: importing torch takes seconds, and `nanguard --help` needs none."""
    if name not in _HOME:
        raise AttributeError(f"module 'nanguard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nanguard.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
