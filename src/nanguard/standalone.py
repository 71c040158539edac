"""``nanguard.diagnose``: one step of a program examined, without a guard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from nanguard.diagnosis.exam import Past
from nanguard.diagnosis.examiner import Examiner
from nanguard.errors import ProtocolError
from nanguard.policy.policy import Policy
from nanguard.records.diagnosis import Diagnosis
from nanguard.state.names import unwrapped
from nanguard.state.training_modes import TrainingModes
from nanguard.step.assembly import assemble
from nanguard.step.dry_run import DryRun, apart
from nanguard.step.parts import StepParts
from nanguard.step.pending import LossFn, Microbatch, PendingStep
from nanguard.step.precision import LossScale


def diagnose(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    loss_scale: LossScale | None = None,
    depth: Literal["full", "brief"] = "full",
) -> Diagnosis:
    """Runs one step on ``batch`` and says where a non-finite value comes from, why, and what to do about it.

    ``loss_fn(model, batch)`` returns the loss, or ``(loss, aux)``. With an ``optimizer`` its update is traced too, on
    copies. ``loss_scale`` multiplies the loss as fp16 training does; None does not. Weights, gradients, buffers,
    optimizer state and random states are afterwards as they were. Raises ``ProtocolError`` if the step is finite:
    there is nothing to diagnose.
    """
    return diagnose_step(model, loss_fn, batch, optimizer, precision=precision, loss_scale=loss_scale, depth=depth)


def diagnose_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    loss_scale: LossScale | None = None,
    depth: Literal["full", "brief"] = "full",
    fp32_fix: Callable[[Sequence[str]], str] | None = None,
) -> Diagnosis:
    """As ``diagnose``. ``fp32_fix`` says how the user keeps modules in fp32, if that is not done with a ``Guard``."""
    check_arguments("diagnose", model, loss_fn)
    if depth not in ("full", "brief"):
        raise ValueError(f"depth must be 'full' or 'brief', got {depth!r}")
    inner = unwrapped(model)
    parts = parts_of_step(inner, optimizer, precision, loss_scale)
    parts.fp32_fix = fp32_fix or parts.fp32_fix
    own = loss_fn if inner is model else functools.wraps(loss_fn)(lambda _, batch: loss_fn(model, batch))
    pending = step_on(parts, own, batch)
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        with apart(model, alone=True):
            diagnosis = Examiner(parts, DryRun(parts)).examine(
                pending, None, Past(), lambda _: depth == "full", update=optimizer is not None
            )
    finally:
        for param, grad in grads:
            param.grad = grad
    if diagnosis is None:
        raise ProtocolError(
            "nanguard.diagnose() found nothing to diagnose: loss, gradients"
            f"{' and buffers' if optimizer is None else ', buffers and update'} of this step are finite. Pass the "
            "batch, weights and precision of the step that was not"
        )
    return diagnosis


def check_arguments(caller: str, model: Any, loss_fn: Any) -> None:
    """Raises ``ValueError`` if these are no model and no loss function."""
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        raise ValueError(
            f"nanguard.{caller}(model, loss_fn, batch) needs a torch.nn.Module and a function of (model, batch), got "
            f"{type(model).__name__} and {type(loss_fn).__name__}"
        )


def step_on(parts: StepParts, loss_fn: LossFn, batch: Any) -> PendingStep:
    """A step on this batch, with the random states and training modes of now."""
    pending = PendingStep(0, 0, None, True, 1)
    pending.training = TrainingModes(parts.modules)
    micro = Microbatch(loss_fn, batch, None, reduce_gradients=True)
    parts.note_world(micro, 0)
    pending.microbatches.append(micro)
    return pending


def parts_of_step(model: nn.Module, optimizer: Any, precision: str, loss_scale: LossScale | None) -> StepParts:
    """The parts of a step outside of a guard. Without an optimizer, no step moves the weights."""
    if optimizer is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient: there is no step to run")
        optimizer = torch.optim.SGD(trained, lr=0.0)
    return assemble(
        model,
        optimizer,
        scheduler=None,
        schedule_per="step",
        precision=precision,
        max_norm=None,
        clip="group",
        policy=Policy(divergence=None),
        accumulate=1,
        drop_bad_microbatches=False,
        ema=None,
        loss_scale=loss_scale,
        process_group=None,
    )
