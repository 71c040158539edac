"""One traced run of a step: its trace, and what was non-finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nanguard.diagnosis.look import look
from nanguard.diagnosis.plans import MEMORY
from nanguard.diagnosis.provenance import BUFFER, OTHER, PARAMETER, STATE, Note, TraceEvent
from nanguard.diagnosis.trace import Trace
from nanguard.source.frames import Place
from nanguard.state.nonfinite import nonfinite_names
from nanguard.state.training_state import TrainingState
from nanguard.step.parts import StepParts


@dataclass(slots=True)
class WatchedRun:
    """``found`` says what was non-finite: loss, gradients, buffers, parameters or update; ``""`` if nothing was.

    ``names`` are the names of the non-finite tensors, ``ends`` the events that made them so, ``hooks`` the lines and
    modules that registered hooks on gradients. ``replaced`` are tensors that modules held in attributes, and that the
    run has replaced: the step has done the same before, so they are not what it began with.
    """

    trace: Trace
    found: str = ""
    names: tuple[str, ...] = ()
    ends: tuple[TraceEvent, ...] = ()
    microbatch: int = 0
    loss: Note | None = None
    hooks: list[tuple[Place, str]] = field(default_factory=list)
    replaced: dict[int, str] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        return not self.found

    def look_at_loss(self, loss: Tensor) -> None:
        made = self.trace.note_of(loss)
        self.loss = made if isinstance(made, Note) else None
        if not look(loss).is_finite:
            self.found, self.ends = "loss", self.trace.events_of(loss)

    def look_at_end(self) -> None:
        """At the last op that made a NaN, or an Inf that is not a mask: the program raised instead of giving a loss.

        What was in new memory does not count once something was written to it: dropout fills it with a mask.
        """
        bad = [event for event in self.trace.events if event.has_nan or (event.has_posinf and not event.is_mask)]
        while bad and bad[-1].note.op in MEMORY and self.trace.is_overwritten(bad[-1]):
            bad.pop()
        if bad:
            self.found, self.ends = "loss", (bad[-1],)

    def look_at_gradients(self, parts: StepParts) -> None:
        """Of what an optimizer owns."""
        owned = {id(p) for group in parts.skippable.groups() for p in group}
        grads = {n: p.grad for n, p in parts.state.parameters().items() if p.grad is not None and id(p) in owned}
        bad = nonfinite_names(grads)
        if bad:
            self.found, self.names = "gradients", bad
            self.ends = tuple(event for name in bad for event in self.trace.events_of(grads[name]))

    def look_at_writes(self, state: TrainingState) -> None:
        """At the buffers and parameters that the program itself has written to."""
        for kind, tensors in (("buffer", state.buffers()), ("parameter", state.parameters())):
            written = {n: tensor for n, tensor in tensors.items() if f"{kind} {n}" in self.trace.writes}
            if self.is_finite:
                self._look_at(f"{kind}s", written)

    def look_at_update(self, state: TrainingState) -> None:
        states = {name: tensor for name, _, tensor in state.optimizer_states()}
        for tensors in (state.parameters(), states):
            if self.is_finite:
                self._look_at("update", tensors)

    def _look_at(self, found: str, tensors: Mapping[str, Tensor]) -> None:
        bad = [name for name, tensor in tensors.items() if not look(tensor).is_finite]
        ends = [event for name in bad for event in self.trace.events_of(tensors[name]) if event.kind != "outside"]
        if ends:
            self.found, self.names, self.ends = found, tuple(bad), tuple(ends)


def introduce(trace: Trace, state: TrainingState) -> None:
    """Names what was there before the step."""
    for name, tensor in state.buffers().items():
        trace.know(f"buffer {name}", tensor, BUFFER, watched=True)
    for name, tensor in state.parameters().items():
        trace.know(f"parameter {name}", tensor, PARAMETER, watched=True, owner=name)
    introduce_states(trace, state)


def introduce_others(trace: Trace, state: TrainingState, others: Iterable[TrainingState]) -> set[int]:
    """Names what other optimizers train, which a step may use. Returns the identities of these tensors."""
    own = {id(tensor) for tensor in (*state.parameters().values(), *state.buffers().values())}
    found: set[int] = set()
    for other in others:
        for kind, tensors in (("parameter", other.parameters()), ("buffer", other.buffers())):
            for name, tensor in tensors.items():
                if id(tensor) not in own | found:
                    found.add(id(tensor))
                    trace.know(f"foreign {kind} {name}", tensor, OTHER)
    return found


def introduce_states(trace: Trace, state: TrainingState) -> None:
    for name, owner, tensor in state.optimizer_states():
        trace.know(f"state {name}", tensor, STATE, watched=True, owner=owner)


def tensors_by_kind(state: TrainingState) -> dict[str, Tensor]:
    """What ``introduce`` names, by the same names."""
    return {
        **{f"buffer {name}": tensor for name, tensor in state.buffers().items()},
        **{f"parameter {name}": tensor for name, tensor in state.parameters().items()},
        **{f"state {name}": tensor for name, _, tensor in state.optimizer_states()},
    }
