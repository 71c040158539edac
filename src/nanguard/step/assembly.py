"""Checks what the guard was given, before training starts, and makes the parts of a step.

Each error names the value and what is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard import _compat
from nanguard.policy.policy import Policy
from nanguard.state.discarded import LastForward
from nanguard.state.islands import Islands
from nanguard.state.names import names_of, unwrapped
from nanguard.state.optimizer_traits import names_of_optimizers
from nanguard.state.schedule import Schedule, check_schedulers
from nanguard.state.snapshots.options import Snapshots
from nanguard.state.training_state import TrainingState
from nanguard.state.undo import Undo
from nanguard.step.clipping import Clip, Clipper
from nanguard.step.journal import Journal
from nanguard.step.measurement import Measurement, ParamGroups
from nanguard.step.microbatches import MicrobatchFilter
from nanguard.step.optimizers import SkippableOptimizers, check_optimizers
from nanguard.step.parts import StepParts
from nanguard.step.precision import LossScale, MixedPrecision, Precision, Scaler
from nanguard.step.ranks import Ranks
from nanguard.step.update_checks import UpdateChecks

log = logging.getLogger("nanguard")

_CHOICES = {
    "schedule_per": ("step", "epoch"),
    "sync": ("auto", "eager", "late"),
    "diagnose": ("auto", "full", "brief", "off"),
    "capture": ("none", "meta", "batch", "full"),
}


def assemble(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None,
    schedule_per: str,
    precision: str,
    max_norm: float | None,
    clip: Clip,
    policy: Policy,
    accumulate: int,
    drop_bad_microbatches: bool,
    ema: nn.Module | None,
    loss_scale: LossScale | str | None,
    process_group: dist.ProcessGroup | None,
    skippable: SkippableOptimizers | None = None,
    ranks: Ranks | None = None,
    make_journal: Callable[[bool], Journal] | None = None,
) -> StepParts:
    """The parts of a guarded step; raises ``ValueError`` for what cannot be guarded.

    A host that drives optimizers in another way than ``Guard`` brings its own ``skippable`` and ``ranks``.
    ``make_journal`` is told whether this rank is the first, which alone writes and logs.
    """
    optimizers: tuple[Optimizer, ...] = as_tuple(optimizer)
    schedulers: tuple[LRScheduler, ...] = as_tuple(scheduler)
    _check_model(model)
    if skippable is None:
        check_optimizers(optimizers, model)
    check_schedulers(schedulers, optimizers)
    check_choice("schedule_per", schedule_per)
    _check_accumulation(model, accumulate, drop_bad_microbatches)
    _check_ema(ema)
    if loss_scale == "auto":
        loss_scale = LossScale()
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise ValueError(f"loss_scale must be a LossScale, 'auto' or None, got {loss_scale!r}")
    device = optimizers[0].param_groups[0]["params"][0].device
    if device.type == "mps":
        raise ValueError("the model is on MPS, which has no float64 to sum norms in: use a CPU or a CUDA GPU")
    resolved = Precision.resolve(precision, device)
    scales = resolved.name == "fp16" and isinstance(loss_scale, LossScale)
    if scales:
        _check_scaling(model)

    skippable = skippable or SkippableOptimizers.of_guard(optimizers)
    clipper = Clipper(clip, max_norm, device)
    ranks = ranks or Ranks(model, device, process_group)
    buffers = Undo(device)
    buffers.watch_buffers(unwrapped(model))
    mixed = MixedPrecision(
        resolved, Scaler(loss_scale, device) if scales and isinstance(loss_scale, LossScale) else None
    )
    is_first = ranks.rank == 0
    journal = Journal(speaks=is_first) if make_journal is None else make_journal(is_first)
    state = TrainingState(
        model,
        optimizers,
        device=device,
        schedule=Schedule(optimizers, schedulers, schedule_per),
        ema=ema,
        components={"scaler": mixed, "clipper": clipper, "trend": journal},
    )
    return StepParts(
        state=state,
        precision=mixed,
        policy=policy,
        skippable=skippable,
        clipper=clipper,
        microbatch_filter=MicrobatchFilter(unwrapped(model), device) if drop_bad_microbatches else None,
        param_groups=ParamGroups(model, skippable, together=clipper.together),
        ranks=ranks,
        update_checks=UpdateChecks(state, ranks),
        measurement=Measurement(device, ranks),
        buffers=buffers,
        last_forward=LastForward(model, device),
        islands=Islands(model, device.type),
        journal=journal,
        modules=list(model.modules()),
    )


def choose_sync(sync: str, parts: StepParts) -> str:
    """``"late"`` or ``"eager"``; ``"late"`` only if the device can skip steps itself."""
    check_choice("sync", sync)
    late_is_possible = parts.skippable.skips_on_device and not parts.drops_gradients
    if sync == "auto":
        return "late" if late_is_possible and parts.state.device.type == "cuda" else "eager"
    if sync == "late" and not late_is_possible:
        names = " and ".join(type(optimizer).__name__ for optimizer in parts.state.optimizers)
        fusable = ", ".join(name.rpartition(".")[2] for name in names_of_optimizers("can_be_fused"))
        why = f"{names} cannot skip a step on the device; pass fused=True to one that can ({fusable})"
        if parts.drops_gradients:
            why = "DropBadGradients() needs the host to decide"
        raise ValueError(f"sync='late' is not possible: {why}. Or use sync='eager', at one sync a step")
    return sync


def choose_policy(policy: Any, default: Callable[[], Policy] = Policy) -> Policy:
    """What the user chose; ``default()`` if that is None."""
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be a Policy or None, got {policy!r}: Policy.recipe(name) makes one by its name")
    return policy or default()


_EVERY = 100
"""Copying may take longer than the passes of a short step, which then waits."""


def choose_snapshots(snapshots: Any, policy: Policy) -> Snapshots | None:
    """What the user chose; ``"auto"`` takes them if the ladder can roll back, as far back as it may go."""
    if snapshots == "auto":
        back, every = policy.largest_rollback, _EVERY
        return Snapshots(every=every, keep=max(2, 1 + -(-back // every))) if back else None
    if snapshots is not None and not isinstance(snapshots, Snapshots):
        raise ValueError(f"snapshots must be a Snapshots object, 'auto' or None, got {snapshots!r}")
    return snapshots


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One, several or none, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}; put several into a ModuleDict")
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy modules that do not know their shapes yet: run one forward pass first")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError(
            "the model has scripted modules (torch.jit), whose buffers cannot be put back: use torch.compile"
        )
    if _compat.is_sharded(model):
        raise ValueError(
            "the model's parameters are sharded over ranks (FSDP or DTensor), and their norms are not complete on any "
            "one of them: not supported yet. DistributedDataParallel is"
        )


def _check_scaling(model: nn.Module) -> None:
    names = names_of(model)
    halves = [names[id(p)] for p in model.parameters() if p.dtype is torch.float16 and p.requires_grad]
    if halves:
        raise ValueError(
            f"precision='fp16' scales the loss, and gradients of fp16 parameters ({halves[0]} and "
            f"{len(halves) - 1} more) cannot be unscaled without losing them: keep the parameters in fp32, "
            "model.float(), and let autocast run them in fp16; or turn scaling off, loss_scale=None"
        )


def check_choice(name: str, value: Any) -> None:
    """Raises ``ValueError`` if the option ``name`` does not accept ``value``."""
    accepted = _CHOICES[name]
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")


def _check_accumulation(model: nn.Module, accumulate: Any, drop_bad_microbatches: bool) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number, 1 or more, got {accumulate!r}")
    if drop_bad_microbatches and isinstance(model, DistributedDataParallel):
        raise ValueError(
            "drop_bad_microbatches does not work under DistributedDataParallel: it averages gradients between ranks "
            "inside backward, before a bad micro-batch can be left out"
        )


def _check_ema(ema: Any) -> None:
    if ema is not None and not (isinstance(ema, nn.Module) and hasattr(ema, "update_parameters")):
        raise ValueError(
            f"ema must be a torch.optim.swa_utils.AveragedModel or a module with update_parameters(model), got {ema!r}"
        )
