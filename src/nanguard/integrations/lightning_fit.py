"""One ``fit`` of a Lightning trainer under guard: what is replaced on its objects, and what is put back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.integrations.logged import NotedMetrics, NotedResults, metrics_in, muted
from nanguard.integrations.stepping import SteppingGuard
from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.undo import Undo

log = logging.getLogger("nanguard")

SKIPPED = "nanguard/skipped"
"""What the skipped steps are logged as, from the first one on."""


class GuardedFit(SteppingGuard):
    """The guard of one ``fit``. All that it replaces is on objects of this trainer, until ``detach``."""

    def __init__(self, loop: HostedLoop, trainer: Any, pl_module: Any) -> None:
        super().__init__(loop, trainer.optimizers, getattr(trainer.strategy.precision_plugin, "scaler", None))
        self._trainer, self._module = trainer, pl_module
        self.halted: NonFiniteError | None = None
        self.num_skipped = 0
        self._applied: list[Optimizer] = []
        self._unapplied: list[Optimizer] = []
        """Optimizers that have stepped for the current batch, and those of them whose step was skipped."""
        self._ended_badly = self._is_refused = False
        self._is_in_window = self._is_in_training_step = False
        self._metrics, self._results = NotedMetrics(pl_module), NotedResults(trainer)
        self._replace_all()

    def _replace_all(self) -> None:
        strategy, connector = self._trainer.strategy, self._trainer._logger_connector
        epoch_loop, configs = self._trainer.fit_loop.epoch_loop, self._trainer.lr_scheduler_configs
        self.replace(strategy, "training_step", self._training_step(strategy.training_step))
        self.replace(connector, "on_batch_end", self._on_batch_end(connector.on_batch_end))
        if self._module.automatic_optimization:
            self.replace(epoch_loop, "update_lr_schedulers", self._update_schedulers(epoch_loop.update_lr_schedulers))
        else:
            self.replace(strategy, "backward", self._backward(strategy.backward))
            for config in configs:
                self.hold(config.scheduler, functools.partial(self._holds, config.scheduler))

    # ---- what Lightning calls instead of its own -----------------------------------------------------------------

    def _training_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._begin_batch()
            if self._updates_statistics:
                return self._with_statistics_kept(original, *args, **kwargs)
            can_rerun = bool(args) and not isinstance(args[0], Iterator)  # that would take the next batches
            rerun = self._rerun(original, args, kwargs) if can_rerun else None
            self.loop.before_forward(args[0] if can_rerun else None, rerun=rerun)
            self._is_in_training_step = True
            try:
                output = original(*args, **kwargs)
            finally:
                self._is_in_training_step = False
            loss = _loss_of(output)
            if self._module.automatic_optimization and loss is not None:
                self.loop.after_forward(loss)
            return output

        return training_step

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``manual_backward``."""

        @functools.wraps(original)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if loss.numel() == 1:
                self.loop.after_forward(loss)
            return original(loss, *args, **kwargs)

        return backward

    def _update_schedulers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(interval: str, *args: Any, **kwargs: Any) -> None:
            if interval != "step":
                self.settle()
            if interval != "step" or not self.is_held:
                original(interval, *args, **kwargs)

        return update

    def _holds(self, scheduler: Any) -> bool:
        """In manual optimization the program advances it; inside ``training_step`` that is once for each step."""
        return self._is_in_training_step and any(each is scheduler.optimizer for each in self._unapplied)

    def _on_batch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """After all hooks: those of the program may have logged the loss of the skipped step."""

        @functools.wraps(original)
        def on_batch_end() -> None:
            self._put_back_logged()
            original()

        return on_batch_end

    def _rerun(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], Tensor] | None:
        """Computes the loss once more. None in manual optimization, where ``training_step`` steps itself."""
        if not self._module.automatic_optimization:
            return None

        def rerun(batch: Any) -> Tensor:
            with muted(self._trainer, self._module):
                loss = _loss_of(original(batch, *args[1:], **kwargs))
            if loss is None:
                raise ValueError("training_step gave no loss")
            return loss

        return rerun

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether all optimizers that have stepped for the current batch were skipped."""
        return bool(self._unapplied) and not self._applied

    @property
    def _updates_statistics(self) -> bool:
        """StochasticWeightAveraging calls the model without a backward pass in a last epoch, for BatchNorm."""
        return bool(self._module.automatic_optimization and self._trainer.fit_loop._skip_backward)

    def begin_epoch(self) -> None:
        self._is_in_window = False

    def _begin_batch(self) -> None:
        if not self._is_in_window or self._updates_statistics:
            self._metrics.note()
            self._results.note()
        self._is_in_window, self._is_refused = True, False
        self._applied.clear()
        self._unapplied.clear()

    def measure(self, optimizer: Optimizer) -> None:
        if not self._updates_statistics:
            super().measure(optimizer)

    def step(self, optimizer: Optimizer, call: Callable[[], Any], otherwise: Any = None) -> Any:
        if self.halted is not None or (self._updates_statistics and self._ended_badly):
            self._unapplied.append(optimizer)
            return otherwise
        if self._updates_statistics:  # Lightning steps once more, with the gradients of the last step
            return call()
        self._is_in_window = False
        try:
            return super().step(optimizer, call, otherwise)
        except NonFiniteError as error:
            self._halt(error)
            self.after_step(optimizer, is_applied=False)
            return otherwise

    def was_skipped(self) -> None:
        """The last step, which was told as applied, was not."""
        self.num_skipped += 1
        if self._applied:  # no other batch has begun since
            self._unapplied.append(self._applied.pop())
            self._ended_badly = self._is_refused = True

    @property
    def _is_step_unknown(self) -> bool:
        """Whether the step of this batch counts as applied, but may turn out to have been skipped."""
        return self.halted is None and bool(self._applied) and self.loop.answers_later

    def settle(self) -> None:
        """Waits until it is known whether the step of this batch was applied. Call it between two steps."""
        if self._is_step_unknown:
            try:
                self.loop.settle()
            except NonFiniteError as error:
                self._halt(error)
            self._put_back_logged()

    def _is_asked_for(self) -> bool:
        """Whether something adds this step up or shows it now, so that it must be known whether it was applied."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        logged = [result.meta for result in trainer.fit_loop.epoch_loop._results.values()]
        if any(meta.on_epoch for meta in logged) or metrics_in(self._module):
            return True
        if trainer.loggers and connector.should_update_logs:
            return True
        if any(meta.prog_bar for meta in logged) and trainer.progress_bar_callback is not None:
            return True  # it waits for the number anyway
        return any(_averages(callback) for callback in trainer.callbacks)

    def after_step(self, optimizer: Optimizer, *, is_applied: bool) -> None:
        (self._applied if is_applied else self._unapplied).append(optimizer)
        self._ended_badly = not is_applied
        if self.halted is not None or self.loop.was_refused:
            self.num_skipped += not self._is_refused
            self._is_refused = True

    def _halt(self, error: NonFiniteError) -> None:
        """Training ends after this batch, as by EarlyStopping: with validation, checkpoints and loggers."""
        log.error("%s", error)
        self.halted = error
        self.replace(self._trainer.fit_loop, "min_epochs", None)
        self.replace(self._trainer.fit_loop.epoch_loop, "min_steps", None)
        self._trainer.should_stop = True

    def after_batch(self) -> None:
        """Before the other callbacks."""
        if self._is_step_unknown and self._is_asked_for():
            self.settle()
        self._put_back_logged()
        for callback in self._trainer.callbacks if self.is_held else ():
            if hasattr(callback, "_latest_update_step"):  # WeightAveraging: it averages if this is behind
                callback._latest_update_step = self._trainer.global_step

    def _put_back_logged(self) -> None:
        if self._is_refused:
            self._metrics.put_back()
            self._results.put_back(except_for=SKIPPED)

    def _with_statistics_kept(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch that makes a buffer or the loss non-finite is left out."""
        buffers = Undo(self._module.device)
        buffers.watch_buffers(self._module)
        buffers.note_()
        output = original(*args, **kwargs)
        loss = _loss_of(output)
        floating = {name: each for name, each in self._module.named_buffers() if each.is_floating_point()}
        if nonfinite_names(floating) or (loss is not None and not bool(torch.isfinite(loss).all())):
            buffers.undo_()
            self._is_refused = True
            log.warning("batch %s is left out of the statistics of the averaged model: it is not finite", args[1:2])
        return output


def _averages(callback: Any) -> bool:
    """Whether a callback of Lightning averages weights."""
    return hasattr(callback, "_latest_update_step") or type(callback).__name__ == "StochasticWeightAveraging"


def _loss_of(output: Any) -> Tensor | None:
    """Of what ``training_step`` has returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None
