"""Lightning Fabric: ``attach(fabric, model, optimizer)``, after ``fabric.setup``. The loop stays as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard.diagnosis.scheduler import How
from nanguard.hosted.loop import HostedLoop
from nanguard.incidents.bundle import CaptureLevel
from nanguard.integrations.loaders import FollowedLoaders
from nanguard.integrations.options import check_given
from nanguard.integrations.packages import require
from nanguard.integrations.stepping import SteppingGuard, can_be_rolled_back, refuse_sharded
from nanguard.policy.policy import Policy
from nanguard.step.assembly import as_tuple
from nanguard.step.observers import Observer

TESTED = ("2.4", "2.7")
_SAVED = "nanguard"


def attach(
    fabric: Any,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    *,
    loader: Any = None,
    schedule_per: Literal["step", "epoch"] = "step",
    policy: Policy | None = None,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    diagnose: How = "auto",
    capture: CaptureLevel = "batch",
) -> FabricGuard:
    """Guards a loop that is written with Fabric: non-finite steps are skipped, and nothing changes in them.

    Call it after ``fabric.setup``, and before the first batch. ``detach`` of what it returns restores everything.

    Args:
        fabric: the ``Fabric`` object.
        model: what ``fabric.setup`` has returned.
        optimizer: what ``fabric.setup`` has returned: one or several.
        scheduler: schedulers that the loop advances. Those that are advanced for each step are held after a skipped
            one: their ``step()`` then does nothing.
        loader: the loader that the loop trains with, or several: a diagnosis then names the guilty record by its index
            in the dataset. Those that ``fabric.setup_dataloaders`` makes later need not be given.
        schedule_per: whether the loop advances them for each step or for each epoch.
        policy: what to do about bad steps. The default skips them as long as the run makes progress, and rolls
            damage back. If it halts, ``optimizer.step()`` raises ``NonFiniteError``.
        run_dir: where to write the run log and bad steps; None writes nothing.
        observers: objects that are told what happens.
        diagnose: as for ``Guard``.
        capture: as for ``Guard``.
    """
    is_alone = type(fabric).__module__.startswith("lightning_fabric")
    require(
        "lightning_fabric" if is_alone else "lightning.fabric", tested=TESTED, extra="lightning", package="lightning"
    )
    if schedule_per not in ("step", "epoch"):
        raise ValueError(f"schedule_per must be 'step' or 'epoch', got {schedule_per!r}")
    check_given(fabric, "strategy", "clip_gradients", needed="a lightning.Fabric")
    refuse_sharded(fabric.strategy, "nanguard.integrations.fabric")
    if not hasattr(model, "_forward_module"):
        raise ValueError(f"model must be what fabric.setup() has returned, got a plain {type(model).__name__}")
    inside: Any = model._forward_module
    optimizers = [_raw(each) for each in as_tuple(optimizer)]
    schedulers: tuple[LRScheduler, ...] = as_tuple(scheduler)
    loop = HostedLoop(
        inside,
        optimizers,
        schedulers=[each for each in schedulers if can_be_rolled_back(each) and each.optimizer in optimizers],
        policy=policy,
        run_dir=run_dir,
        observers=observers,
        diagnose=diagnose,
        capture=capture,
    )
    guard = FabricGuard(loop, fabric, inside, optimizers, schedulers if schedule_per == "step" else ())
    loaders = FollowedLoaders(loop)
    guard.at_detach(loaders.stop)
    for each in as_tuple(loader):
        loaders.follow(each)

    def setup_dataloaders(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        for each in as_tuple(made):
            loaders.follow(each)
        return made

    guard.wrap(fabric, "setup_dataloaders", setup_dataloaders)
    return guard


class FabricGuard(SteppingGuard):
    """What ``attach`` returns."""

    def __init__(
        self,
        loop: HostedLoop,
        fabric: Any,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
    ) -> None:
        precision = fabric.strategy.precision
        super().__init__(loop, optimizers, getattr(precision, "scaler", None))
        self._unapplied: set[int] = set()
        """Identities of the optimizers whose last step was skipped."""
        self.replace(fabric, "backward", self._backward(fabric.backward))
        self.replace(fabric, "clip_gradients", self._clip_gradients(fabric.clip_gradients))
        self.replace(precision, "unscale_gradients", self._unscale_gradients(precision.unscale_gradients))
        self.wrap(fabric, "save", self._save)
        self.wrap(fabric, "load", self._load)
        for scheduler in schedulers:
            self.hold(scheduler, functools.partial(self._is_held, scheduler))
        # Before the hooks of the loop: they have to know that a step begins.
        self.at_detach(model.register_forward_pre_hook(self._before_forward, prepend=True).remove)

    def _before_forward(self, *call: Any) -> None:
        if not self.loop.is_rerunning:
            self.loop.before_forward()

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                self.loop.after_forward(tensor)
            original(tensor, *args, **kwargs)

        return backward

    def _clip_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip_gradients(module: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.knows(_raw(optimizer)) and len(args) < 4:
                kwargs["error_if_nonfinite"] = False  # the step is skipped, which needs no error
            return original(module, optimizer, *args, **kwargs)

        return clip_gradients

    def _unscale_gradients(self, original: Callable[..., None]) -> Callable[..., None]:
        """Fabric calls it right before it clips."""

        @functools.wraps(original)
        def unscale_gradients(optimizer: Optimizer) -> None:
            original(optimizer)
            if self.knows(optimizer):
                self.measure(optimizer)

        return unscale_gradients

    def _save(self, original: Callable[..., None], path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """With what the recovery has changed: mostly nothing, and then the checkpoint is that of the program alone."""
        changed = self.loop.state_dict()
        original(path, {**state, _SAVED: changed} if changed else state, *args, **kwargs)

    def _load(self, original: Callable[..., dict[str, Any]], path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = original(path, *args, **kwargs)
        self.loop.resumed()
        if isinstance(remainder, dict):
            self.loop.load_state_dict(remainder.pop(_SAVED, {}))
        return remainder

    def _is_held(self, scheduler: LRScheduler) -> bool:
        return id(_raw(scheduler.optimizer)) in self._unapplied

    def after_step(self, optimizer: Optimizer, *, is_applied: bool) -> None:
        (self._unapplied.discard if is_applied else self._unapplied.add)(id(optimizer))


def _raw(optimizer: Any) -> Any:
    """Inside the wrapper of Fabric."""
    is_wrapped = any(kind.__name__ == "_FabricOptimizer" for kind in type(optimizer).__mro__)
    return optimizer.optimizer if is_wrapped else optimizer
