"""Hugging Face Trainer: ``attach(trainer)`` before ``trainer.train()``, or ``Trainer(callbacks=[GuardCallback()])``."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.diagnosis.scheduler import How
from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.accelerate import AcceleratorGuard, check_supported, plain_optimizer, plain_scheduler
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.integrations.options import check_given, checked_options
from nanguard.integrations.packages import require
from nanguard.integrations.transformers_callback import TESTED, GuardCallback, stop_cleanly
from nanguard.integrations.transformers_logged import (
    Logged,
    collected,
    counting_nothing,
    is_asked_for,
    note_state,
    put_back_state,
)
from nanguard.policy.policy import Policy
from nanguard.step.observers import Observer

__all__ = ["GuardCallback", "TrainerGuard", "attach"]

SKIPPED = "nanguard/skipped"
"""What the skipped steps are logged as, from the first one on."""


def attach(
    trainer: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    diagnose: How = "auto",
    capture: CaptureLevel = "batch",
) -> TrainerGuard:
    """Guards ``trainer.train()`` from now on. A non-finite step is skipped, as if its batches had never come.

    Weights, optimizer state and buffers are not touched, the schedule is held, and logged losses leave the step out.
    ``trainer.state.global_step`` counts the step, since it is the position in the data.

    Args:
        trainer: a ``transformers.Trainer``, or a class made of it. FSDP and DeepSpeed are not supported.
        policy: what to do about bad steps; None skips them as long as the run makes progress, and rolls damage back.
            If it halts, training stops as by ``control.should_training_stop``, with a checkpoint; see ``halted``.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    require("transformers", tested=TESTED, extra="transformers")
    check_given(trainer, "accelerator", "training_step", needed="a transformers.Trainer")
    check_supported(trainer.accelerator, "nanguard.integrations.transformers.attach")
    step = vars(trainer).get("training_step")
    if isinstance(getattr(getattr(step, "func", None), "__self__", None), TrainerGuard):
        raise ValueError("this Trainer is guarded already: call detach() of the guard that attach() returned first")
    if any(isinstance(each, GuardCallback) for each in trainer.callback_handler.callbacks):
        raise ValueError("this Trainer has a GuardCallback, which guards it too: remove it, attach() does all it does")
    options = checked_options(policy=policy, run_dir=run_dir, observers=observers, diagnose=diagnose, capture=capture)
    return TrainerGuard(trainer, options)


class TrainerGuard(AttachedGuard):
    """What ``attach`` returns. Each ``trainer.train()`` has its own incidents and counts."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self._trainer, self._options = trainer, options
        self.halted: NonFiniteError | None = None
        """Why the policy has ended the last training; None if it has not."""
        self._stack = contextlib.ExitStack()
        self._inner: AcceleratorGuard | None = None
        self._num_before = self._num_skipped = 0
        self._is_new = self._is_late = False
        self._before = self._after = Logged()
        """What the log would say before the last step, and after it."""
        self._losses: list[Tensor] = []
        """Of the micro-batches of the current step."""
        self._collected: dict[str, Any] = {}
        self.at_detach(self._stack.close)
        self._loaders = FollowedLoaders()
        self.at_detach(self._loaders.stop)
        self.wrap(trainer, "get_train_dataloader", lambda original: self._loaders.follow(original()))
        for name in ("_inner_training_loop", "training_step", "_maybe_log_save_evaluate", "log"):
            self.wrap(trainer, name, getattr(self, f"_on_{name.removeprefix('_')}"))

    # ---- in the place of methods of the Trainer --------------------------------------------------------------------

    def _on_inner_training_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inner = None
        self._loaders.tell(None)
        try:
            with self._stack:  # the guard of this training is entered with its first step
                output = original(*args, **kwargs)
        finally:
            self._inner = None
        return output._replace(training_loss=output.metrics["train_loss"])

    def _on_training_step(
        self, original: Callable[..., Tensor], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        try:
            inner = self._inner or self._begin(model)
        except ValueError as error:
            self.refused([plain_optimizer(self._trainer.optimizer)], error)
            return original(model, inputs, *args, **kwargs)

        def rerun(batch: Any) -> Tensor:
            inner.seen_again = None
            with counting_nothing(self._trainer):
                original(model, batch, *args, **kwargs)
            if inner.seen_again is None:
                raise RuntimeError("training_step() of this Trainer does not call accelerator.backward()")
            return self._in_users_size(inner.seen_again)

        if not self._is_new:
            self._collected = collected(self._trainer)
        batch = copy.copy(inputs) if isinstance(inputs, MutableMapping) else inputs  # the Trainer removes labels
        inner.loop.before_forward(batch, rerun=rerun)
        self._is_new = True
        loss = original(model, inputs, *args, **kwargs)
        self._losses.append(loss)
        if self._trainer.accelerator.sync_gradients:  # the last micro-batch: the Trainer waits for the device next
            inner.measure_ahead()
        return loss

    def _on_maybe_log_save_evaluate(
        self, original: Callable[..., Any], loss_sum: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After each step, and after each epoch. ``loss_sum`` is over the steps since the last log."""
        trainer, is_new = self._trainer, self._is_new
        was_last_skipped = self._take_late()  # the step before this one: it was not known yet in the last call
        if not is_new or is_asked_for(trainer.control):
            self._settle()
        is_skipped = self._take_late() or (is_new and (self.loop.was_refused or self.halted is not None))
        before = self._before if was_last_skipped or (is_skipped and not is_new) else self._after
        if is_skipped:
            now = before
            vars(trainer).update(self._collected)
        elif was_last_skipped:
            now = before.plus(self._losses, grad_norm)
        else:
            now = Logged(loss_sum, grad_norm if is_new else self._after.norm)
        if now.loss_sum is not loss_sum:
            loss_sum.copy_(torch.zeros_like(loss_sum) if now.loss_sum is None else now.loss_sum)
        for _ in range(was_last_skipped + is_skipped):
            self._num_skipped += 1
            trainer._globalstep_last_logged += 1  # the mean is over the steps since then
            self._show()
        self._is_new, self._losses = False, []
        has_nothing_else = trainer.state.global_step <= trainer._globalstep_last_logged
        if trainer.control.should_log and has_nothing_else and self._num_skipped:
            trainer.log({SKIPPED: self.num_skipped})
        if self._inner is not None and is_asked_for(trainer.control):  # a checkpoint may be saved now
            note_state(trainer.state, self.loop)
        original(loss_sum, now.norm, *args, **kwargs)
        self._before, self._after = before, Logged(loss_sum.clone(), now.norm)

    def _on_log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        is_training = self._inner is not None
        if is_training and self.loop.is_rerunning:
            return
        if is_training and self._num_skipped and "train_loss" in logs:  # the mean over all steps
            num_steps = self._trainer.state.global_step - getattr(self._trainer, "_initial_global_step", 0)
            num_applied = num_steps - self._num_skipped
            logs["train_loss"] = vars(self._trainer)["_total_loss_scalar"] / num_applied if num_applied else math.nan
        if is_training and self._num_skipped and ("loss" in logs or "train_loss" in logs):
            logs[SKIPPED] = self.num_skipped
        original(logs, *args, **kwargs)

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because of NaN or Inf, with those before the checkpoint that was resumed."""
        return self._num_before + self._num_skipped

    def _begin(self, model: nn.Module) -> AcceleratorGuard:
        """With the first step: the optimizer exists, and a checkpoint has been loaded."""
        trainer = self._trainer
        check_supported(trainer.accelerator, "nanguard.integrations.transformers.attach")
        scheduler = plain_scheduler(trainer.lr_scheduler)
        can_wait = scheduler is not None and not collected(trainer)  # these can only be put back at once
        self._loop = loop = HostedLoop(
            model,
            plain_optimizer(trainer.optimizer),
            schedulers=() if scheduler is None else scheduler,
            first_step=trainer.state.global_step,
            was_skipped=self._was_skipped if can_wait else None,
            **self._options,
        )
        self._loaders.tell(loop)
        put_back_state(trainer.state, loop)
        self._inner = inner = AcceleratorGuard(loop, trainer.accelerator, [trainer.optimizer])
        inner.in_users_size, inner.on_halt = self._in_users_size, self._stop
        self._stack.enter_context(inner)
        self.halted, self._num_skipped, self._is_late, self._losses = None, 0, False, []
        self._before = self._after = Logged()
        logged = (entry[SKIPPED] for entry in reversed(trainer.state.log_history) if SKIPPED in entry)
        self._num_before = next(logged, 0)
        return inner

    def _was_skipped(self) -> None:
        """A step that counted as applied was skipped."""
        self._is_late = True

    def _take_late(self) -> bool:
        is_late, self._is_late = self._is_late, False
        return is_late

    def _settle(self) -> None:
        """What is logged, saved or evaluated now has to be right."""
        if self._inner is not None and self.halted is None and self.loop.answers_later:
            try:
                self.loop.settle()
            except NonFiniteError as error:
                self._stop(error)

    def _in_users_size(self, loss: Tensor) -> Tensor:
        """The Trainer divides each loss such that their sum over the micro-batches is the loss of the step."""
        args, divisor = self._trainer.args, self._trainer.accelerator.gradient_accumulation_steps
        number = getattr(self._trainer, "current_gradient_accumulation_steps", args.gradient_accumulation_steps)
        return loss if number == divisor else loss * (number / divisor)

    def _stop(self, error: NonFiniteError) -> None:
        self.halted = error
        stop_cleanly(self._trainer.control, self._trainer.args, error)

    def _show(self) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(skipped=self.num_skipped)
