"""Which number format the forward pass runs in, and the loss scale that fp16 needs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat_kernels
from nanguard.numerics import clip

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("auto", *_DTYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """How the fp16 loss scale moves: torch's GradScaler rule, with a floor.

    A step whose scaled gradients overflow multiplies the scale by ``backoff``, but never below ``floor``;
    ``interval`` steps without one multiply it by ``growth``. Without a floor some 144 skips in a row bring the
    scale to zero, its inverse to Inf, and the next clean batch to NaN weights.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.initial < math.inf:
            raise ValueError(
                f"LossScale needs 0 < floor <= initial < inf, got floor={self.floor!r}, initial={self.initial!r}"
            )
        if not self.growth > 1 or not 0 < self.backoff < 1 or self.interval < 1:
            raise ValueError(
                "LossScale needs growth > 1, 0 < backoff < 1 and interval >= 1, got "
                f"growth={self.growth!r}, backoff={self.backoff!r}, interval={self.interval!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """A resolved precision: its name, the autocast dtype (None for fp32) and the device it is for."""

    name: str
    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def resolve(cls, name: str, device: torch.device) -> Precision:
        """``"auto"`` takes bf16 if the accelerator has it, else fp16; fp32 on a CPU."""
        if name not in NAMES:
            raise ValueError(f"precision must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
        if name == "auto":
            name = _best_for(device)
        return cls(name=name, dtype=_DTYPES[name], device_type=device.type)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """``torch.autocast`` for the forward pass; in fp32 a context that does nothing."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


class MixedPrecision:
    """The precision that the run is in now, with its loss scale: the one owner of both. Nothing here syncs.

    ``scaler`` is None if the loss is not scaled.
    """

    def __init__(self, precision: Precision, scaler: Scaler | None) -> None:
        self._current, self.scaler = precision, scaler
        self._lower: tuple[Precision, Scaler | None] | None = None

    @property
    def name(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._current.name

    @property
    def dtype(self) -> torch.dtype | None:
        """The autocast dtype; None in fp32."""
        return self._current.dtype

    @property
    def is_raised(self) -> bool:
        """Whether ``raise_to_fp32`` is in force."""
        return self._lower is not None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """For the forward pass."""
        return self._current.autocast()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as its backward pass needs it."""
        return loss if self.scaler is None else self.scaler.scaled(loss)

    def use_scaler(self, scaler: Scaler | None) -> None:
        """From now on."""
        self.scaler = scaler

    def raise_to_fp32(self) -> None:
        """Leaves autocast and loss scaling, until ``return_from_fp32``."""
        self._lower = self._current, self.scaler
        self._current, self.scaler = Precision.resolve("fp32", torch.device(self._current.device_type)), None

    def return_from_fp32(self) -> None:
        """Undoes ``raise_to_fp32``."""
        assert self._lower is not None
        (self._current, self.scaler), self._lower = self._lower, None

    @contextlib.contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Autocast and loss scaling are off inside."""
        before = self._current, self.scaler
        self._current, self.scaler = Precision.resolve("fp32", torch.device(self._current.device_type)), None
        try:
            yield
        finally:
            self._current, self.scaler = before

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """The loss is not scaled inside."""
        scaler, self.scaler = self.scaler, None
        try:
            yield
        finally:
            self.scaler = scaler

    def tensors(self) -> dict[str, Tensor]:
        """The loss scale as it is on the device, for a snapshot."""
        return {} if self.scaler is None else self.scaler.tensors()

    def facts(self) -> None:
        """Nothing but tensors."""

    def restore(self, facts: Any) -> None:
        """Nothing but tensors."""


class Scaler:
    """The loss scale on the device. Nothing here syncs."""

    def __init__(self, options: LossScale, device: torch.device) -> None:
        self.options = options
        # As the device has it, so that host and device agree.
        self.floor = torch.tensor(options.floor, dtype=torch.float32, device="cpu").item()
        self.scale = torch.tensor(options.initial, dtype=torch.float32, device=device)
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)

    keeps_buffers = False
    """Whether a routine overflow leaves buffers as the step has made them."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in fp32: an fp16 loss would overflow by the scaling alone."""
        return loss.float() * self.scale

    def unscale_(self, grads: Sequence[Tensor]) -> None:
        clip.scale_(grads, self.scale.double().reciprocal().float())

    def in_true_size(self, norms: tuple[float, ...], scale: float) -> tuple[float, ...]:
        """Norms of unscaled gradients. Gradients have been unscaled before they are measured."""
        return norms

    def update_(self, bad: Tensor, frozen: Tensor | None = None) -> None:
        """Grows or backs off by ``bad`` (0 or 1); if ``frozen`` is 1 nothing changes."""
        before = (self.scale.clone(), self._tracker.clone()) if frozen is not None else None
        rule = self.options
        _compat_kernels.update_scale_(
            self.scale, self._tracker, bad, growth=rule.growth, backoff=rule.backoff, interval=rule.interval
        )
        self.scale.clamp_(min=self.floor)
        if frozen is not None and before is not None:
            torch.where(frozen != 0, before[0], self.scale, out=self.scale)
            torch.where(frozen != 0, before[1], self._tracker, out=self._tracker)

    def tensors(self) -> dict[str, Tensor]:
        """Its state as it is on the device."""
        return {"scale": self.scale, "tracker": self._tracker}

    def begin_anew(self) -> None:
        """Back to the initial scale."""
        self.scale.fill_(self.options.initial)
        self._tracker.zero_()

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "tracker": self._tracker.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self._tracker.fill_(int(state["tracker"]))


def _best_for(device: torch.device) -> str:
    if device.type == "cpu":
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "xpu":
        return "bf16"
    return "fp16"
