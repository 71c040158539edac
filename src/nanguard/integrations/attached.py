"""What ``attach`` returns: a guard inside a framework's loop, which can be taken out again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from nanguard.hosted.loop import HostedLoop
from nanguard.records.steps import Incidents

_ABSENT = object()


class AttachedGuard:
    """Guards the loop of a framework until ``detach``. As a context manager it detaches itself at the end.

    ``loop`` is None if the framework makes its optimizers later, when training begins.
    """

    def __init__(self, loop: HostedLoop | None = None) -> None:
        self._loop = loop
        self._undo: list[Callable[[], None]] = []
        self.when_refused: Callable[[Sequence[Optimizer], ValueError], None] | None = None
        """Called if optimizers cannot be guarded once training begins, which is an error otherwise."""

    def refused(self, optimizers: Sequence[Optimizer], error: ValueError) -> None:
        """``HostedLoop`` has refused these. The framework goes on without this guard, if that is allowed."""
        if self.when_refused is None:
            raise error
        self.detach()
        self.when_refused(optimizers, error)

    @property
    def loop(self) -> HostedLoop:
        """The engine of the run, or of the last one. There is none before training has begun."""
        if self._loop is None:
            raise RuntimeError("nothing is guarded yet: training has not begun since attach()")
        return self._loop

    @property
    def incidents(self) -> Incidents:
        """Every bad step so far."""
        return Incidents() if self._loop is None else self._loop.incidents

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, backed off, and so on."""
        return {} if self._loop is None else self._loop.counts

    def unsound(self) -> tuple[str, ...]:
        """Names of weights, buffers and optimizer state that are not finite now. Syncs."""
        return self.loop.unsound()

    def summary(self) -> str:
        """The run in one line. Syncs."""
        return self.loop.summary()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute of an object of the framework. ``detach`` restores what was there."""
        before = vars(owner).get(name, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(restore)

    def wrap(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Calls ``instead(original, ...)`` in the place of a method of an object of the framework."""
        original = getattr(owner, name)
        self.replace(owner, name, functools.wraps(original)(functools.partial(instead, original)))

    def wrap_by_class(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """As ``wrap``, for an object whose attributes are all saved, such as a scheduler: it gets another class."""
        kind = type(owner)
        original = getattr(kind, name)

        @functools.wraps(original)
        def method(itself: Any, *args: Any, **kwargs: Any) -> Any:
            return instead(functools.partial(original, itself), *args, **kwargs)

        same = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
        owner.__class__ = type(kind.__name__, (kind,), {**same, name: method})
        self._undo.append(lambda: setattr(owner, "__class__", kind))

    def hold(self, scheduler: Any, is_held: Callable[[], bool]) -> None:
        """``scheduler.step()`` does nothing while ``is_held()``."""
        self.wrap_by_class(
            scheduler, "step", lambda step, *args, **kwargs: None if is_held() else step(*args, **kwargs)
        )

    def at_detach(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the guard is detached. The last one is called first."""
        self._undo.append(function)

    def detach(self, error: BaseException | None = None) -> None:
        """Restores everything and ends the run log. The framework goes on as without nanguard.

        ``error`` is what has ended the loop, if something has: a bad step that it has interrupted is examined.
        """
        if self._loop is not None:
            self._loop.__exit__(None if error is None else type(error), error, None)
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> AttachedGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach(error)
