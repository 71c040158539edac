"""The program's own GradScaler, as the engine sees it. The program scales, unscales and backs off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanguard.step.precision import LossScale, Scaler


class ProgramScaler(Scaler):
    """``scale`` is the program's. A fused optimizer is given scaled gradients, and divides by it in its kernel."""

    keeps_buffers = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(LossScale(), device)
        self.are_scaled = False

    def follow(self, scale: Tensor | None, *, are_scaled: bool) -> None:
        """Takes over the scale that the program's scaler has in this step."""
        if scale is not None:
            self.scale = scale
        self.are_scaled = are_scaled

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, grads: Sequence[Tensor]) -> None:
        """The program does, or its optimizer's kernel."""

    def in_true_size(self, norms: tuple[float, ...], scale: float) -> tuple[float, ...]:
        return tuple(norm / scale for norm in norms) if self.are_scaled and scale else norms

    def update_(self, bad: Tensor, frozen: Tensor | None = None) -> None:
        """The program does."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def begin_anew(self) -> None:
        """The program's scale is its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""
