"""What has been done about trouble and is still in force, and how it is taken back when all went well for long."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanguard.records.words import listed
from nanguard.state.casts import has_half_weights
from nanguard.step.parts import StepParts

log = logging.getLogger("nanguard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mitigation:
    """In force since step ``since``; taken back after ``ease_after`` steps without trouble, None: never."""

    kind: Literal["lr", "modules", "model"]
    since: int
    ease_after: int | None
    factor: float = 1.0
    modules: tuple[str, ...] = ()


class ActiveMitigations:
    """In force now."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.active: list[Mitigation] = []
        self._raised: Counter[str] = Counter()
        self._has_cast = False

    @property
    def can_raise_precision(self) -> bool:
        """Whether anything runs below fp32."""
        return self._parts.precision.dtype is not None or has_half_weights(self._parts.state.model)

    def lower_lr(self, factor: float, step: int, ease_after: int | None) -> str:
        if factor == 1.0:
            return ""
        self._parts.state.schedule.multiply(factor)
        self.active.append(Mitigation(kind="lr", since=step, ease_after=ease_after, factor=factor))
        return f"learning rate multiplied by {factor:g}, now {_rates(self._parts)}"

    def keep_modules(self, names: tuple[str, ...], step: int, ease_after: int | None) -> str:
        self._parts.islands.keep(*names)
        self._begin_scale_anew()
        wait = self._patience(",".join(names), ease_after)
        self.active.append(Mitigation(kind="modules", since=step, ease_after=wait, modules=names))
        return f"{_named(names)} in fp32 from now on"

    def keep_around(self, name: str, step: int, ease_after: int | None) -> str | None:
        """Keeps this module in fp32, or the smallest one around it that can be and is not yet; None if none can."""
        islands = self._parts.islands
        while name and (name in islands.names or not islands.can_keep(name)):
            name = name.rpartition(".")[0]
        if not name and self._parts.precision.dtype is not None:
            return self.leave_autocast(step, ease_after)
        is_possible = name not in islands.names and islands.can_keep(name)
        return self.keep_modules((name,), step, ease_after) if is_possible else None

    def raise_model(self, step: int, ease_after: int | None) -> str | None:
        """The whole model in fp32: out of the guard's autocast, or out of the program's own. None if it cannot be."""
        if self.can_raise_precision:
            return self.leave_autocast(step, ease_after)
        try:
            return self.keep_modules(self._parts.islands.outermost(), step, ease_after)
        except ValueError as error:  # as under DataParallel
            log.warning("the model cannot be kept in fp32: %s", error)
            return None

    def leave_autocast(self, step: int, ease_after: int | None) -> str:
        parts, cast = self._parts, self.cast()
        if parts.precision.dtype is not None:
            parts.precision.raise_to_fp32()
            wait = self._patience("", ease_after)
            self.active.append(Mitigation(kind="model", since=step, ease_after=wait))
        halves = f", {len(cast)} tensors cast" if cast else ""
        return f"the whole model in fp32 from now on{halves}"

    def cast(self) -> tuple[str, ...]:
        """Casts weights and optimizer state to fp32, in place. Returns the names of what was cast."""
        names = self._parts.state.cast_to_fp32_()
        self._has_cast = self._has_cast or bool(names)
        return names

    def are_due(self, step: int, last_trouble: int) -> bool:
        """Whether something has been in force without trouble for long enough."""
        return any(_is_due(measure, step, last_trouble) for measure in self.active)

    def ease(self, step: int, last_trouble: int) -> list[str]:
        """Takes back what is due; says what."""
        due = [measure for measure in self.active if _is_due(measure, step, last_trouble)]
        self.active = [measure for measure in self.active if measure not in due]
        return [self._take_back(measure) for measure in due]

    def _take_back(self, measure: Mitigation) -> str:
        if measure.kind == "lr":
            if not self._parts.state.schedule.give_back(measure.factor):
                return "the learning rate is the program's own again"
            return f"learning rate as scheduled again, {_rates(self._parts)}"
        if measure.kind == "modules":
            self._parts.islands.release(*measure.modules)
            return f"{_named(measure.modules)} in {self._parts.precision.name} again"
        self._parts.precision.return_from_fp32()
        self._begin_scale_anew()
        return f"the model in {self._parts.precision.name} again"

    def _patience(self, what: str, ease_after: int | None) -> int | None:
        """Twice as long each time that the same had to be raised again."""
        self._raised[what] += 1
        return None if ease_after is None else ease_after * 2 ** (self._raised[what] - 1)

    def _begin_scale_anew(self) -> None:
        """The loss scale went down for a reason that is gone."""
        if self._parts.precision.scaler is not None:
            self._parts.precision.scaler.begin_anew()

    def state_dict(self) -> dict[str, Any]:
        return {
            "active": [asdict(measure) for measure in self.active],
            "raised": dict(self._raised),
            "in_fp32": self._parts.precision.is_raised,
            "cast": self._has_cast,
            "lr_factor": self._parts.state.schedule.factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.active = [Mitigation(**{**measure, "modules": tuple(measure["modules"])}) for measure in state["active"]]
        self._raised = Counter(state["raised"])
        if state["cast"]:
            self.cast()
        self._parts.state.schedule.factor = state["lr_factor"]
        precision = self._parts.precision
        if state["in_fp32"] and not precision.is_raised:
            precision.raise_to_fp32()
        elif not state["in_fp32"] and precision.is_raised:
            precision.return_from_fp32()


def _is_due(measure: Mitigation, step: int, last_trouble: int) -> bool:
    return measure.ease_after is not None and step - max(measure.since, last_trouble) > measure.ease_after


def _named(modules: tuple[str, ...]) -> str:
    return " and ".join(name or "the model" for name in modules)


def _rates(parts: StepParts) -> str:
    return listed([f"{rate:.3g}" for rate in dict.fromkeys(parts.state.schedule.rates)])
