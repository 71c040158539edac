"""The rungs of the ladder: what may be done about trouble, as small frozen objects that are read in one look.

Each says how often it may be used (``times``, None: always) within a span (``per``: an epoch, the run, or a number of
steps), which verdicts it answers, what it does, and how it reads. A rung can be defined anywhere: docs/recovery.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, cast, get_args

from nanguard.policy.context import RungContext
from nanguard.records.alert import Alert
from nanguard.records.steps import Means, Response, Verdict

Span = Literal["epoch", "run"] | int
"""An epoch, the run, or that many steps."""


class Rung(Protocol):
    """What ``Policy`` accepts. A rung never changes, and decides and acts the same on all ranks.

    Three more attributes are optional. ``steps_back`` is how many steps back the rung may want to go: without it no
    snapshots are taken for its sake. ``response`` is one of the names in ``Response``; it is "act" if there is none.
    With ``when = "alert"`` the rung answers warnings of the ``Monitor``, and nothing else; without it, none of them.
    """

    @property
    def times(self) -> int | None:
        """How often it may be used within its span; None: always."""

    @property
    def per(self) -> Span:
        """The span."""

    def refuses(self, verdict: Verdict) -> str:
        """Why the rung does not answer this; empty if it does. Pure: asked often, also about steps that never were."""

    def act(self, context: RungContext) -> str | None:
        """Does it, and returns what it did, in words; the step stays refused. A warning is answered between two steps.

        None: it had no use, the rung has put everything back as it was, and the next rung is tried.
        """

    def describe(self) -> str:
        """The name of the rung in words, such as "lower the learning rate"."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The step has no effect. With ``when="data"`` only if it is proven that the batch is at fault.

    However many times are allowed, ``Policy.max_consecutive_skips`` and ``max_skipped_share`` stop a run that makes no
    progress.
    """

    times: int | None = 3
    per: Span = "epoch"
    when: Literal["any", "data"] = "any"

    response: ClassVar[Response] = "skip"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)
        check("when", self.when, self.when in ("any", "data"), "'any' or 'data'")

    def refuses(self, verdict: Verdict) -> str:
        if verdict.kind != "nonfinite":
            return "a skip does not undo it"
        is_data = verdict.cause in ("input", "batch")
        return "" if self.when == "any" or is_data else "nothing proves that the data are at fault"

    def act(self, context: RungContext) -> str:
        return ""

    def describe(self) -> str:
        return "skip"


@dataclass(frozen=True, slots=True)
class DropBadGradients:
    """If the loss is finite and some gradients are not, these become None and the rest of the step is applied.

    The bad parameters and their moments stay as they are. Makes the host check every step, and is ignored under fp16
    loss scaling, where an overflow says nothing about a single parameter.
    """

    times: int | None = None
    per: Span = "epoch"

    response: ClassVar[Response] = "drop_gradients"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)

    def refuses(self, verdict: Verdict) -> str:
        reading = verdict.reading
        if verdict.kind != "nonfinite" or reading.found != ("gradients",):
            return "more than gradients is non-finite"
        if reading.scale is not None:
            return "gradients are scaled"
        return "" if verdict.means.can_drop_gradients else "no gradient was left to apply"

    def act(self, context: RungContext) -> str:
        return ""  # the step itself drops them, before it is refused

    def describe(self) -> str:
        return "drop bad gradients"


@dataclass(frozen=True, slots=True)
class LowerLR:
    """The step is skipped and the learning rate multiplied by ``factor``, with the base of its schedule.

    After ``recover_after`` steps without trouble it is what the schedule says again; None: never. With ``when="alert"``
    it answers a warning, and no step is skipped.
    """

    factor: float = 0.5
    recover_after: int | None = None
    times: int | None = 3
    per: Span = "run"
    when: Literal["any", "alert"] = "any"

    response: ClassVar[Response] = "lower_lr"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)
        _check_when(self.when)
        check("factor", self.factor, 0 < self.factor < 1, "a number between 0 and 1")
        check_count("recover_after", self.recover_after, optional=True)

    def refuses(self, verdict: Verdict) -> str:
        return "a smaller learning rate does not mend it" if verdict.kind == "damage" else ""

    def act(self, context: RungContext) -> str:
        return context.lower_lr(self.factor, recover_after=self.recover_after)

    def describe(self) -> str:
        return "lower the learning rate"


@dataclass(frozen=True, slots=True)
class RaisePrecision:
    """The step is skipped, and one module, or the whole model, runs in fp32 from now on.

    ``"module"`` takes the fewest modules that make the failing step finite, as the diagnosis finds them by trying; if
    there are none, the next rung is taken. ``"model"`` leaves autocast and casts half-precision weights and optimizer
    state to fp32 in place. With ``verify`` this is tried on the failing step first, and if it does not help, the
    precision stays as it was and the next rung is taken. ``lr`` multiplies the learning rate as well. After
    ``retry_after`` steps without trouble the lower precision is tried again (weights that were cast stay in fp32).

    With ``when="alert"`` it answers a warning that fp32 would help against, and no step is skipped. ``"module"`` is the
    module of the warning then, or the one around it if its result leaves it in half precision; it is not tried first.
    """

    scope: Literal["module", "model"] = "module"
    lr: float = 1.0
    verify: bool = True
    retry_after: int | None = None
    times: int | None = 1
    per: Span = "run"
    when: Literal["any", "alert"] = "any"

    response: ClassVar[Response] = "raise_precision"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)
        _check_when(self.when)
        check("scope", self.scope, self.scope in ("module", "model"), "'module' or 'model'")
        check("lr", self.lr, 0 < self.lr <= 1, "a number above 0, up to 1")
        check_count("retry_after", self.retry_after, optional=True)

    def refuses(self, verdict: Verdict) -> str:
        if verdict.alert is not None:
            return self._refuses_alert(verdict.alert, verdict.means)
        if verdict.kind != "nonfinite":
            return "precision does not undo it"
        if not verdict.means.lower_precision and self.lr == 1.0:
            return "everything runs in fp32"
        if self.verify and verdict.cause == "input":
            return "the data hold NaN or Inf"
        if self.scope == "module" and not verdict.means.can_run_again:
            return "the module can be found only if guard.step runs the step"
        return ""

    def _refuses_alert(self, alert: Alert, means: Means) -> str:
        if not alert.helps_precision or not means.lower_precision:
            return "precision does not help against it"
        if self.scope == "module" and alert.kind == "gradient":
            return "gradients vanish in the modules behind it"
        return ""

    def act(self, context: RungContext) -> str | None:
        raised = context.raise_precision(self.scope, verify=self.verify, retry_after=self.retry_after)
        if raised is None:
            return None
        return "; ".join(filter(None, [raised, context.lower_lr(self.lr)]))

    def describe(self) -> str:
        return f"raise precision of {'one module' if self.scope == 'module' else 'the model'}"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Restores the newest good snapshot that is at least ``steps`` old, and training goes on from there.

    Each further rollback within the span goes one snapshot further back; if none is that old, the oldest is taken. With
    ``guard.epoch`` the data are rewound too: all batches come again, except the first ``skip_batches`` (``"failed"``:
    except those between the first sign of trouble and now). ``lr`` multiplies the learning rate. ``raise_precision``
    runs model and optimizer state in fp32 afterwards; it answers only damage, which an optimizer in half precision may
    cause. ``when="damage"`` answers only weights, buffers or moments that were non-finite before the step.
    """

    steps: int = 1
    skip_batches: int | Literal["failed"] = 0
    lr: float = 1.0
    raise_precision: bool = False
    when: Literal["any", "damage"] = "any"
    times: int | None = 3
    per: Span = "run"

    response: ClassVar[Response] = "roll_back"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)
        check_count("steps", self.steps)
        check("when", self.when, self.when in ("any", "damage"), "'any' or 'damage'")
        if self.skip_batches != "failed":
            is_count = type(self.skip_batches) is int and self.skip_batches >= 0
            check("skip_batches", self.skip_batches, is_count, "a whole number, 0 or more, or 'failed'")
        check("lr", self.lr, 0 < self.lr <= 1, "a number above 0, up to 1")

    def refuses(self, verdict: Verdict) -> str:
        if (self.raise_precision or self.when == "damage") and verdict.kind != "damage":
            return "the state is not damaged"
        if self.raise_precision and not verdict.means.lower_precision:
            return "everything is in fp32"
        return "" if verdict.means.snapshots else "there is no good snapshot"

    def act(self, context: RungContext) -> str | None:
        return context.roll_back(
            self.steps, skip_batches=self.skip_batches, lr=self.lr, raise_precision=self.raise_precision
        )

    def describe(self) -> str:
        return "roll back"

    @property
    def steps_back(self) -> int:
        return self.steps


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answers a warning: a snapshot of the state is taken before the next step, so that a rollback loses little."""

    times: int | None = 3
    per: Span = 1000

    when: ClassVar[Literal["alert"]] = "alert"
    steps_back: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)

    def refuses(self, verdict: Verdict) -> str:
        return ""

    def act(self, context: RungContext) -> str | None:
        return context.take_snapshot()

    def describe(self) -> str:
        return "take a snapshot"


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Calls ``function(context)`` with a ``RungContext``.

    The function returns what it did, in words; if it returns None, the next rung is tried. With
    ``when="alert"`` it answers warnings, with ``"any"`` bad steps and divergences.
    """

    function: Callable[[RungContext], str | None]
    times: int | None = None
    per: Span = "run"
    when: Literal["any", "alert"] = "alert"

    def __post_init__(self) -> None:
        _check_budget(self.times, self.per)
        _check_when(self.when)
        check("function", self.function, callable(self.function), "a function of a RungContext")

    def refuses(self, verdict: Verdict) -> str:
        return ""

    def act(self, context: RungContext) -> str | None:
        return self.function(context)

    def describe(self) -> str:
        return f"call {getattr(self.function, '__name__', type(self.function).__name__)}"


@dataclass(frozen=True, slots=True)
class Halt:
    """Stops training with ``NonFiniteError``; nothing is corrupted. Every ladder ends with it, written or not."""

    times: ClassVar[int | None] = None
    per: ClassVar[Span] = "run"
    response: ClassVar[Response] = "halt"

    def refuses(self, verdict: Verdict) -> str:
        return "the loss is finite" if verdict.kind == "divergence" and not verdict.reading.found else ""

    def act(self, context: RungContext) -> str:
        """A good snapshot takes the place of a damaged state: the program might save it."""
        is_damaged = context.verdict.kind == "damage" and context.verdict.means.snapshots
        return (context.restore_newest() or "") if is_damaged else ""

    def describe(self) -> str:
        return "halt"


BUILT_IN: tuple[type, ...] = (Skip, DropBadGradients, LowerLR, RaisePrecision, Rollback, TakeSnapshot, Halt)
"""Those that can be made again from their fields in a run log."""


def response_of(rung: Rung) -> Response:
    return cast(Response, getattr(rung, "response", "act"))


def answers_alerts(rung: Rung) -> bool:
    """Whether the rung answers warnings, and nothing else."""
    return getattr(rung, "when", "") == "alert"


def steps_back(rung: Rung) -> int:
    """How many steps back the rung may want to go; 0 if it never does."""
    return 0 if rung.times == 0 else int(getattr(rung, "steps_back", 0))


def check_rung(rung: object) -> None:
    """Raises ``ValueError`` if the object is no rung."""
    needed = "a rung has the methods refuses(verdict), act(context) and describe(), and the attributes times and per"
    if isinstance(rung, type):
        raise ValueError(f"a ladder holds rungs, got the class {rung.__name__}: write {rung.__name__}()")
    missing = [name for name in ("refuses", "act", "describe") if not callable(getattr(rung, name, None))]
    missing += [name for name in ("times", "per") if not hasattr(rung, name)]
    if missing:
        raise ValueError(f"a ladder holds rungs, got {rung!r}, which has no {', '.join(missing)}: {needed}")
    given = cast(Rung, rung)
    words = given.describe()
    check(f"{type(rung).__name__}.describe()", words, isinstance(words, str) and bool(words), "a name in words")
    _check_budget(given.times, given.per)
    known = get_args(Response)
    check("response", response_of(given), response_of(given) in known, f"one of {', '.join(known)}")


def check(name: str, value: object, fits: bool, accepted: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_count(name: str, value: int | None, *, optional: bool = False) -> None:
    fits = (optional and value is None) or (type(value) is int and value >= 1)
    check(name, value, fits, "a whole number, 1 or more" + (", or None" if optional else ""))


def _check_when(when: str) -> None:
    check("when", when, when in ("any", "alert"), "'any' or 'alert'")


def _check_budget(times: int | None, per: Span) -> None:
    check("times", times, times is None or (type(times) is int and times >= 0), "a whole number, 0 or more, or None")
    fits = per in ("epoch", "run") or (type(per) is int and per >= 1)
    check("per", per, fits, "'epoch', 'run' or a number of steps")
