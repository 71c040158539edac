"""What happens to our memory if the program runs out of its own."""

from __future__ import annotations

from typing import Any

import torch

from nanguard.step.protocols import Responder


class GivingMemoryBack:
    """Frees our memory if the block runs out of it, and lets the error pass: the program may try again."""

    def __init__(self, recovery: Responder) -> None:
        self._recovery = recovery

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._recovery.give_memory_back()
