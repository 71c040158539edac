"""``GuardCallback``: what of the guard for the Hugging Face Trainer a callback can do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanguard.diagnosis.scheduler import How
from nanguard.errors import NonFiniteError
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.accelerate import AcceleratorGuard, plain_optimizer, plain_scheduler
from nanguard.integrations.attached import AttachedGuard
from nanguard.integrations.options import checked_options
from nanguard.integrations.packages import require
from nanguard.integrations.transformers_logged import note_state, put_back_state
from nanguard.policy.policy import Policy
from nanguard.step.observers import Observer

log = logging.getLogger("nanguard")

TESTED = ("4.57", "6.0")

_CANNOT = (
    "GuardCallback protects weights, optimizer state and buffers, and holds the schedule. A callback never gets the "
    "Trainer, so it does not see the loss, measures gradients after clipping, and does not correct the logged loss. "
    "nanguard.integrations.transformers.attach(trainer) does all of it"
)

_INSTEAD = (
    "Remove it from callbacks=[...], and call nanguard.integrations.transformers.attach(trainer) after the Trainer is "
    "made; or start the program with nanguard run"
)


def stop_cleanly(control: Any, args: Any, error: NonFiniteError) -> None:
    """Training ends after this step, with a checkpoint if the program saves any."""
    log.error("training stops, since the policy halts the run: %s", error)
    control.should_training_stop = True
    control.should_save = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"


def _callback_class() -> Any:
    return require("transformers", tested=TESTED, extra="transformers").TrainerCallback


class GuardCallback(_callback_class()):  # type: ignore[misc]
    """For programs that cannot call ``attach(trainer)``. What a callback cannot do is logged when training begins.

    Takes ``policy``, ``run_dir``, ``observers``, ``diagnose`` and ``capture`` as ``attach`` does.
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
        self.guard: AttachedGuard = AttachedGuard()
        """``incidents``, ``counts`` and ``summary()`` of the current training, or of the last one."""
        self.halted: NonFiniteError | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if args.world_size > 1:
            raise ValueError(
                f"GuardCallback guards one process, and this training has {args.world_size}: a callback is not given "
                f"the model that averages gradients over them. {_INSTEAD}"
            )
        if not hasattr(optimizer, "step_was_skipped"):
            raise ValueError(
                f"GuardCallback does not support {type(optimizer).__name__}, which Accelerate has not prepared "
                "(DeepSpeed steps by itself): train without DeepSpeed, or without nanguard"
            )
        log.warning(_CANNOT)
        self.guard.detach()
        scheduler = plain_scheduler(kwargs.get("lr_scheduler"))
        loop = HostedLoop(
            model,
            plain_optimizer(optimizer),
            schedulers=() if scheduler is None else scheduler,
            first_step=state.global_step,
            **self._options,
        )
        self.guard = guard = AcceleratorGuard(loop, None, [optimizer])
        put_back_state(state, loop)
        guard.follow(model)
        guard.loaders.follow(kwargs.get("train_dataloader"))
        guard.on_halt = lambda error: self._stop(args, control, error)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note_state(state, self.guard.loop)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.guard.detach()

    def _stop(self, args: Any, control: Any, error: NonFiniteError) -> None:
        self.halted = error
        stop_cleanly(control, args, error)
