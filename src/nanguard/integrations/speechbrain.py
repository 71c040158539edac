"""SpeechBrain: ``attach(brain)`` before ``brain.fit(...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanguard.diagnosis.scheduler import How
from nanguard.errors import NonFiniteError
from nanguard.hosted.handshake import announce
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.integrations.options import check_given, checked_options
from nanguard.integrations.packages import require
from nanguard.integrations.speechbrain_state import SideState
from nanguard.policy.policy import Policy
from nanguard.step.observers import Observer

TESTED = ("1.0", "2.0")
_SAVED = "nanguard"


def attach(
    brain: Any,
    *,
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    diagnose: How = "auto",
    capture: CaptureLevel = "batch",
) -> BrainGuard:
    """Guards ``brain.fit()`` from now on. A non-finite step is skipped, as if its batches had never come.

    Weights, optimizer state, buffers and the means of ``InputNormalization`` are not touched. ``avg_train_loss``,
    ``optimizer_step`` and statistics leave the step out, ``on_fit_batch_end`` gets ``should_step=False``, so that
    the schedule is held, and ``nonfinite_patience`` is not used up. ``brain.step`` counts the batches, as always.

    Args:
        brain: a ``speechbrain.Brain``.
        policy: what to do about bad steps; None skips them as long as the run makes progress, and rolls damage back.
            If it halts, ``fit`` saves an intra-epoch checkpoint, and raises ``NonFiniteError``.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    core = require("speechbrain.core", tested=TESTED, extra="speechbrain", package="speechbrain")
    check_given(brain, "fit_batch", "optimizers_step", needed="a speechbrain.Brain")
    options = checked_options(policy=policy, run_dir=run_dir, observers=observers, diagnose=diagnose, capture=capture)
    return BrainGuard(brain, core, options)


class BrainGuard(AttachedGuard):
    """What ``attach`` returns. Each ``brain.fit()`` has its own incidents and counts."""

    def __init__(self, brain: Any, core: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self._brain, self._core, self._options = brain, core, options
        self._optimizers: list[Optimizer] = []
        self._is_fitting = False
        self._average_before = 0.0
        self._carried: dict[Tensor, Tensor | None] = {}
        self._begin_window()
        self._num_left_out = 0
        """Batches of this epoch that were in skipped steps."""
        self.num_skipped = 0
        """Steps of the current ``fit``, or of the last one, that were skipped because of NaN or Inf."""
        self._was_left_out = self._has_told_loss = False
        self._is_train_loss = False
        self._train_set: Any = None
        self._loaders = FollowedLoaders()
        for name in (
            "fit",
            "on_fit_start",
            "_fit_train",
            "fit_batch",
            "check_loss_isfinite",
            "optimizers_step",
            "on_fit_batch_end",
            "update_average",
            "on_stage_end",
        ):
            self.wrap(brain, name, getattr(self, f"_in_{name.removeprefix('_')}"))
        self._loaded: dict[str, Any] = {}
        if brain.checkpointer is not None:
            self.wrap(brain.checkpointer, "save_checkpoint", self._in_save_checkpoint)
            self.wrap(brain.checkpointer, "load_checkpoint", self._in_load_checkpoint)
        self.replace(brain, "scaler", _WatchedScaler(brain.scaler, self))
        self.at_detach(lambda: self._end(None))

    # ---- in the place of methods of the Brain ----------------------------------------------------------------------

    def _in_fit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return result

    def _in_on_fit_start(self, original: Callable[..., Any]) -> None:
        """The optimizers exist afterwards, and a checkpoint has been loaded."""
        announce()  # before DDP is made
        self.num_skipped = 0
        original()
        brain = self._brain
        self._optimizers = list((brain.optimizers_dict or {}).values())
        if not self._optimizers and getattr(brain, "optimizer", None) is not None:
            self._optimizers = [brain.optimizer]
        if self._optimizers:
            try:
                self._loop = HostedLoop(brain.modules, self._optimizers, **self._options)
            except ValueError as error:
                self.refused(self._optimizers, error)
            else:
                self._is_fitting = True
                self._loaders.tell(self._loop)
                self._loop.load_state_dict(self._loaded)
        self._loaded = {}

    def _in_save_checkpoint(self, original: Callable[..., Any], meta: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the recovery has changed is in the metadata: mostly nothing."""
        state = self.loop.state_dict() if self._is_fitting else {}
        return original({**(meta or {}), **({_SAVED: state} if state else {})}, *args, **kwargs)

    def _in_load_checkpoint(self, original: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """``fit`` loads one before it begins to train."""
        result = original(checkpoint, *args, **kwargs)
        self._loaded = checkpoint.meta.get(_SAVED, {})
        return result

    def _in_fit_train(self, original: Callable[..., None], train_set: Any, *args: Any, **kwargs: Any) -> None:
        """One epoch."""
        self._train_set = self._loaders.follow(train_set)
        try:
            original(train_set, *args, **kwargs)
        finally:
            self._train_set = None

    def _in_fit_batch(self, original: Callable[..., Tensor], batch: Any) -> Tensor:
        if not self._is_fitting:
            return original(batch)
        side = SideState(self._brain)
        if self._num_in_window == 0:
            self._before, self._average_before = side, self._brain.avg_train_loss
            self._carried = _gradients(self._optimizers) if len(self._optimizers) > 1 else {}
        self._num_in_window += 1
        self._was_left_out = self._has_told_loss = False
        self.loop.before_forward(batch, rerun=lambda again: self._rerun(again, side))
        try:
            loss = original(batch)
            self._leave_out_if_refused()  # if the recipe steps without optimizers_step()
        except NonFiniteError:
            self._leave_out()
            self._save()
            raise
        if self._has_stepped:
            self._begin_window()
        self._is_train_loss = True
        return loss

    def _in_check_loss_isfinite(self, original: Callable[..., None], loss: Tensor) -> None:
        if not self._is_fitting:
            original(loss)
        elif not self._has_told_loss:  # the recipe does not scale
            self.on_scale(loss)

    def _in_optimizers_step(self, original: Callable[..., None]) -> None:
        count = self._brain.optimizer_step
        original()
        if self._has_stepped and not self.loop.should_advance_schedule:
            self._brain.optimizer_step = count
        self._leave_out_if_refused()

    def _in_on_fit_batch_end(
        self, original: Callable[..., None], batch: Any, outputs: Any, loss: Any, should_step: bool
    ) -> None:
        was_held = self._is_fitting and self._has_stepped and not self.loop.should_advance_schedule
        original(batch, outputs, loss, should_step and not was_held)

    def _in_update_average(self, original: Callable[..., float], loss: Tensor, avg_loss: float) -> float:
        """The mean is over the batches of this epoch that were not left out."""
        is_train_loss, self._is_train_loss = self._is_train_loss, False
        if not is_train_loss:
            return original(loss, avg_loss)
        if self.num_skipped:
            self._show()
        if self._was_left_out:
            return self._average_before
        brain = self._brain
        step, brain.step = brain.step, brain.step - self._num_left_out
        average = original(loss, avg_loss)
        brain.step = step
        return average

    def _in_on_stage_end(self, original: Callable[..., None], stage: Any, stage_loss: Any, epoch: Any = None) -> None:
        if self._is_fitting and stage == self._core.Stage.TRAIN:
            num_before = len(self.incidents)
            if self._num_in_window:  # too few for a step: SpeechBrain has cleared their gradients
                self.loop.discard()
            if len(self.incidents) > num_before:
                self._leave_out()
                stage_loss = self._average_before
            self._begin_window()
            self._num_left_out = 0
        original(stage, stage_loss, epoch)

    # ---- what the scaler of the Brain is told ----------------------------------------------------------------------

    def on_scale(self, loss: Any) -> None:
        """The Brain is about to call ``backward()`` on this loss, after scaling it."""
        is_loss = isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1
        if self._is_fitting and is_loss and not self.loop.is_rerunning:
            self._has_told_loss = True
            self.loop.after_forward(loss)

    def on_unscale(self, optimizer: Optimizer, scaler: Any) -> None:
        """The Brain is about to clip."""
        if self._is_fitting and optimizer in self._optimizers:
            self.loop.measure(optimizer, grad_scaler=scaler)

    def on_step(self, optimizer: Optimizer, call: Callable[[], Any], scaler: Any) -> Any:
        """In the place of ``call``, which is the step of the scaler."""
        if not self._is_fitting or optimizer not in self._optimizers:
            return call()
        self._has_stepped = True
        return self.loop.step(optimizer, call, grad_scaler=scaler).result

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _rerun(self, batch: Any, before: SideState) -> Tensor:
        """The loss of a batch again, as ``fit_batch`` of SpeechBrain computes it."""
        brain, stage = self._brain, self._core.Stage.TRAIN
        with before.again(), brain.training_ctx:
            outputs = brain.compute_forward(batch, stage)
            loss: Tensor = brain.compute_objectives(outputs, batch, stage) / brain.grad_accumulation_factor
        return loss

    def _begin_window(self) -> None:
        """A window has the batches whose gradients make one step."""
        self._num_in_window = 0
        self._has_stepped = False

    def _leave_out_if_refused(self) -> None:
        if self._has_stepped and not self._was_left_out and self.loop.was_refused:
            self._leave_out()

    def _leave_out(self) -> None:
        """The batches of this window never came."""
        self._before.forget_batch()
        for param, gradient in self._carried.items():
            param.grad = gradient
        self._num_left_out += self._num_in_window
        self._was_left_out = True
        self.num_skipped += 1

    def _show(self) -> None:
        """On the progress bar, next to the loss that SpeechBrain is about to show there."""
        for bar in getattr(self._core.tqdm, "_instances", ()):
            if getattr(bar, "iterable", None) is self._train_set:
                bar.set_postfix = functools.partial(type(bar).set_postfix, bar, skipped=self.num_skipped)

    def _save(self) -> None:
        """An intra-epoch checkpoint, from which the run can go on."""
        checkpointer, flag = self._brain.checkpointer, self._core.INTRA_EPOCH_CKPT_FLAG
        if checkpointer is not None and not self.unsound():
            self._brain.avg_train_loss = self._average_before
            checkpointer.save_and_keep_only(
                end_of_epoch=False,
                num_to_keep=1,
                ckpt_predicate=lambda checkpoint: flag in checkpoint.meta,
                meta={flag: True},
            )

    def _end(self, error: BaseException | None) -> None:
        if self._is_fitting:
            self._is_fitting = False
            self.loop.__exit__(None if error is None else type(error), error, None)
        self._loaders.stop()
        self._begin_window()


def _gradients(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor | None]:
    """Copies of those that frozen optimizers carry from one step to the next: SpeechBrain does not clear them."""
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    return {param: None if param.grad is None else param.grad.clone() for param in params}


class _WatchedScaler:
    """The GradScaler of a Brain. Every recipe goes through it, also those with a ``fit_batch`` of their own."""

    def __init__(self, scaler: Any, guard: BrainGuard) -> None:
        self._scaler, self._guard = scaler, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)

    def scale(self, outputs: Any) -> Any:
        self._guard.on_scale(outputs)
        return self._scaler.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        self._scaler.unscale_(optimizer)
        self._guard.on_unscale(optimizer, self._scaler)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = lambda: self._scaler.step(optimizer, *args, **kwargs)  # noqa: E731
        return self._guard.on_step(optimizer, call, self._scaler)
