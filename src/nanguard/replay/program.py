"""Gets the model of an incident of ``nanguard run`` from the program itself: runs it until the step begins."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nanguard.autopilot.entry import begin
from nanguard.autopilot.launch import LaunchedProgram
from nanguard.errors import LaunchError, ReplayError
from nanguard.hosted.settings import Settings, patient_policy
from nanguard.incidents.reader import Bundle
from nanguard.replay.calls import call_again, called_modules, calls_in, is_calls
from nanguard.replay.entry import BuiltProgram, told
from nanguard.replay.runs import header_of
from nanguard.step.observers import Observer
from nanguard.wiring import describe


def _give_a_function(script: str) -> str:
    """What to do if the program cannot be run again."""
    return f"give a function that builds the model, --entry {shlex.quote(Path(script).name or 'train.py')}:build"


class _Reached(BaseException):
    """Ends the program. No ordinary error: a program may catch those."""


@dataclass(slots=True)
class _Calls(Observer):
    """Ends the program in its ``number``-th call of a model in a step."""

    step: int
    number: int
    is_open: bool = False
    is_reached: bool = False
    depth: int = 0
    seen: list[nn.Module] = field(default_factory=list)
    autocast: tuple[str, torch.dtype, bool] = ("cpu", torch.bfloat16, False)
    rng: torch.Tensor | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def on_open(self, step: int) -> None:
        if not self.is_reached:  # steps in flight are heard of after the end
            self.is_open = step >= self.step
            self.seen.clear()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        first = next((param for param in module.parameters() if param.requires_grad), None)  # not a frozen one
        is_call = self.depth == 0 and first is not None and torch.is_grad_enabled()
        self.depth += 1
        if not is_call or first is None or not (self.is_open or self.step == 0):
            return
        self.seen.append(module)
        if len(self.seen) == self.number:
            kind = first.device.type
            self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            self.rng, self.args, self.is_reached = torch.get_rng_state(), args, True
            raise _Reached

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownProgram:
    """The program of an incident of ``nanguard run``, and the step up to which it has to be run again."""

    script: str
    module: str
    """Empty if it is run by its path."""
    argv: tuple[str, ...]
    step: int

    def __str__(self) -> str:
        what = ["-m", self.module] if self.module else [self.script]
        return f"running {shlex.join([*what, *self.argv])} again, up to step {self.step:,}"


def program_of(bundle: Bundle) -> KnownProgram:
    """The program that the log of the run names. Raises ``ReplayError`` if it names none, or calls no module.

    If the weights were saved, the first step is enough. A file in the folder of the run itself is refused: the folder
    may come from somewhere else.
    """
    if "tape" in bundle.captured and not (_saved_calls(bundle) or bundle.taped_modules):
        known = f"nanguard explain {shlex.quote(str(bundle.path))}"
        raise ReplayError(f"the step calls no module, so there is no model to run again. What is known: {known}")
    header = header_of(bundle)
    script, module, argv = header.get("script"), header.get("module"), header.get("argv")
    if not isinstance(script, str) or not script:
        raise ReplayError(f"the program of {bundle.path} is not known: {_give_a_function('')}")
    if header.get("is_child"):
        why = f"the step was made in a process that {Path(script).name} had started, which is not started again"
        raise ReplayError(f"{why}: {_give_a_function(script)}")
    folder = bundle.path.resolve().parent.parent
    if Path(script).resolve().is_relative_to(folder):
        raise ReplayError(f"{script} is in the folder of the run, so it is not run: {_give_a_function(script)}")
    step = 0 if "weights" in bundle.captured else bundle.outcome.verdict.reading.step
    given = argv if isinstance(argv, (list, tuple)) else ()
    name = module if isinstance(module, str) else ""
    return KnownProgram(script=script, module=name, argv=tuple(str(each) for each in given), step=step)


def from_program(bundle: Bundle, program: KnownProgram) -> BuiltProgram:
    """Runs the program, guarded, until it calls its model in the step, and returns that model.

    Raises ``ReplayError`` if the program raises or never gets there.
    """
    script, step = program.script, program.step
    calls, names = _saved_calls(bundle), bundle.taped_modules
    found = _Calls(step=step, number=len(calls) or len(names) or 1)
    _run(program, found)
    model = found.seen[-1] if len({id(module) for module in found.seen}) == 1 else called_modules(names, found.seen)
    if model is None:
        raise ReplayError(
            f"the step calls several models, so it is not clear which one to replay: {_give_a_function(script)}"
        )
    notes = [f"the model is that of {Path(script).name}, which was run again up to step {step:,}"]
    if "tape" not in bundle.captured:
        notes.append("only the calls of the model are run again, not what the program does with their results")
        notes += [f"the others were not saved: {e['why']}" for e in bundle.facts["left_out"] if e["what"] == "tape"]
    if step:
        notes.append("unless the program sets a fixed seed, its weights differ from those of the run")
    policy = header_of(bundle).get("policy")
    if step and isinstance(policy, dict) and policy.get("ladder") != describe(patient_policy())["ladder"]:
        notes.append("the run had another policy, so earlier bad steps may have been handled differently")
    return BuiltProgram(
        model=model,
        loss_fn=call_again(*found.autocast, rng=found.rng),
        batches=None if calls else _Repeated([(found.args, found.kwargs)]),
        notes=tuple(notes),
        is_of_run=True,
    )


def _saved_calls(bundle: Bundle) -> list[Any]:
    saved = bundle.batches()
    return list(calls_in(saved[0])) if saved and is_calls(saved[0]) else []


class _Repeated:
    """The inputs of the program's own call, for an incident without data."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._calls


def _run(known: KnownProgram, calls: _Calls) -> None:
    name, otherwise = Path(known.script).name, _give_a_function(known.script)
    again = "Run the command in the folder in which the program was run, or"
    try:
        program = LaunchedProgram(known.module or known.script, known.argv, is_module=bool(known.module))
    except LaunchError as error:
        raise ReplayError(f"{error}. {again} {otherwise}") from None
    if not os.path.samefile(program.path, known.script):
        raise ReplayError(f"{known.module} is {program.path} here, and was {known.script}. {again} {otherwise}")
    settings = Settings(observers=(calls,), diagnose="off", capture="none", script=known.script, argv=known.argv)
    autopilot = begin(settings)
    try:
        with _restored(), calls.listening(), contextlib.redirect_stdout(sys.stderr):
            try:
                program.run()
            finally:
                autopilot.uninstall()  # it would tell of the step in which the program was ended
    except _Reached:
        return
    except (Exception, SystemExit) as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise ReplayError(f"{name} raised {told(error)}. {again} {otherwise}") from error
    raise ReplayError(f"{name} ended before step {calls.step:,} called its model: {otherwise}")


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """What a program changes for the whole process is put back, and the library does not log meanwhile."""
    main, argv, path, hook = sys.modules["__main__"], sys.argv, list(sys.path), sys.excepthook
    log = logging.getLogger("nanguard")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:], sys.excepthook = main, argv, path, hook
        log.disabled = was_disabled
