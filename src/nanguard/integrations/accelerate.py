"""Hugging Face Accelerate: ``attach(accelerator, model, optimizer, scheduler)`` after ``accelerator.prepare(...)``."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nanguard.diagnosis.scheduler import How
from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.integrations.options import check_given
from nanguard.integrations.packages import require
from nanguard.policy.policy import Policy
from nanguard.step.assembly import as_tuple
from nanguard.step.calls import UncopiedHook
from nanguard.step.observers import Observer

log = logging.getLogger("nanguard")

TESTED = ("1.0", "2.0")

_SAVED = "nanguard.json"
_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    diagnose: How = "auto",
    capture: CaptureLevel = "batch",
) -> AcceleratorGuard:
    """Guards a loop that calls ``accelerator.backward(loss)``, ``optimizer.step()`` and ``scheduler.step()``.

    A non-finite step is skipped: ``accelerator.optimizer_step_was_skipped`` is True, prepared schedulers hold, and
    weights, optimizer state and buffers are as before.

    Args:
        accelerator: an ``Accelerator``. FSDP, DeepSpeed and Megatron-LM are not supported.
        model: what ``accelerator.prepare`` returned for the model.
        optimizer: what it returned for the optimizer, or several of them.
        scheduler: what it returned for the scheduler, or several of them: a rollback puts them back too.
        policy: what to do about bad steps; None skips them as long as the run makes progress, and rolls damage back.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    require("accelerate", tested=TESTED, extra="accelerate")
    check_given(accelerator, "distributed_type", "backward", needed="an accelerate.Accelerator")
    check_supported(accelerator, "nanguard.integrations.accelerate.attach")
    optimizers, schedulers = as_tuple(optimizer), as_tuple(scheduler)
    for each in optimizers:
        if not hasattr(each, "step_was_skipped"):
            raise ValueError(
                f"attach() got a {type(each).__name__} that was not prepared: pass what accelerator.prepare(...) "
                "returned, not what it was given"
            )
    for each in schedulers:
        if isinstance(each, LRScheduler) and not isinstance(each, ReduceLROnPlateau):
            log.warning(
                "%s was not prepared, so it advances on skipped steps too, unless you check "
                "accelerator.optimizer_step_was_skipped: pass it through accelerator.prepare(...)",
                type(each).__name__,
            )
    loop = HostedLoop(
        model,
        [plain_optimizer(each) for each in optimizers],
        schedulers=[each for each in map(plain_scheduler, schedulers) if each is not None],
        policy=policy,
        run_dir=run_dir,
        observers=observers,
        diagnose=diagnose,
        capture=capture,
    )
    guard = AcceleratorGuard(loop, accelerator, optimizers)
    guard.follow(model)
    for loader in accelerator._dataloaders:
        guard.loaders.follow(loader)
    guard.wrap(
        accelerator,
        "prepare_data_loader",
        lambda prepare, *args, **kwargs: guard.loaders.follow(prepare(*args, **kwargs)),
    )
    return guard


class AcceleratorGuard(AttachedGuard):
    """Stands between an ``Accelerator``, its optimizers and the loop that uses them.

    Without the accelerator, losses are unknown, and gradients are measured after clipping.
    """

    def __init__(self, loop: HostedLoop, accelerator: Any, optimizers: Sequence[Any]) -> None:
        super().__init__(loop)
        self._optimizers = tuple(optimizers)
        self.in_users_size: Callable[[Tensor], Tensor] = lambda loss: loss
        """From a loss that ``accelerator.backward`` gets to the one that the user knows."""
        self.on_halt: Callable[[NonFiniteError], None] | None = None
        """Called if the policy ends the run; without it ``optimizer.step()`` raises."""
        self.seen_again: Tensor | None = None
        """The loss that the last step has come to when it was run again."""
        self._is_measured = False
        self._loaded_from: Path | None = None
        self.loaders = FollowedLoaders(loop)
        self.at_detach(self.loaders.stop)
        for optimizer in optimizers:
            self._guard_steps(optimizer)
        if accelerator is not None:
            for name in ("backward", "unscale_gradients", "load_state"):
                self.wrap(accelerator, name, getattr(self, f"_{name}"))
            self.at_detach(accelerator.register_save_state_pre_hook(functools.partial(self._save, accelerator)).remove)
            self.at_detach(accelerator.register_load_state_pre_hook(self._note_folder).remove)

    def follow(self, model: nn.Module) -> None:
        """A forward pass begins whenever the model is called."""
        hook = UncopiedHook(lambda *_: None if self.loop.is_rerunning else self.loop.before_forward())
        self.at_detach(model.register_forward_pre_hook(hook, prepend=True).remove)

    def _backward(self, original: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        if self.loop.is_rerunning:
            self.seen_again = loss
            return None
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            self.loop.after_forward(self.in_users_size(loss))
        return original(loss, **kwargs)

    def measure_ahead(self) -> None:
        """The gradients are complete, and the device is busy with them: what the host does now costs no time.

        Only if the host does not wait for the answer.
        """
        self._is_measured = self.loop.answers_later
        for optimizer in self._optimizers if self._is_measured else ():
            self.loop.measure(plain_optimizer(optimizer))

    def _unscale_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called before gradients are clipped. They have their true size afterwards."""
        result = original(*args, **kwargs)
        given = as_tuple(args[0] if args else kwargs.get("optimizer")) or self._optimizers
        for optimizer in () if self._is_measured else self._optimizers:
            if any(optimizer is each for each in given):
                self.loop.measure(plain_optimizer(optimizer), grad_scaler=optimizer.scaler)
        return result

    def _load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.loop.resumed()
        if self._loaded_from is not None and (path := self._loaded_from / _SAVED).exists():
            self.loop.load_state_dict(json.loads(path.read_text()))
        return result

    def _save(self, accelerator: Any, models: Any, weights: Any, output_dir: str) -> None:
        """In a checkpoint, what the recovery has changed: mostly nothing, and then there is no file."""
        state = self.loop.state_dict()
        if state and accelerator.is_main_process:
            (Path(output_dir) / _SAVED).write_text(json.dumps(state))

    def _note_folder(self, models: Any, input_dir: str) -> None:
        self._loaded_from = Path(input_dir)

    def _guard_steps(self, optimizer: Any) -> None:
        original = optimizer.step

        @functools.wraps(original)  # schedulers look for a mark on it
        def step(_: Any, closure: Any = None) -> None:
            if optimizer.gradient_state.sync_gradients:
                self._step(optimizer, original, closure)
            else:  # gradients are accumulated, and it does nothing
                original(closure)

        self.replace(optimizer, "step", MethodType(step, optimizer))

    def _step(self, optimizer: Any, original: Callable[..., Any], closure: Any) -> None:
        calls: list[Any] = []
        scaler = optimizer.scaler
        self._is_measured = False

        def call() -> None:
            calls.append(True)
            original(closure)

        is_applied = False
        try:
            is_applied = self.loop.step(plain_optimizer(optimizer), call, grad_scaler=scaler).applied
        except NonFiniteError as error:
            if self.on_halt is None:
                raise
            self.on_halt(error)
        finally:
            if scaler is not None and not calls:
                scaler.update()  # the call would have done so
            optimizer._is_overflow = not is_applied


def check_supported(accelerator: Any, who: str) -> None:
    """Raises ``ValueError`` if parameters are in pieces on several ranks."""
    kind = accelerator.distributed_type
    name = str(getattr(kind, "value", kind)).upper()
    if name in _REFUSED:
        raise ValueError(
            f"{who} does not support {name}: it has its own step, or its parameters are in pieces on several ranks. "
            "Use DDP (MULTI_GPU), or train without nanguard"
        )


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    while hasattr(optimizer, "step_was_skipped") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def plain_scheduler(scheduler: Any) -> LRScheduler | None:
    """The scheduler inside Accelerate's wrapper; None if it needs a metric, so that a step does not advance it."""
    inner = scheduler if isinstance(scheduler, LRScheduler) else getattr(scheduler, "scheduler", scheduler)
    return inner if isinstance(inner, LRScheduler) and not isinstance(inner, ReduceLROnPlateau) else None
