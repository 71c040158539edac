"""Lightning: ``Trainer(callbacks=[GuardCallback()])``, of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from nanguard.diagnosis.scheduler import How
from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.lightning_fit import SKIPPED, GuardedFit
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.integrations.options import checked_options
from nanguard.integrations.packages import require
from nanguard.integrations.stepping import can_be_rolled_back, refuse_sharded
from nanguard.policy.policy import Policy
from nanguard.records.steps import Incidents
from nanguard.step.observers import Observer

TESTED = ("2.4", "2.7")


def _callback_class() -> Any:
    """Of the package that the program uses. Their trainers take the callbacks of either."""
    uses_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    name = "pytorch_lightning" if uses_old else "lightning"
    return require(name if uses_old else "lightning.pytorch", tested=TESTED, extra="lightning", package=name).Callback


class GuardCallback(_callback_class()):  # type: ignore[misc]
    """Guards ``Trainer.fit``: a non-finite step is skipped, and everything is as if its batch had never come.

    Weights, optimizer state, buffers and averages are not touched, the schedule is held, and logged means and
    torchmetrics leave the step out. ``trainer.global_step`` counts the step, as it counts all.

    Args:
        policy: what to do about bad steps. The default skips them as long as the run makes progress, and rolls
            damage back. If it halts, ``fit`` ends as if ``trainer.should_stop`` had been set; see ``halted``.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        run_dir: str | Path | None = None,
        observers: Sequence[Observer] = (),
        diagnose: How = "auto",
        capture: CaptureLevel = "batch",
    ) -> None:
        self._options = checked_options(
            policy=policy, run_dir=run_dir, observers=observers, diagnose=diagnose, capture=capture
        )
        self._guarded: GuardedFit | None = None
        self._before_fit = AttachedGuard()
        """What is replaced before training begins."""
        self._loaders = FollowedLoaders()
        self._loaded: dict[str, Any] = {}
        self.when_refused: Callable[[Sequence[Optimizer], ValueError], None] | None = None
        """Called if the optimizers cannot be guarded, which is an error otherwise."""

    # ---- what happened -------------------------------------------------------------------------------------------

    @property
    def guard(self) -> AttachedGuard:
        """The guard of the current fit, or of the last one: ``incidents``, ``counts``, ``summary()``."""
        if self._guarded is None:
            raise RuntimeError("GuardCallback has no guard before trainer.fit() has begun to train")
        return self._guarded

    @property
    def incidents(self) -> Incidents:
        """Every bad step so far."""
        return self.guard.incidents

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, backed off, and so on."""
        return self.guard.counts

    def summary(self) -> str:
        """The run in one line. Syncs."""
        return self.guard.summary()

    @property
    def last_step_was_skipped(self) -> bool:
        """For your own callbacks, in ``on_train_batch_end``: whether the step of this batch changed nothing."""
        if self._guarded is None:
            return False
        self._guarded.settle()
        return self._guarded.is_held

    @property
    def halted(self) -> NonFiniteError | None:
        """Why the policy has ended the run; None if it has not."""
        return None if self._guarded is None else self._guarded.halted

    # ---- hooks of Lightning --------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what is not supported, and goes before the other callbacks: they see the state as it should be."""
        if stage != "fit":
            return
        refuse_sharded(trainer.strategy, "GuardCallback")
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self._before_fit.detach()
        self._before_fit.at_detach(self._loaders.stop)
        self._before_fit.wrap(
            trainer.strategy, "process_dataloader", lambda process, loader: self._loaders.follow(process(loader))
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is in its place: the model is wrapped and on its device, and a checkpoint has been loaded."""
        if any(type(each).__name__ == "_MockOptimizer" for each in trainer.optimizers):
            return  # configure_optimizers gave none
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        can_wait = pl_module.automatic_optimization and all(map(can_be_rolled_back, schedulers))
        try:
            loop = HostedLoop(
                trainer.strategy.model,
                trainer.optimizers,
                schedulers=[each for each in schedulers if can_be_rolled_back(each)],
                first_step=trainer.global_step if pl_module.automatic_optimization else None,
                was_skipped=self._was_skipped if can_wait else None,
                **self._options,
            )
        except ValueError as error:
            if self.when_refused is None:
                raise
            self.when_refused(trainer.optimizers, error)
            return
        self._guarded = GuardedFit(loop, trainer, pl_module)
        self._loaders.tell(loop)
        loop.load_state_dict(self._loaded)
        self._loaded = {}

    def _was_skipped(self) -> None:
        if self._guarded is not None:
            self._guarded.was_skipped()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """What was logged before belongs to another epoch."""
        if self._guarded is not None:
            self._guarded.begin_epoch()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Before clipping."""
        if self._guarded is not None:
            self._guarded.measure(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Before the other callbacks, so that they see finite numbers."""
        guarded = self._guarded
        if guarded is None:
            return
        guarded.after_batch()
        skipped = guarded.num_skipped
        if skipped:
            pl_module.log(SKIPPED, float(skipped), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._settle()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        """What the recovery has changed and is still in force, mostly nothing.

        A checkpoint is being saved, and has to be of steps that are known.
        """
        self._settle()
        return self._loaded if self._guarded is None else self._guarded.loop.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Training has not begun yet: it is put back then."""
        self._loaded = state_dict

    def _settle(self) -> None:
        if self._guarded is not None:
            self._guarded.settle()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Examines a bad step in the middle of which the program has raised."""
        self._before_fit.detach()
        if self._guarded is not None:
            self._guarded.detach(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._before_fit.detach()
        if self._guarded is not None and stage == "fit":
            self._guarded.detach()
