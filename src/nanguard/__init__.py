"""nanguard keeps mixed-precision PyTorch training finite."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.errors import NanguardError, NonFiniteError, ProtocolError
    from nanguard.guard import Guard
    from nanguard.numerics.clip import AGC, ZScore
    from nanguard.policy import Policy
    from nanguard.precision import LossScale

__all__ = [
    "AGC",
    "Guard",
    "LossScale",
    "NanguardError",
    "NonFiniteError",
    "Policy",
    "ProtocolError",
    "ZScore",
    "__version__",
]

__version__ = "0.1.0"

_HOME = {
    "AGC": "numerics.clip",
    "Guard": "guard",
    "LossScale": "precision",
    "NanguardError": "errors",
    "NonFiniteError": "errors",
    "Policy": "policy",
    "ProtocolError": "errors",
    "ZScore": "numerics.clip",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: importing torch takes seconds, and `nanguard --help` needs none."""
    if name not in _HOME:
        raise AttributeError(f"module 'nanguard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"nanguard.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
