"""Ways to run a training step, on the same seed, data and optimizer: plain, guarded, and the checks people write."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from models import Batch, Workload, loss_fn

MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Rig:
    """What all variants that are compared with each other share."""

    workload: Workload
    mode: str
    device: torch.device
    batches: list[Batch]


class Plain:
    """the baseline: autocast forward, backward, `clip_grad_norm_`, fused step, `zero_grad`"""

    slow: ClassVar[bool] = False  # slow ones are timed in eager mode only, and less often

    def __init__(self, rig: Rig) -> None:
        module = rig.workload.build(rig.device)
        self.device_type = rig.device.type
        self.parameters = list(module.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)
        self.model: nn.Module = module
        if rig.mode == "compile":
            self.model = cast(nn.Module, torch.compile(module, dynamic=False))
        self.batches = itertools.cycle(rig.batches)

    @classmethod
    def missing(cls) -> str | None:
        """Why this variant cannot run here, or None if it can."""
        return None

    def step(self, batch: Batch) -> Tensor:
        """One training step; returns the loss on the device."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            return loss_fn(self.model, batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.clip()
        self.optimizer.step()

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def finish(self) -> None:
        """Completes host work that the last steps left undone; part of the measured time."""

    def run(self, num_steps: int) -> Tensor:
        """`num_steps` steps on the next batches, then whatever they left undone; returns the last loss."""
        for _ in range(num_steps):
            loss = self.step(next(self.batches))
        self.finish()
        return loss


class PlainAgain(Plain):
    """the baseline once more, with a copy of its own: the noise floor"""


class Guarded(Plain):
    """`guard.step(loss_fn, batch)`, clipped per parameter group"""

    options: ClassVar[dict[str, Any]] = {"clip": "group"}

    def __init__(self, rig: Rig) -> None:
        import nanguard

        super().__init__(rig)
        self.guard: Any = nanguard.Guard(
            self.model, self.optimizer, precision="bf16", max_norm=MAX_NORM, **self.options
        )

    @classmethod
    def missing(cls) -> str | None:
        try:
            from nanguard import Guard  # noqa: F401
        except ImportError as error:
            return f"{error}; set PYTHONPATH=src"
        return None

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.guard.step(loss_fn, batch)
        return loss

    def finish(self) -> None:
        self.guard.settle()


class GuardedGlobal(Guarded):
    """`guard.step`, clipped by one norm over all parameters"""

    options: ClassVar[dict[str, Any]] = {"clip": "global"}


class GuardedOwnLoop(Guarded):
    """`guard.autocast`, `guard.backward`, `guard.update` in a loop of the user's own"""

    def step(self, batch: Batch) -> Tensor:
        with self.guard.autocast():
            loss = loss_fn(self.model, batch)
        self.guard.backward(loss)
        self.guard.update()
        return loss


class GuardedEager(Guarded):
    """`guard.step` with `sync="eager"`: the host looks at every step before the next"""

    options: ClassVar[dict[str, Any]] = {"clip": "group", "sync": "eager"}


class IsfiniteLoss(Plain):
    """plain, with `if torch.isfinite(loss)` around backward and step"""

    def step(self, batch: Batch) -> Tensor:
        loss = self.forward(batch)
        if torch.isfinite(loss):
            self.backward(loss)
            self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class IsfiniteNorm(Plain):
    """plain, with `if torch.isfinite(norm)` around the step"""

    def update(self) -> None:
        if torch.isfinite(self.clip()):
            self.optimizer.step()


class Scaler(Plain):
    """plain, with `torch.amp.GradScaler` and `unscale_` before clipping"""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.scaler = torch.amp.GradScaler(self.device_type)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class PerParameterIsfinite(Plain):
    """plain, with each non-finite gradient replaced by zeros; no sync"""

    slow = True

    def update(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                finite = torch.isfinite(parameter.grad).all()
                parameter.grad = torch.where(finite, parameter.grad, 0.0)
        super().update()


class ForwardHooks(Plain):
    """plain, with a forward hook on every module that gathers `isfinite(output)` in one flag; no sync"""

    slow = True

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.finite = torch.ones((), dtype=torch.bool, device=rig.device)
        for module in self.model.modules():
            module.register_forward_hook(self.check)

    def check(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.finite.logical_and_(torch.isfinite(output.detach()).all())


class DetectAnomaly(Plain):
    """plain, under `torch.autograd.detect_anomaly`"""

    slow = True

    def step(self, batch: Batch) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):  # detect_anomaly itself, without its warning a step
            return super().step(batch)


class HFDebug(Plain):
    """plain, with transformers' `DebugUnderflowOverflow`"""

    slow = True

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        debug_utils = importlib.import_module("transformers.debug_utils")
        self.debug = debug_utils.DebugUnderflowOverflow(self.model)

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("transformers") else "transformers is not installed"


VARIANTS: dict[str, type[Plain]] = {
    "plain": Plain,
    "plain_again": PlainAgain,
    "guard": Guarded,
    "guard_global": GuardedGlobal,
    "guard_own_loop": GuardedOwnLoop,
    "guard_eager": GuardedEager,
    "isfinite_loss": IsfiniteLoss,
    "isfinite_norm": IsfiniteNorm,
    "grad_scaler": Scaler,
    "per_param_isfinite": PerParameterIsfinite,
    "forward_hooks": ForwardHooks,
    "detect_anomaly": DetectAnomaly,
    "hf_debug": HFDebug,
}
