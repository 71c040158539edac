"""nanguard keeps mixed-precision PyTorch training finite."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.autopilot.entry import install
    from nanguard.diagnosis.record import Diagnosis
    from nanguard.diagnosis.standalone import diagnose
    from nanguard.divergence import Divergence
    from nanguard.errors import NanguardError, NonFiniteError, ProtocolError
    from nanguard.guard import Guard
    from nanguard.ladder import DropBadGradients, Halt, LowerLR, RaisePrecision, Rollback, Skip
    from nanguard.numerics.clip import AGC, ZScore
    from nanguard.policy import Policy
    from nanguard.precision import LossScale
    from nanguard.runs import read_run
    from nanguard.snapshot.options import Snapshots

__all__ = [
    "AGC",
    "Diagnosis",
    "Divergence",
    "DropBadGradients",
    "Guard",
    "Halt",
    "LossScale",
    "LowerLR",
    "NanguardError",
    "NonFiniteError",
    "Policy",
    "ProtocolError",
    "RaisePrecision",
    "Rollback",
    "Skip",
    "Snapshots",
    "ZScore",
    "__version__",
    "diagnose",
    "install",
    "read_run",
]

__version__ = "0.1.0"

_HOME = {
    "AGC": "numerics.clip",
    "Diagnosis": "diagnosis.record",
    "Divergence": "divergence",
    "DropBadGradients": "ladder",
    "Guard": "guard",
    "Halt": "ladder",
    "LossScale": "precision",
    "LowerLR": "ladder",
    "NanguardError": "errors",
    "NonFiniteError": "errors",
    "Policy": "policy",
    "ProtocolError": "errors",
    "RaisePrecision": "ladder",
    "Rollback": "ladder",
    "Skip": "ladder",
    "Snapshots": "snapshot.options",
    "ZScore": "numerics.clip",
    "diagnose": "diagnosis.standalone",
    "install": "autopilot.entry",
    "read_run": "runs",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: importing torch takes seconds, and `nanguard --help` needs none."""
    if name not in _HOME:
        raise AttributeError(f"module 'nanguard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nanguard.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
