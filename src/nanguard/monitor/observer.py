"""The observer that watches for trouble to come: it probes some steps, and tells of warnings."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard import _compat, _compat_modes
from nanguard.monitor.agreement import Agreement
from nanguard.monitor.pace import FIRST_EVERY, Pace
from nanguard.monitor.probe import Measured, Probe, gathered, read
from nanguard.monitor.quantities import KINDS, Quantity, Samples
from nanguard.monitor.series import MOST_POINTS
from nanguard.monitor.signals import moment_lag, spectral_growth
from nanguard.monitor.warner import SCALE, Warner
from nanguard.records.alert import Alert
from nanguard.records.steps import Outcome
from nanguard.state.names import plain_name, unwrapped
from nanguard.state.readback import AsyncReadback, PendingCopy
from nanguard.step.observers import Observer
from nanguard.step.ranks import Ranks

log = logging.getLogger("nanguard")

_BUDGET = 0.005
_SAMPLE = 4096
"""So many elements of a weight stand for all of it."""

_FEWEST_ELEMENTS = 64
"""Of smaller gradients it says little how many elements are zero."""

_FEWEST_CALLS = 4
"""A module that is called so many times in one pass of the model is taken for a recurrent one."""

_MODULES_TOLD = 16


@dataclass(slots=True)
class _Pending:
    """What was measured of a step, on its way to the host; ``is_last`` if nothing more of this probe will follow."""

    step: int
    quantities: list[Measured]
    copy: PendingCopy
    places: list[int]
    is_last: bool


class Monitor(Observer):
    """Probes one step in ``probe_every``, and forecasts when a value will reach a limit. Changes nothing.

    ``probe_every="auto"`` chooses the number so that probes take ``budget`` of the time on average. ``kinds`` are the
    kinds of quantities that may raise a warning (see ``quantities.QuantityKind``). ``alerts`` has all that was told.
    Ordinary steps cost nothing but the loss, which the host knows anyway; no step syncs. A model that was compiled is
    not probed op by op: only its weights and gradients are. With ``probe_compiled=True`` the steps that are probed run
    without compilation, so that its ops are seen; such a step may differ in its last bits, and needs more memory.
    """

    def __init__(
        self,
        *,
        probe_every: int | Literal["auto"] = "auto",
        budget: float = _BUDGET,
        kinds: Collection[str] = KINDS,
        probe_compiled: bool = False,
    ) -> None:
        if probe_every != "auto" and not (isinstance(probe_every, int) and probe_every >= 1):
            raise ValueError(f"probe_every must be 'auto' or a whole number from 1, got {probe_every!r}")
        if not 0 < budget < 1:
            raise ValueError(f"budget must be a share of the step time between 0 and 1, got {budget!r}")
        self.alerts: list[Alert] = []
        self._warner = Warner(kinds)
        self._every = FIRST_EVERY if probe_every == "auto" else probe_every
        self._pace = Pace(budget) if probe_every == "auto" else None
        self._model: nn.Module | None = None
        self._note: Callable[..., None] = lambda event, **fields: None
        self._alerted: Callable[[Alert], None] = lambda alert: None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._vectors: dict[str, Tensor] = {}
        self._probe: Probe | None = None
        self._before: list[tuple[str, nn.Parameter, Tensor]] = []
        self._pending: list[_Pending] = []
        self._samples: dict[Quantity, tuple[float, float]] = {}
        self._left: dict[Quantity, str] = {}
        self._readback: AsyncReadback | None = None
        self._num_probes = 0
        self._next = 0
        self._works, self._traces, self._is_claimed = True, True, False
        self._probes_compiled = probe_compiled
        self._uncompiled: contextlib.AbstractContextManager[Any] | None = None
        self._agreement: Agreement | None = None
        self._wish = self._every
        self._to_submit: list[int] = []

    def __repr__(self) -> str:
        return "the early warning"

    def claim(self) -> bool:
        """True for the first caller: a monitor follows one optimizer."""
        is_free, self._is_claimed = not self._is_claimed, True
        return is_free

    def bind(
        self,
        model: nn.Module,
        note: Callable[..., None],
        *,
        optimizers: Sequence[Optimizer] = (),
        alerted: Callable[[Alert], None] = lambda alert: None,
        ranks: Ranks | None = None,
    ) -> None:
        """Watch this model. ``note(event, **fields)`` is told of warnings (``alert``) and of rooms (``headroom``).

        Of ``optimizers`` of Adam's kind the second moment is watched. ``alerted`` is called with each warning that was
        raised, updated or withdrawn. ``ranks`` are those that all have a monitor: they forecast alike.
        """
        self._model, self._note, self._alerted = unwrapped(model), note, alerted
        self._optimizers = tuple(optimizers)
        self._traces = not any(map(_compat.is_compiled, model.modules()))
        first = next(self._model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        if self._pace is not None:
            self._pace.use(device)
        self._agreement = None if ranks is None else Agreement(ranks, device)

    @property
    def probe_every(self) -> int:
        """One in so many steps is probed at the moment."""
        return self._every

    @property
    def probe_cost(self) -> float | None:
        """What a probe costs, in ordinary steps. None before the second probe, and if ``probe_every`` is a number."""
        return None if self._pace is None else self._pace.cost

    @property
    def active(self) -> tuple[Alert, ...]:
        """The warnings that stand, the most urgent first."""
        return self._warner.active

    def headroom(self) -> dict[str, float]:
        """The least room of each module in bits, by the last probe; least first."""
        return dict(sorted(self._warner.rooms().items(), key=lambda item: item[1]))

    # ---- the course of a step ------------------------------------------------------------------------------------

    def on_open(self, step: int) -> None:
        self._disarm()
        if _compat_modes.is_capturing():
            return
        if self._agreement is not None:
            self._agreement.collect()
        if self._before:
            self._post_updates(step)
        if self._pace is not None:
            self._wish = self._pace.begin(self._wish)
            self._every = self._wish if self._agreement is None else self._every
        if self._model is None or step < self._next:
            return
        self._next = step + self._every
        if self._agreement is not None:
            self._to_submit.append(step + 1)  # also if this rank cannot probe any more: the others wait for it
        if not self._works:
            return
        self._num_probes += 1
        if self._pace is not None:
            self._pace.probe()
        self._probe = Probe(self._model)
        if not self._traces and self._probes_compiled:
            self._uncompiled = _compat.without_compilation()
            self._uncompiled.__enter__()
        if self._traces or self._probes_compiled:
            self._probe.arm()  # a step of another optimizer may be probed at the moment

    @property
    def wants_measurement(self) -> bool:  # type: ignore[override]
        """Only in steps that are probed."""
        return self._probe is not None

    def on_measured(self, step: int, values: Tensor) -> None:
        probe = self._probe
        if self._agreement is not None:
            self._agreement.join()
        if probe is None or self._model is None:
            return
        self._disarm()
        if probe.failure is not None:
            self._works = False
            log.warning("steps cannot be probed any more: %s", probe.failure)
            return
        self._left = probe.left
        with torch.no_grad():
            self._measure_gradients(probe)
            self._post(step, probe.quantities, [values[0], *probe.values], is_last=not self._before)

    def on_heard(self, outcome: Outcome) -> None:
        reading = outcome.verdict.reading
        if outcome.went_back:
            self._pending.clear()
        if self._agreement is not None:
            for agreed in self._agreement.arrived():
                self._every = agreed.every
                self._look(agreed.step, agreed.samples)
        if not outcome.applied:  # its values say nothing about the steps to come
            self._pending = [each for each in self._pending if each.step != reading.step]
            self._before, self._samples = [], {}
            self._to_submit = [step for step in self._to_submit if step - reading.step not in (0, 1)]
            return
        self._warner.hear(reading.loss if self._agreement is None else reading.mean_loss)
        while self._pending and self._pending[0].step <= reading.step:
            self._take(self._pending.pop(0))
        if self._agreement is not None and self._to_submit and self._to_submit[0] <= reading.step:
            samples, self._samples = self._samples, {}
            self._agreement.submit(self._to_submit.pop(0), samples, self._wish)

    def on_close(self, num_steps: int, counts: Mapping[str, int]) -> None:
        self._disarm()

    def _disarm(self) -> None:
        if self._probe is not None:
            self._probe.disarm()
            self._probe = None
        if self._uncompiled is not None:
            self._uncompiled.__exit__(None, None, None)
            self._uncompiled = None

    # ---- weights and gradients -----------------------------------------------------------------------------------

    def _measure_gradients(self, probe: Probe) -> None:
        """How many elements of each gradient are not zero; and a sample of each weight before it is updated."""
        assert self._model is not None
        self._before = []
        for full_name, param in self._model.named_parameters():
            if param.grad is None or type(param.grad) is not Tensor or param.grad.layout is not torch.strided:
                continue
            module, _, name = plain_name(full_name).rpartition(".")
            if param.numel() >= _FEWEST_ELEMENTS:
                probe.quantities.append((Quantity(kind="gradient", module=module, op=name), 1))
                probe.values.append(param.grad.count_nonzero())
                self._measure_moment(probe, param, module, name)
            if probe.calls[module] >= _FEWEST_CALLS and param.dim() == 2 and param.shape[0] == param.shape[1]:
                self._measure_growth(probe, param, module, name)
            if param.dim() >= 2 and param.is_contiguous():  # biases pass through zero: their size says little
                self._before.append((full_name, param, param.detach().view(-1)[:_SAMPLE].clone()))

    def _measure_moment(self, probe: Probe, param: nn.Parameter, module: str, name: str) -> None:
        """The gradient against Adam's second moment, which is that of the steps before."""
        for optimizer in self._optimizers:
            state, betas = optimizer.state.get(param, {}), optimizer.defaults.get("betas")
            moment = state.get("exp_avg_sq")
            if _is_like(moment, param) and isinstance(betas, tuple) and "step" in state:
                assert param.grad is not None
                grad, moment = (each.detach().reshape(-1)[:_SAMPLE] for each in (param.grad, moment))
                probe.quantities.append((Quantity(kind="moment", module=module, op=name), 2))
                lag = moment_lag(grad, moment, state["step"], betas[1])
                probe.values += [lag, torch.full_like(lag, 1 / (1 - betas[1]))]

    def _measure_growth(self, probe: Probe, weight: nn.Parameter, module: str, name: str) -> None:
        """What a weight that is applied again and again makes of a vector in one pass of the model."""
        key, form = f"{module}.{name}", probe.forms.get(module, "")
        growth, self._vectors[key] = spectral_growth(weight.detach(), self._vectors.get(key))
        if form:
            probe.quantities.append((Quantity(kind="spectral", module=module, op=name, form=form), 1))
            probe.values.append(growth.double() ** probe.calls[module])

    @torch.no_grad()
    def _post_updates(self, step: int) -> None:
        """The update that the probed step has made, in relation to the weights."""
        before, self._before = self._before, []
        quantities, values = [], []
        for full_name, param, old in before:
            module, _, name = plain_name(full_name).rpartition(".")
            quantities.append((Quantity(kind="update", module=module, op=name), 1))
            new = param.detach().view(-1)[:_SAMPLE]
            values.append((new - old).double().norm() / old.double().norm())
        if values:
            self._post(step, quantities, [torch.zeros_like(values[0]), *values], is_last=True)

    # ---- to the host ---------------------------------------------------------------------------------------------

    def _post(self, step: int, quantities: list[Measured], values: list[Tensor], *, is_last: bool) -> None:
        vector, places = gathered(values)
        if self._readback is None:
            self._readback = AsyncReadback(vector.device)
        self._pending.append(_Pending(step, quantities, self._readback.post(vector), places, is_last))

    def _take(self, pending: _Pending) -> None:
        arrived = pending.copy.read()
        scale, *values = [arrived[place] for place in pending.places]
        self._samples |= read(pending.quantities, values, scale if 0 < scale < math.inf else 1.0)
        if 0 < scale < math.inf:
            self._samples[SCALE] = scale, 1.0
        if pending.is_last and self._agreement is None:
            samples, self._samples = self._samples, {}
            self._look(pending.step, samples)

    def _look(self, step: int, samples: Samples) -> None:
        for told in self._warner.look(step, samples):
            alert = replace(told, inside=self._holds(told))
            self.alerts.append(alert)
            self._note("alert", **alert.as_dict(), message=alert.message)
            self._alerted(alert)
        if self._num_probes % _stride(self._num_probes) == 0:
            rooms = list(self.headroom().items())[:_MODULES_TOLD]
            self._note("headroom", step=step, rooms={name: round(room, 2) for name, room in rooms})

    def _holds(self, alert: Alert) -> str:
        """The smallest module around that of a warning whose own result has more room than the value, by one bit."""
        full = [
            left
            for quantity, left in self._left.items()
            if quantity.form == alert.form
            and (left == alert.module or alert.module.startswith(f"{left}.") or not left)
            and self._warner.room_of(quantity) <= alert.room + 1
        ]
        return min(full, key=len).rpartition(".")[0] if full else alert.module

    # ---- to be saved ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is known of the past, as JSON can hold it."""
        return {"version": 1, "warner": self._warner.state_dict(), "every": self._every, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != 1:
            raise ValueError(f"the early warning reads state of version 1, got {state.get('version')!r}")
        self._warner.load_state_dict(state["warner"])
        self._every, self._next = state["every"], state["next"]


def _stride(number: int) -> int:
    """One in so many probes is told: a power of two that grows with the run."""
    return 1 << (number // (2 * MOST_POINTS)).bit_length()


def _is_like(moment: Any, param: nn.Parameter) -> bool:
    return isinstance(moment, Tensor) and moment.shape == param.shape and moment.device == param.device
