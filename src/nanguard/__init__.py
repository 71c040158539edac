"""nanguard keeps mixed-precision PyTorch training finite."""

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
