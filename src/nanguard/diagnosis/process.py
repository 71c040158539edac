"""Slow growth: name an overflow by what grew over many steps, not by the op that overflowed first."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.optim import SGD, Optimizer

from nanguard.diagnosis.exam import Exam, parameter_behind, size_of
from nanguard.diagnosis.look import largest
from nanguard.diagnosis.provenance import Leaf, Note, TraceEvent
from nanguard.diagnosis.state_faults import of_huge_parameter
from nanguard.diagnosis.trace import Trace
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Reading
from nanguard.records.words import counted
from nanguard.state.parameter_sizes import ParameterSizes
from nanguard.state.training_state import TrainingState
from nanguard.step.parts import StepParts

_OVERFLOWS = ("overflow_fp16", "overflow_any_precision", "exp_overflow")
_NOT_BY_SIZE = (
    *("all_labels_ignored", "ctc_inf", "custom_backward_bug", "label_out_of_domain", "nonfinite_constant"),
    *("std_of_single_element", "uninitialized_memory"),
)
"""Causes that weights of any size have."""

_GREW, _ROSE = 8.0, 50.0
"""Growth is at least this factor: of operands since a snapshot, and of readings over the last steps."""

_ABSURD, _SANE = 1e12, 1e4
"""Training does not make one parameter larger than the first while most others are below the second."""

_FIRST_STEPS, _JUMPED, _JUMPED_BY_RATE, _JUMPED_BY_BOLD_RATE, _BOLD = 3, 1000.0, 100.0, 5.0, 100.0
"""If parameters grow by this factor within so few steps from the start, the learning rate is to blame.

The second factor is enough if the learning rate is 1 or more, the third if it is also ``_BOLD`` times the default.
"""

_FINITE_BEFORE = "with the weights from before, the same step is finite"

_EARLY_STEPS = 20
"""So many steps count if the learning rate was 1 or more in all of them, and weights grew by the first factor."""

_LARGEST_STEP = 10.0
"""Adam changes a weight by about one learning rate. If one step makes it more than this many, gradients explode."""

_LARGEST_NORM = 1e3
"""Unless the first gradients were larger than this: then they explode by themselves."""

_RATE_ROSE = 100.0
"""A learning rate that rises by this factor from one step to the next is to blame for what explodes after it."""

_PRODUCTS = frozenset(("bmm", "baddbmm", "mm", "matmul", "addmm", "mul", "sum"))


def as_a_process(exam: Exam, diagnosis: Diagnosis, event: TraceEvent) -> Diagnosis:
    """The diagnosis of the growth behind an overflow, or the same diagnosis if there is none."""
    if diagnosis.phase not in ("forward", "backward", "buffer"):
        return diagnosis
    jump = None if diagnosis.cause in _NOT_BY_SIZE else _jump(exam)
    if jump is not None:
        by_rate = _of_learning_rate(diagnosis, jump)
        return by_rate if jump.is_by_rate else replace(by_rate, because=f"{by_rate.because}; {_FINITE_BEFORE}")
    if diagnosis.cause not in _OVERFLOWS:
        return diagnosis
    stepped = _stepped_far(exam)
    if stepped is not None:
        return _of_learning_rate(diagnosis, stepped)
    huge = _huge_parameter(exam, event)
    if huge is not None:
        return replace(of_huge_parameter(exam, *huge), op=diagnosis.op, operands=diagnosis.operands)
    grown = _growth(exam, event)
    norms = [max(reading.norms) for reading in exam.past.readings if reading.norms]
    rises = _rises(norms) or _rises([abs(reading.mean_loss) for reading in exam.past.readings])
    if grown is not None and _is_attention(event, exam.run.trace):
        then, now, since = grown
        because = f"queries and keys have grown from {then:.3g} to {now:.3g} since step {since:,}"
        return replace(diagnosis, cause="attention_logit_growth", because=f"{because}; {diagnosis.because}")
    if not rises and (grown is None or diagnosis.cause != "overflow_any_precision"):
        return diagnosis
    told = []
    rise = _rise_of_rate(exam.past.readings)
    if rise is not None:
        told.append(f"the learning rate rose from {rise[0]:.3g} to {rise[1]:.3g} at step {rise[2]:,}")
    if grown is not None:
        told.append(f"operands of {event.note.op} grew from {grown[0]:.3g} to {grown[1]:.3g} since step {grown[2]:,}")
    if rises and norms:
        told.append("gradient norms of the last steps: " + ", ".join(f"{norm:.3g}" for norm in norms[-5:]))
    return replace(
        diagnosis,
        cause="gradient_explosion" if rise is None else "learning_rate_too_high",
        module=event.note.home or diagnosis.module,  # which of its ops overflows first is an accident
        because="; ".join(told) or "losses have risen from step to step",
        samples=(),  # it took many steps
        evidence=(*diagnosis.evidence, diagnosis.because),
    )


def as_computed_data(exam: Exam, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis of data that no loader gave, if the first steps have made parameters explode: they are computed.

    Such as samples that the program draws with the model itself, or running statistics of another network.
    """
    is_computed = diagnosis.cause == "input_nonfinite" and not exam.is_from_loader
    jump = _jump(exam) if is_computed or diagnosis.cause == "buffer_corrupted" else None
    if jump is None or jump.growth < _JUMPED:
        return diagnosis
    found = _of_learning_rate(diagnosis, jump)
    return found if diagnosis.is_line_traced else replace(found, source=None, is_line_traced=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """A parameter that the first steps, ``num`` of them, have made grow from ``then`` to ``now``."""

    state: TrainingState
    name: str
    then: float
    now: float
    num: int
    first_norm: float
    rates: Sequence[float]

    @property
    def growth(self) -> float:
        """The factor."""
        return self.now / (max(self.then, 1e-3) if self.then else 1.0)  # what begins with 0, as biases do, has no size

    @property
    def rate(self) -> float:
        """The largest learning rate of these steps; that of now if the readings do not know it."""
        now = [group.get("lr", 0.0) for group in self.state.optimizer_of(self.name).param_groups]
        return max(map(float, self.rates or now), default=0.0)

    @property
    def is_by_rate(self) -> bool:
        """Whether the learning rate is to blame."""
        if self.num > _FIRST_STEPS:
            rate = min([self.rate, *self.rates])
            return rate >= 1 and self.growth >= _JUMPED and self.now <= _LARGEST_STEP * rate * self.num
        if self.growth < _JUMPED_BY_BOLD_RATE or self.growth >= _JUMPED or self.rate < 1:
            return self.growth >= _JUMPED
        return self.growth >= (_JUMPED_BY_BOLD_RATE if self.rate >= _BOLD * self.usual_rate else _JUMPED_BY_RATE)

    @property
    def usual_rate(self) -> float:
        """The default of the optimizer, 0 if it has none."""
        usual = inspect.signature(type(self.state.optimizer_of(self.name))).parameters.get("lr")
        return float(usual.default) if usual is not None and isinstance(usual.default, (int, float)) else 0.0

    @property
    def may_be_by_rate(self) -> bool:
        """Whether the learning rate is to blame if the step is finite with the weights from before these steps."""
        is_bold = 0 < _BOLD * self.usual_rate <= self.rate
        return self.num <= _FIRST_STEPS and is_bold and self.growth >= _JUMPED_BY_BOLD_RATE

    @property
    def may_overflow_by_rate(self) -> bool:
        """Whether the learning rate is to blame for an overflow: weights are as large as its steps make them."""
        rate = min([self.rate, *self.rates])
        is_of_steps = rate <= self.now <= _LARGEST_STEP * rate * self.num
        return rate >= 1 and is_of_steps and self.growth >= _JUMPED_BY_RATE


def _stepped_far(exam: Exam) -> Jump | None:
    """The parameter that steps of 1 or more have made largest, of this network or else of another. None if none has."""
    past = exam.past
    own = _jumps(exam.parts, past.first_sizes, past.num_applied, past.readings)
    for jumps in (own, _jumps_of(exam.parts.other_parts())):
        far = max((jump for jump in jumps if jump.may_overflow_by_rate), key=lambda jump: jump.growth, default=None)
        if far is not None:
            return far
    return None


def _jump(exam: Exam) -> Jump | None:
    """The parameter that has grown most, of this network or of another one that the program trains. None if none."""
    past, parts = exam.past, exam.parts
    own = list(_jumps(parts, past.first_sizes, past.num_applied, past.readings))
    best = max([jump for jump in own if jump.is_by_rate], key=lambda jump: jump.growth, default=None)
    best = max(filter(None, (best, jumped(parts.other_parts()))), key=lambda jump: jump.growth, default=None)
    maybe = [jump for jump in own if jump.may_be_by_rate]
    if best is None and maybe and _is_finite_on_older_weights(exam):
        return max(maybe, key=lambda jump: jump.growth)
    return best


def jumped(networks: Iterable[StepParts]) -> Jump | None:
    """The parameter of these networks that a learning rate has made grow most in the first steps. None if none has."""
    found = (jump for jump in _jumps_of(networks) if jump.is_by_rate)
    return max(found, key=lambda jump: jump.growth, default=None)


def _jumps_of(networks: Iterable[StepParts]) -> Iterator[Jump]:
    """How the parameters of these networks have grown in their first steps."""
    for parts in networks:
        yield from _jumps(parts, parts.first_sizes, parts.journal.counts["applied"], parts.journal.recent)


def of_exploded_weights(networks: Iterable[StepParts]) -> Diagnosis:
    """The diagnosis of what a program has computed, without a record of it, of weights that a rate made explode."""
    unknown = Diagnosis(phase="forward", cause="unknown", because="what computed it was not recorded")
    jump = jumped(networks)
    return unknown if jump is None else replace(_of_learning_rate(unknown, jump), evidence=())


def _jumps(parts: StepParts, sizes: ParameterSizes | None, num: int, readings: Sequence[Reading]) -> Iterator[Jump]:
    """How the parameters have grown in the first steps; nothing after these."""
    if sizes is None or not 0 < num <= _EARLY_STEPS:
        return
    before, norm = sizes.read(), next((max(reading.norms) for reading in readings if reading.norms), 0.0)
    rates = [rate for reading in readings for rate in reading.lrs if rate is not None]
    for name, parameter in parts.state.parameters().items():
        then, now = before.get(name, math.nan), largest(parameter.detach())
        yield Jump(state=parts.state, name=name, then=then, now=now, num=num, first_norm=norm, rates=rates)


def _is_finite_on_older_weights(exam: Exam) -> bool:
    if exam.replay is None or exam.past.older_weights is None:
        return False
    with exam.past.older_weights() as there_are:
        return there_are and exam.replay.watched().is_finite


def _of_learning_rate(diagnosis: Diagnosis, jump: Jump) -> Diagnosis:
    optimizer, num, rate = jump.state.optimizer_of(jump.name), jump.num, jump.rate
    if rate < 1 and jump.first_norm > _LARGEST_NORM:
        return diagnosis
    because = f"{jump.name} grew from {jump.then:.3g} to {jump.now:.3g} in {counted(num, 'step')}"
    how = f"of {type(optimizer).__name__} with lr={rate:g}" if rate else "by the program's own update"
    decay = _overshooting_decay(optimizer)
    if decay is not None:
        how += f" and weight_decay={decay[0]:g}: the decay alone multiplies weights by {decay[1]:.3g} in each step"
    return replace(
        diagnosis,
        cause="learning_rate_too_high" if decay is None else "weight_decay_too_high",
        because=f"{because} {how}",
        samples=(),
        evidence=(*diagnosis.evidence, diagnosis.because),
    )


def _overshooting_decay(optimizer: Optimizer) -> tuple[float, float] | None:
    """A weight decay that is absurd itself and makes weights larger, and by which factor. None if there is none."""
    for group in optimizer.param_groups:
        rate, decay = float(group.get("lr", 0.0)), float(group.get("weight_decay") or 0.0)
        is_applied = isinstance(optimizer, SGD) or group.get("decoupled_weight_decay")
        if is_applied and decay > 1 and rate * decay > 2:
            return decay, 1 - rate * decay
    return None


def _rise_of_rate(readings: Sequence[Reading]) -> tuple[float, float, int] | None:
    """The learning rate before and after it rose at once, and the first step with the new one. None if it did not."""
    rates = [(reading.step, max(known)) for reading in readings if (known := [r for r in reading.lrs if r is not None])]
    for (_, before), (step, after) in itertools.pairwise(rates):
        if before > 0 and after >= _RATE_ROSE * before:
            return before, after, step
    return None


def _huge_parameter(exam: Exam, event: TraceEvent) -> tuple[str, float] | None:
    """A parameter of absurd size that was so from the start, and its size: of the op, or of one before it."""
    parameters = exam.parts.state.parameters()
    leaves = {leaf.name: leaf for note in _behind(event.note) for leaf in note.parents if isinstance(leaf, Leaf)}
    sizes = {leaf.name: size_of(leaf) for leaf in leaves.values() if leaf.name.startswith("parameter ")}
    for known, size in sorted(sizes.items(), key=lambda each: -each[1]):
        name = known.partition(" ")[2]
        others = [largest(p) for other, p in parameters.items() if other != name]
        if size <= _ABSURD or (others and statistics.median(others) > _SANE):
            continue
        with contextlib.ExitStack() as stack:
            older = exam.past.older_weights
            if older is not None and stack.enter_context(older()) and largest(parameters[name]) < size / _GREW:
                continue
        return name, size
    return None


def _behind(note: Note) -> Iterator[Note]:
    """The op, and those of the forward pass that its operands come from."""
    todo, seen = [note], {id(note)}
    while todo:
        each = todo.pop()
        yield each
        new = [parent for parent in each.parents if isinstance(parent, Note) and id(parent) not in seen]
        seen.update(map(id, new))
        todo += new


def _growth(exam: Exam, event: TraceEvent) -> tuple[float, float, int] | None:
    """The size of the operands with the weights of the oldest snapshot, their size now, and the snapshot's step."""
    past, replay, note = exam.past, exam.replay, event.note
    if replay is None or past.older_weights is None or past.oldest_step is None:
        return None
    if exam.pending.step - past.oldest_step < 3:
        return None
    with past.older_weights() as there_are:
        before = replay.watched() if there_are else None
    if before is None or not before.is_finite:
        return None
    where = note.phase, note.op, note.place, note.module
    same = [each for each in before.trace.notes if (each.phase, each.op, each.place, each.module) == where]
    then = max((size_of(parent) for each in same for parent in each.parents), default=0.0)
    now = max((size_of(parent) for parent in note.parents), default=0.0)
    return (then, now, past.oldest_step) if same and now > _GREW * max(then, 1e-30) else None


def _is_attention(event: TraceEvent, trace: Trace) -> bool:
    """True for a product of two non-parameters whose result goes into a softmax."""
    note = event.note
    if "dot_product" in note.op:
        return True
    if note.op not in _PRODUCTS or any(parameter_behind(parent) is not None for parent in note.parents):
        return False
    line = {id(note)}
    for later in trace.notes[note.index + 1 :]:
        if any(id(parent) in line for parent in later.parents):
            if "softmax" in later.op:
                return True
            if later.phase != "forward" or len(line) > 64:
                return False
            line.add(id(later))
    return False


def _rises(values: list[float]) -> bool:
    """True if the last values are far above the first ones and do not fall."""
    values = [value for value in values if math.isfinite(value) and value > 0]
    if len(values) < 3:
        return False
    early = statistics.median(values[: max(2, len(values) // 2)])
    return values[-1] > _ROSE * early and values[-1] >= values[-2] / 4
