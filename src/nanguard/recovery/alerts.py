"""Which warnings stand, and when the policy is to be asked about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanguard.policy.policy import Policy
from nanguard.records.alert import Alert
from nanguard.records.steps import Outcome
from nanguard.step.pending import LAG


@dataclass(frozen=True, slots=True)
class _Standing:
    """``due`` is the step before which the policy is asked, None if it is not to be asked again."""

    alert: Alert
    due: int | None


class StandingAlerts:
    """The warnings that a ``Monitor`` has raised and not withdrawn, and what was done about warnings so far.

    The policy is asked when a warning is raised, when its forecast comes nearer, and again whenever half of the steps
    that were left have passed. The moment is fixed, so that both modes, and all ranks, ask at the same one. If no rung
    answers warnings, none is kept.
    """

    def __init__(self, policy: Policy) -> None:
        self._is_wanted = policy.answers_alerts
        self._standing: dict[int, _Standing] = {}
        self.history: list[Outcome] = []

    def hear(self, alert: Alert) -> None:
        """A warning was raised, updated or withdrawn."""
        if not self._is_wanted:
            return
        before = self._standing.get(alert.number)
        if alert.state == "withdrawn":
            self._standing.pop(alert.number, None)
        elif before is None or alert.crossing < before.alert.crossing:
            self._standing[alert.number] = _Standing(alert, alert.step + LAG)
        else:
            self._standing[alert.number] = _Standing(alert, _half_way(alert, alert.step + LAG))

    @property
    def has_any(self) -> bool:
        return bool(self._standing)

    def are_due(self, step: int) -> bool:
        return any(each.due is not None and each.due <= step for each in self._standing.values())

    def take_due(self, step: int) -> list[Alert]:
        """The warnings to ask the policy about before this step, the most urgent first."""
        due = [each.alert for each in self._standing.values() if each.due is not None and each.due <= step]
        for alert in due:
            self._standing[alert.number] = _Standing(alert, _half_way(alert, step))
        return sorted(due, key=lambda alert: (alert.crossing, alert.number))

    def forget(self) -> None:
        """The run is elsewhere now."""
        self._standing.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "standing": [{"alert": each.alert.as_dict(), "due": each.due} for each in self._standing.values()],
            "history": [outcome.as_dict() for outcome in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        standing = [_Standing(Alert.from_dict(each["alert"]), each["due"]) for each in state["standing"]]
        self._standing = {each.alert.number: each for each in standing}
        self.history = [Outcome.from_dict(each) for each in state["history"]]


def _half_way(alert: Alert, step: int) -> int | None:
    left = alert.crossing - step
    return step + max(LAG, left // 2) if left > LAG else None
