"""Checks of what the guard was given, before training starts. Each error names the value and what is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nanguard import _compat
from nanguard.precision import Precision
from nanguard.shield import Shield

T = TypeVar("T")


def several(value: Any) -> tuple[Any, ...]:
    """One, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def clean_name(name: str) -> str:
    """A parameter's name as the user wrote it, without what DDP and ``torch.compile`` put into it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}; put several into a ModuleDict")
    if _compat.is_sharded(model):
        raise ValueError(
            "the model's parameters are sharded over ranks (FSDP or DTensor), and their norms are not complete on any "
            "one of them: not supported yet. DistributedDataParallel is"
        )


def check_precision(model: nn.Module, precision: Precision) -> None:
    halves = [name for name, p in model.named_parameters() if p.dtype is torch.float16 and p.requires_grad]
    if precision.name == "fp16" and halves:
        raise ValueError(
            f"precision='fp16' scales the loss, and gradients of fp16 parameters ({clean_name(halves[0])} and "
            f"{len(halves) - 1} more) cannot be unscaled without losing them: keep the parameters in fp32, "
            "model.float(), and let autocast run them in fp16"
        )


def check_choice(name: str, value: Any, accepted: Iterable[str]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")


def check_accumulation(model: nn.Module, accumulate: Any, drop_bad_microbatches: bool) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number, 1 or more, got {accumulate!r}")
    if drop_bad_microbatches and isinstance(model, DistributedDataParallel):
        raise ValueError(
            "drop_bad_microbatches does not work under DistributedDataParallel: it averages gradients between ranks "
            "inside backward, before a bad micro-batch can be left out"
        )


def check_ema(ema: Any) -> None:
    if ema is not None and not (isinstance(ema, nn.Module) and hasattr(ema, "update_parameters")):
        raise ValueError(
            f"ema must be a torch.optim.swa_utils.AveragedModel or a module with update_parameters(model), got {ema!r}"
        )


def choose_sync(sync: str, shield: Shield, device: torch.device, *, needs_host: bool) -> str:
    """``"late"`` or ``"eager"``; the first only where the device can do without the host."""
    check_choice("sync", sync, ("auto", "eager", "late"))
    late_is_possible = shield.skips_on_device and not needs_host
    if sync == "auto":
        return "late" if late_is_possible and device.type == "cuda" else "eager"
    if sync == "late" and not late_is_possible:
        why = (
            "Policy(drop_bad_gradients=True) needs the host to decide"
            if needs_host
            else f"{' and '.join(type(o).__name__ for o in shield.optimizers)} cannot skip a step on the device; "
            "pass fused=True to Adam, AdamW, SGD or Adagrad"
        )
        raise ValueError(f"sync='late' is not possible: {why}. Or use sync='eager', at one sync a step")
    return sync
