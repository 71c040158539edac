"""How the guard clips gradients. Chosen once, when the guard is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanguard.numerics.clip import (
    AGC,
    NormWindow,
    ZScore,
    clip_units_,
    coefficient,
    like_torch,
    require_max_norm,
    scale_,
)
from nanguard.state import sharding
from nanguard.step.measurement import Group

Clip = str | AGC | ZScore
_NAMED: dict[str, AGC | ZScore] = {"agc": AGC(), "zscore": ZScore()}


class Clipper:
    """Clips gradients in place from norms that were measured before. Nothing here syncs.

    Fused optimizers could divide by ``max(norm / max_norm, 1)`` in their own kernel (``grad_scale``), which would save
    a pass over the gradients. It is not done: division rounds otherwise than the multiplication that torch clips by,
    and a healthy run promises the weights of the plain loop with the same clipping, bit for bit. It would also be one
    factor for all groups of an optimizer.

    ``"group"`` holds every parameter group to ``max_norm`` on its own, ``"global"`` all of them together, to the
    bit as ``clip_grad_norm_`` does; ``ZScore`` adds a learned limit to each group's; ``AGC`` takes the place of both.
    """

    def __init__(self, how: Clip, max_norm: float | None, device: torch.device) -> None:
        require_max_norm(max_norm)
        if not isinstance(how, (AGC, ZScore)) and how not in ("group", "global", *_NAMED):
            raise ValueError(
                f"clip must be 'group', 'global', 'agc', 'zscore', or an AGC or ZScore object, got {how!r}"
            )
        self._how = _NAMED.get(how, how) if isinstance(how, str) else how
        self._max_norm = max_norm
        self.needs_norms = max_norm is not None or isinstance(self._how, ZScore)
        """Whether ``clip_`` uses the norms that were measured."""
        self.is_off = not (self.needs_norms or isinstance(self._how, AGC))
        """Whether no gradient is ever clipped."""
        self._limit = torch.tensor(max_norm or 0.0, dtype=torch.float64, device=device)
        self._device = device
        self._window: NormWindow | None = None
        self._clipped: Tensor | None = None
        self._factors = torch.empty(0, device="cpu")
        self._each_factor: Sequence[Tensor] = ()

    @property
    def max_norm(self) -> float | None:
        """The largest norm that a gradient may have; None if norms are not limited."""
        return self._max_norm

    @property
    def together(self) -> bool:
        """Whether all parameters share one norm."""
        return self._how == "global"

    def clip_(self, groups: Sequence[Group], norms: Tensor) -> None:
        if not self.is_off:
            self._clip_(groups, norms)

    @torch.no_grad()
    def _clip_(self, groups: Sequence[Group], norms: Tensor) -> None:
        if isinstance(self._how, AGC):
            for group in groups:
                clip_units_(sharding.local([*group.params]), group.grads, self._how)
        elif isinstance(self._how, ZScore):
            limits = self._window_of(len(groups), self._how).limits(self._max_norm)
            self._clipped = torch.minimum(norms, limits)
            self._clip_groups_(groups, norms, limits)
        elif self._max_norm is not None and self._how == "global":
            if groups[0].grads:
                grads, alike = groups[0].grads, groups[0].alike
                factor = like_torch(coefficient(norms[0], self._limit), self._max_norm, grads, alike=alike)
                scale_(grads, factor, alike=alike)
        elif self._max_norm is not None:
            self._clip_groups_(groups, norms, self._limit)

    def remember_(self, skip: Tensor | None = None) -> None:
        """Lets a learned limit see this step's norms, unless ``skip`` is 1."""
        if self._window is not None and self._clipped is not None:
            self._window.add_(self._clipped, skip)
            self._clipped = None

    def tensors(self) -> dict[str, Tensor]:
        """What a learned limit remembers, as it is on the device."""
        return {} if self._window is None else self._window.tensors()

    def facts(self) -> bool:
        """For a snapshot: whether a limit had been learned."""
        return self._window is not None

    def restore(self, facts: bool) -> None:
        """A learned limit begins anew if there was none; else its tensors have been written to already."""
        if not facts:
            self._window = self._clipped = None

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._window is None else self._window.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self._window = None
        elif isinstance(self._how, ZScore):
            self._window_of(len(state["count"]), self._how).load_state_dict(state)

    def _clip_groups_(self, groups: Sequence[Group], norms: Tensor, limits: Tensor) -> None:
        dtype = torch.float32 if all(group.alike for group in groups) else torch.float64
        if self._factors.shape != norms.shape or self._factors.dtype is not dtype:
            self._factors = torch.empty_like(norms, dtype=dtype)
            self._each_factor = self._factors.unbind()
        coefficient(norms, limits, out=self._factors)
        for group, factor in zip(groups, self._each_factor, strict=True):
            if group.grads:
                scale_(group.grads, factor, alike=group.alike)

    def _window_of(self, rows: int, options: ZScore) -> NormWindow:
        if self._window is None or self._window.rows != rows:  # a parameter group was added
            self._window = NormWindow(options, rows, self._device)
        return self._window
