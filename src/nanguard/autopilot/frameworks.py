"""Trainers of frameworks in a program under ``nanguard run``: the adapters of ``integrations`` guard them.

An adapter knows more than the patches of torch do: it holds the schedule, keeps means finite, and runs the step
function of the framework again. While it is in charge, the patches stand aside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from nanguard.autopilot import accelerated
from nanguard.autopilot.fabric_loops import FabricLoops
from nanguard.autopilot.launch import WhenImported
from nanguard.autopilot.monitor import ProgramMonitor
from nanguard.autopilot.timm_loops import TimmLoops
from nanguard.hosted.joining import joining
from nanguard.hosted.settings import Settings

log = logging.getLogger("nanguard")

Decline = Callable[[Sequence[Optimizer], ValueError], None]
"""Called by a row if its adapter cannot guard these optimizers after all: the patches of torch do so from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """``owner.method`` of ``module`` runs the whole training. ``guarding(trainer, decline)`` is entered around it.

    If ``guarding`` raises ``ValueError`` before it yields, the adapter cannot guard this trainer.
    """

    module: str
    owner: str
    method: str
    guarding: Callable[[Any, Decline], AbstractContextManager[None]]
    trains: Callable[[Any], bool] = lambda trainer: True
    """Whether this call trains, if the method may do something else too."""


class Frameworks:
    """Waits until the program imports a framework, and then patches the method that trains. ``remove`` restores it."""

    def __init__(self, monitor: ProgramMonitor, settings: Settings, take: Callable[[Optimizer], None]) -> None:
        self._monitor, self._take = monitor, take
        self._saved: list[tuple[Any, str, Any]] = []
        self._waits = [WhenImported(accelerated.MODULE, functools.partial(accelerated.hold_schedules, self._save))]
        self._waits += FabricLoops(self._save).waits()
        self._waits += TimmLoops(lambda: monitor.registry.hosted_steps, self._save).waits()
        if settings.trace or settings.max_norm is not None or settings.keep_fp32:
            return  # only the patches of torch can do that
        for row in ROWS:
            self._waits.append(WhenImported(row.module, functools.partial(self._patch, row)))

    def _save(self, owner: Any, name: str, original: Any) -> None:
        self._saved.append((owner, name, original))

    def remove(self) -> None:
        for waits in self._waits:
            waits.forget()
        while self._saved:
            owner, name, original = self._saved.pop()
            setattr(owner, name, original)

    def _patch(self, row: Framework) -> None:
        owner = getattr(sys.modules[row.module], row.owner, None)
        original = getattr(owner, row.method, None)
        if owner is None or original is None:
            log.info("%s has no %s.%s: its optimizers are guarded as any others", row.module, row.owner, row.method)
            return

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._in_charge(row, trainer):
                return original(trainer, *args, **kwargs)

        self._save(owner, row.method, original)
        setattr(owner, row.method, train)

    @contextlib.contextmanager
    def _in_charge(self, row: Framework, trainer: Any) -> Iterator[None]:
        """The adapter guards what happens inside, or the patches do if it cannot."""
        if self._monitor.is_idle or not row.trains(trainer):
            yield
            return
        with contextlib.ExitStack() as aside, contextlib.ExitStack() as stack:

            def decline(optimizers: Sequence[Optimizer], error: ValueError) -> None:
                log.info("the adapter for %s is not used: %s", row.module, error)
                aside.close()
                for optimizer in optimizers:
                    self._take(optimizer)

            aside.enter_context(self._monitor.standing_aside())
            try:
                stack.enter_context(joining(self._monitor.registry.program))
                stack.enter_context(row.guarding(trainer, decline))
            except ValueError as error:
                decline((), error)
            yield


@contextlib.contextmanager
def _lightning(trainer: Any, decline: Decline) -> Iterator[None]:
    from nanguard.integrations.lightning import GuardCallback
    from nanguard.integrations.stepping import refuse_sharded

    if any(isinstance(each, GuardCallback) for each in trainer.callbacks):  # the program's own
        with joining(None):
            yield
        return
    refuse_sharded(trainer.strategy, "nanguard")
    callback = GuardCallback()
    callback.when_refused = decline
    trainer.callbacks = [*trainer.callbacks, callback]
    try:
        yield
    except BaseException as error:
        callback.on_exception(trainer, trainer.lightning_module, error)
        raise
    finally:
        trainer.callbacks = [each for each in trainer.callbacks if each is not callback]


@contextlib.contextmanager
def _attaching(module: str, marker: str, trainer: Any, decline: Decline) -> Iterator[None]:
    """Calls ``attach(trainer)`` of an integration. ``marker`` is an attribute that it sets on the trainer."""
    integration = importlib.import_module(module)
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    has_callback = any(isinstance(each, integration.GuardCallback) for each in callbacks)
    if marker in vars(trainer) or has_callback:  # the program's own
        with joining(None):
            yield
        return
    guard = integration.attach(trainer)
    guard.when_refused = decline
    with guard:
        yield


_transformers = functools.partial(_attaching, "nanguard.integrations.transformers", "training_step")
_speechbrain = functools.partial(_attaching, "nanguard.integrations.speechbrain", "fit_batch")


def _fits(trainer: Any) -> bool:
    return bool(trainer.state.fn == "fit")


# In a process that Lightning has started, _run is the first method that is looked up there.
_LIGHTNING = [
    Framework(module=f"{package}.trainer.trainer", owner="Trainer", method="_run", guarding=_lightning, trains=_fits)
    for package in ("lightning.pytorch", "pytorch_lightning")
]
ROWS = (
    *_LIGHTNING,
    Framework(module="transformers.trainer", owner="Trainer", method="train", guarding=_transformers),
    Framework(module="speechbrain.core", owner="Brain", method="fit", guarding=_speechbrain),
)
"""A framework is one row."""
