"""The program's own GradScaler, as the engine sees it. The program scales, unscales and backs off."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.hosted.settings import Settings
from nanguard.hosted.unchecked import UncheckedSteps
from nanguard.numerics.clip import scale_
from nanguard.step.precision import LossScale, Scaler

if TYPE_CHECKING:
    from nanguard.hosted.sound import SoundSteps


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


class ScaledSteps(UncheckedSteps):
    """The part of a hosted step that is for programs with a GradScaler, which may find an overflow: that is routine."""

    sound: SoundSteps
    _settings: Settings
    grad_scaler: Any = None
    _are_scaled = False

    @abstractmethod
    def ask_the_host(self) -> None: ...

    def use_scaler(self, scaler: Any, *, are_scaled: bool = False) -> None:
        """The program's GradScaler steps this optimizer: it may find an overflow, which is routine.

        ``are_scaled`` says that the gradients have not been divided by the scale yet.
        """
        self.grad_scaler, self._are_scaled = scaler, are_scaled
        if self.parts.precision.scaler is None:
            self.ask_the_host()
            self.sound.is_on = False
            self.parts.precision.use_scaler(ProgramScaler(self.parts.state.device))

    def follow_scaler(self) -> None:
        """Takes in what the program's GradScaler has done to the gradients."""
        ours = self.parts.precision.scaler
        if not isinstance(ours, ProgramScaler):
            return
        grad_scale = getattr(self.optimizer, "grad_scale", None)
        if grad_scale is not None and self._settings.max_norm is not None:  # clipping needs them in their true size
            scale_(self.skippable.gradients(), grad_scale.double().reciprocal().float())
            self.optimizer.grad_scale = grad_scale = None  # type: ignore[attr-defined]
        ours.follow(_compat.scale_of(self.grad_scaler), are_scaled=grad_scale is not None or self._are_scaled)
