"""Runs a saved step again under the same conditions, and compares the diagnosis with the recorded one."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nanguard
from nanguard.diagnosis.taped import microbatches
from nanguard.errors import ProtocolError, ReplayError
from nanguard.hosted.settings import Settings
from nanguard.incidents.environment import as_then
from nanguard.incidents.reader import Bundle
from nanguard.records.diagnosis import Diagnosis
from nanguard.replay.calls import CalledModules, call_again, is_calls
from nanguard.replay.entry import BuiltProgram, told
from nanguard.replay.runs import header_of
from nanguard.standalone import diagnose_step
from nanguard.state.islands import Islands
from nanguard.state.names import named_weights, plain_name, unwrapped
from nanguard.state.rng import RngState
from nanguard.state.snapshots.codec import DTYPES
from nanguard.step.pending import LossFn, Microbatch
from nanguard.step.precision import NAMES, LossScale

COMPARED = ("cause", "op", "module")

# Only the steps before distinguish these from a plain overflow. They name the enclosing module.
_BY_HISTORY = ("attention_logit_growth", "gradient_explosion", "learning_rate_too_high", "weight_decay_too_high")
_DAMAGE = ("parameter_corrupted", "buffer_corrupted", "optimizer_state_corrupted")
_OVERFLOWS = ("overflow_fp16", "overflow_any_precision", "exp_overflow")


_WITHOUT_TAPE = "only the calls of the model were run again, not those around it"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """``diagnosis`` is the new one, None if the step is finite. ``differs`` lists differences from the recorded one."""

    recorded: Diagnosis | None
    diagnosis: Diagnosis | None
    differs: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def status(self) -> int:
        """0 if it was reproduced, else 1."""
        return 1 if self.differs else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "reproduced": not self.differs,
            "differs": list(self.differs),
            "notes": list(self.notes),
            "recorded": None if self.recorded is None else self.recorded.as_dict(),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.as_dict(),
        }


@dataclass(kw_only=True)
class Stage:
    """A step that is ready to run again. ``notes`` say what is not as it was in the run."""

    bundle: Bundle
    program: BuiltProgram
    device: torch.device
    precision: Any
    loss_scale: LossScale | None
    batches: dict[int, Any] = field(default_factory=dict)
    states: dict[int, RngState] = field(default_factory=dict)
    taped: list[Microbatch] = field(default_factory=list)
    """The backward passes of the step, with the torch calls that lead to each, if the bundle has them."""
    notes: list[str] = field(default_factory=list)

    def settings(self) -> contextlib.AbstractContextManager[None]:
        """With the switches of torch as in the run."""
        flags = self.bundle.facts["environment"].get("flags")
        return as_then(flags if isinstance(flags, dict) else {})

    @contextlib.contextmanager
    def conditions(self, place: int) -> Iterator[None]:
        """Sets random states, autocast and settings as before a micro-batch. Settings are restored afterwards."""
        enabled, dtype = _autocast(self.bundle, place)
        with self.settings():
            if place in self.states:
                try:
                    self.states[place].restore(self.device)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise ReplayError(f"the random states of {self.bundle.path} cannot be set: {error}") from None
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield


def prepare(bundle: Bundle, program: BuiltProgram) -> Stage:
    """Loads the saved weights, and sets modes and fp32 modules as in the run. Raises ``ReplayError``."""
    first = next(program.model.parameters(), None)
    if first is None:
        raise ReplayError("the model of the entry has no parameters")
    precision = bundle.facts["environment"].get("precision")
    if precision not in NAMES:
        raise ReplayError(f"{bundle.path} does not say in what precision the step ran: {precision!r:.40}")
    stage = Stage(
        bundle=bundle,
        program=program,
        device=first.device,
        precision=precision,
        loss_scale=_loss_scale(bundle),
    )
    stage.notes += program.notes
    _load_weights(stage)
    _set_modes(stage)
    _find_tape(stage)
    _find_batches(stage)
    if isinstance(program.model, CalledModules):
        stage.batches = {}
    if not stage.taped:
        if program.is_of_run and not all(map(is_calls, stage.batches.values())):
            raise ReplayError(
                "a framework called the model, and its batch alone is saved: give a function that builds model and "
                "loss, --entry train.py:build"
            )
        _find_states(stage)
    _compare_surroundings(stage)
    if program.loss_fn is None:
        if not all(map(is_calls, stage.batches.values())):
            if not stage.taped:
                raise ReplayError("the entry returns only a model: let it return (model, loss_fn)")
            stage.batches = {}
        stage.program = replace(program, loss_fn=call_again())
    return stage


def replay(stage: Stage) -> Replayed:
    """Runs the micro-batches until one is non-finite, and diagnoses it with the recorded depth."""
    recorded = stage.bundle.diagnosis
    optimizer, loss_fn = _optimizer(stage), stage.program.loss_fn or call_again()
    found = _examine_tape(stage, optimizer)
    for place in stage.batches if found is None else ():
        with stage.conditions(place):
            found = _examine(stage, loss_fn, stage.batches[place], optimizer, stage.loss_scale)
        if found is not None:
            break
    if found is not None and recorded is not None and _is_known_by_history(recorded, found):
        stage.notes.append(f"the run called it {recorded.words} because of the steps before; alone it is {found.words}")
    if found is not None and recorded is not None and _is_same_damage(recorded, found):
        stage.notes.append("the saved weights are damaged; that happened before this step and cannot be replayed")
    return Replayed(
        recorded=recorded,
        diagnosis=found,
        differs=tuple(_differences(recorded, found)),
        notes=tuple(stage.notes),
    )


def _examine_tape(stage: Stage, optimizer: Any) -> Diagnosis | None:
    """Makes the torch calls of the step again. If they cannot be made here, the notes say so."""
    blamed = None if stage.bundle.diagnosis is None else stage.bundle.diagnosis.microbatch
    passes = [stage.taped[blamed]] if blamed is not None and blamed < len(stage.taped) else stage.taped
    is_of_program = stage.program.is_of_run or header_of(stage.bundle).get("script")
    scale = None if is_of_program else stage.loss_scale  # what a program scales by is among the calls
    try:
        for micro in passes:
            enabled, dtype = micro.autocast
            with stage.settings(), torch.autocast(stage.device.type, dtype=dtype, enabled=enabled):
                found = _examine(stage, micro.loss_fn, micro.batch, optimizer, scale)
            if found is not None:
                return replace(found, capture="tape")
    except ReplayError as error:
        if not stage.batches:
            raise
        stage.notes.append(f"{_WITHOUT_TAPE}: {error}")
    return None


def _examine(
    stage: Stage, loss_fn: LossFn, batch: Any, optimizer: Any, loss_scale: LossScale | None
) -> Diagnosis | None:
    recorded, script = stage.bundle.diagnosis, header_of(stage.bundle).get("script")
    try:
        return diagnose_step(
            stage.program.model,
            loss_fn,
            batch,
            optimizer,
            precision=stage.precision,
            loss_scale=loss_scale,
            depth="full" if recorded is None else recorded.depth,
            fp32_fix=Settings(script=script).fp32_fix if isinstance(script, str) and script else None,
        )
    except ProtocolError as error:
        if "nothing to diagnose" in str(error):
            return None
        raise ReplayError(f"the step cannot be run: {error}") from error
    except ReplayError:
        raise
    except Exception as error:
        raise ReplayError(f"the step raised {told(error)}") from error


def _optimizer(stage: Stage) -> Any:
    """The optimizer, if its update is to be examined."""
    recorded = stage.bundle.diagnosis
    in_update = "update" in stage.bundle.outcome.verdict.reading.found
    in_update = in_update or (recorded is not None and recorded.phase == "optimizer")
    if in_update and stage.program.optimizer is None:
        raise ReplayError("the fault is in the optimizer update: let the entry return (model, optimizer, loss_fn)")
    return stage.program.optimizer if in_update else None


def _differences(then: Diagnosis | None, now: Diagnosis | None) -> Iterator[str]:
    if now is None:
        again = "" if then is None or then.repeats else ", as it was when the run tried it again"
        yield f"the step is finite here{again}"
    elif then is not None and not any(is_same(then, now) for is_same in _THE_SAME):
        for name in COMPARED:
            before, after = getattr(then, name), getattr(now, name)
            if before != after:
                yield f"{name}: {before or 'none'} in the run, {after or 'none'} here"


def _is_known_by_history(then: Diagnosis, now: Diagnosis) -> bool:
    """Whether it is the same overflow, for which the run had another name because it knew the steps before."""
    is_inside = f"{now.module}.".startswith(f"{then.module}.") or not then.module
    is_overflow = now.cause in _OVERFLOWS or then.cause in ("learning_rate_too_high", "weight_decay_too_high")
    return then.cause in _BY_HISTORY and is_overflow and then.op == now.op and is_inside


def _is_same_damage(then: Diagnosis, now: Diagnosis) -> bool:
    """Whether the state of the same module was non-finite before the step; the run recorded no op for it."""
    return then.cause in _DAMAGE and not then.op and now.phase in ("parameter", "buffer") and then.module == now.module


def _is_saved_as_data(then: Diagnosis, now: Diagnosis) -> bool:
    """Whether the same line uses a tensor of a module that is not trained: what was saved of it is a plain tensor."""
    was_held = then.phase in ("parameter", "buffer") and then.is_line_traced and then.source is not None
    is_same_use = now.source is not None and then.source is not None and then.source.line == now.source.line
    return was_held and now.cause == "input_nonfinite" and is_same_use and then.op == now.op


_THE_SAME = (_is_known_by_history, _is_same_damage, _is_saved_as_data)
"""Ways in which a diagnosis may have another name and be the same."""


def _loss_scale(bundle: Bundle) -> LossScale | None:
    """The loss scale of the step, divided by its divisor for accumulation."""
    scale = bundle.outcome.verdict.reading.scale
    if scale is None:
        return None
    try:
        scale = scale / max(1, bundle.facts["divisor"])
        return LossScale(initial=scale, floor=min(1.0, scale))
    except (ValueError, OverflowError) as error:
        raise ReplayError(f"{bundle.path} has an invalid loss scale: {error}") from None


def _autocast(bundle: Bundle, place: int) -> tuple[bool, torch.dtype]:
    micros = bundle.facts["microbatches"]
    told_of = micros[place] if place < len(micros) else None
    pair = told_of.get("autocast") if isinstance(told_of, dict) else None
    if not isinstance(pair, list) or len(pair) != 2 or pair[0] is not True or pair[1] not in ("bfloat16", "float16"):
        return False, torch.bfloat16
    return True, DTYPES[pair[1]]


def _load_weights(stage: Stage) -> None:
    weights = stage.bundle.weights()
    if not weights:
        why = stage.bundle.why_not("weights")
        whose = "program" if stage.program.notes else "entry"
        stage.notes.append(f"the bundle holds no weights ({why}): those of the {whose} are used")
        return
    live = named_weights(stage.program.model)
    missing = [name for name in live if name not in weights]
    other = [
        f"{name} is {list(live[name].shape)} there and {list(weights[name].shape)} in the bundle"
        for name in live
        if name in weights and live[name].shape != weights[name].shape
    ]
    if missing or other:
        why = "; ".join([*(f"{name} is not in the bundle" for name in missing[:3]), *other[:3]])
        raise ReplayError(f"the weights of {stage.bundle.path} do not fit the model of the entry: {why}")
    surplus = [name for name in weights if name not in live]
    if surplus:
        stage.notes.append(f"the model has no {', '.join(surplus[:3])}, which the bundle has")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])


def _set_modes(stage: Stage) -> None:
    facts, model = stage.bundle.facts, stage.program.model
    in_eval = set(facts["eval_modules"])
    model.train("" not in in_eval)
    for name, module in unwrapped(model).named_modules():
        module.training = plain_name(name) not in in_eval
    if facts["kept_fp32"]:
        try:
            Islands(model, stage.device.type).keep(*facts["kept_fp32"])
        except ValueError as error:
            raise ReplayError(f"modules that ran in fp32 cannot be set to fp32: {error}") from None


def _find_batches(stage: Stage) -> None:
    bundle, diagnosis = stage.bundle, stage.bundle.diagnosis
    blamed = None if diagnosis is None else diagnosis.microbatch
    batches = bundle.batches(stage.device)
    if batches:
        stage.batches = dict(enumerate(batches))
        if blamed is not None and blamed in stage.batches:
            stage.batches = {blamed: stage.batches[blamed]}
        stage.notes += [f"not as in the run: {note}" for note in bundle.facts["notes"][:3]]
        return
    why = bundle.why_not("batch")
    samples = bundle.samples(stage.device)
    if samples is not None:
        stage.batches = {blamed or 0: samples}
        stage.notes.append(f"the bundle holds no whole batch ({why}): only the samples that caused the fault are used")
        return
    if stage.program.batches is None:
        raise ReplayError(
            f"{bundle.path} holds no batch ({why}), and the entry returns none: let it return "
            "(model, optimizer, batches, loss_fn), or run with capture='batch'"
        )
    position = bundle.facts.get("batch")
    position = position if isinstance(position, int) else bundle.facts["step"]
    try:
        batch = next(itertools.islice(iter(stage.program.batches), position, None))
    except StopIteration:
        raise ReplayError(f"the batches of the entry end before batch {position}, which failed") from None
    except Exception as error:
        raise ReplayError(f"the batches of the entry raised {told(error)}") from error
    stage.batches = {0: batch}
    stage.notes.append(f"the bundle holds no batch ({why}): batch {position} of the entry is used")


def _find_tape(stage: Stage) -> None:
    """The torch calls of the step, if no loss function is given to run instead."""
    program = stage.program
    if program.loss_fn is not None and not program.is_of_run:
        return
    states: list[RngState] = []

    def fit(state: RngState) -> RngState:
        states.append(state)
        return _fitting(state, stage.device)

    tape = stage.bundle.tape(program.model, fit)
    if tape is not None:
        _note_gpu(stage, states)
        stage.taped, obstacles = microbatches(tape, named_weights(program.model).values(), stage.device)
        stage.notes += [f"{_WITHOUT_TAPE}: {obstacle}" for obstacle in obstacles[:1]]


def _find_states(stage: Stage) -> None:
    states = stage.bundle.rng()
    if not states:
        stage.notes.append(f"the bundle holds no random states ({stage.bundle.why_not('rng')}): dropout may differ")
        return
    _note_gpu(stage, states)
    stage.states = {place: _fitting(state, stage.device) for place, state in enumerate(states)}


def _note_gpu(stage: Stage, states: Iterable[RngState]) -> None:
    if any(state.cuda is not None for state in states) and stage.device.type != "cuda":
        stage.notes.append("it ran on a GPU: its random numbers cannot be repeated on this device")


def _fitting(state: RngState, device: torch.device) -> RngState:
    """What of a random state can be set on this machine."""
    host = state.host
    if host is not None and host[1] is not None and importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy")
    elif host is not None:
        host = (host[0], None)
    return RngState(state.cpu, state.cuda if device.type == "cuda" else None, host)


def _compare_surroundings(stage: Stage) -> None:
    environment = stage.bundle.facts["environment"]
    here = {"torch": str(torch.__version__), "nanguard": nanguard.__version__, "device": str(stage.device)}
    for name, value in here.items():
        if environment.get(name) != value:
            stage.notes.append(f"{name}: {environment.get(name)} in the run, {value} here")
