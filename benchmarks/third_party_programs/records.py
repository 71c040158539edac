"""What is known of a program and of a fault, and the forms that many of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from third_party_programs import generators as make
from third_party_programs.generators import Generator


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a right diagnosis says: all but ``sample`` are regular expressions.

    One of ``lines`` must be found in the text of the line; ``""`` accepts any line, and none. ``sample`` is
    the sample at fault if the hook does not note it; a diagnosis may leave it out, but may not name another.
    With ``any_sample`` it is not known: the program draws its batch from a buffer.
    """

    causes: tuple[str, ...]
    op: str = ".*"
    module: str = ".*"
    lines: tuple[str, ...]
    sample: int | None = None
    any_sample: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in the data or in the options of a program; ``hook`` is for hook/sitecustomize.py."""

    name: str
    what: str
    expected: Expected
    hook: Mapping[str, Any] | None = None
    args: tuple[str, ...] = ()
    data: Generator | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and how it is run. ``folder`` is where it runs, in its repository; ``paths`` are added to Python's.

    ``batches`` and ``env_steps`` end it early; ``seed`` is for programs that set none; ``weights`` are names of global
    tensors that it trains without autograd; ``volatile`` are regular expressions of output that differs between runs.
    """

    name: str
    repository: str
    commit: str
    folder: str
    command: tuple[str, ...]
    data: Generator = make.no_data
    faults: tuple[Fault, ...] = ()
    seed: int | None = None
    batches: int = 0
    env_steps: int = 0
    weights: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    volatile: tuple[str, ...] = ()


DATA = ("input_nonfinite",)
ENTERS = r"torch\.from_numpy\(array\)"
NO_TARGETS = ("all_labels_ignored",)
OLD_PROTOBUF = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
"""For programs that log with tensorboard_logger."""


def record(
    what: str, expected: Expected, *, path: tuple[Any, ...] = (0,), index: int = 37, value: str = "nan", **more: Any
) -> Fault:
    """One record of the training set has a bad value."""
    hook = {"kind": "record", "index": index, "path": path, "value": value, **more}
    return Fault(name=f"record-{'-'.join(map(str, path))}-{value}", what=what, hook=hook, expected=expected)


def too_fast(*args: str) -> Fault:
    """An option sets a learning rate that is far too high."""
    expected = Expected(causes=("learning_rate_too_high",), lines=(".",))
    return Fault(name="too-fast", what=f"`{' '.join(args)}`", args=args, expected=expected)


def reward(step: int, *lines: str, kind: str = "reward", module: str = ".*") -> Fault:
    """The environment reports a NaN once."""
    expected = Expected(causes=DATA, module=module, lines=lines, any_sample=kind == "reward")
    hook = {"kind": kind, "step": step, "value": "nan"}
    return Fault(name=kind, what=f"a NaN {kind}", hook=hook, expected=expected)


def nan(module: str, *lines: str, op: str = ".*") -> Expected:
    """A NaN in the data: named as such, with its first use, or with the line of the hook that puts it there."""
    return Expected(causes=DATA, op=op, module=f"({module})?", lines=(*lines, ENTERS))


EXAMPLES = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
GANS = "36d3c77e5ff20ebe0aeefd322326a134a279b93e"
CLEANRL = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
TUTORIAL = "0500d3df5a2a8080ccfccbc00aca0eacc21818db"


def example(folder: str, *command: str, **more: Any) -> Program:
    name = more.pop("name", folder)
    return Program(name=name, repository="pytorch/examples", commit=EXAMPLES, folder=folder, command=command, **more)


def gan(kind: str, script: str, *faults: Fault, args: tuple[str, ...] = ()) -> Program:
    return Program(
        name=f"gan-{kind}",
        repository="eriklindernoren/PyTorch-GAN",
        commit=GANS,
        folder=f"implementations/{kind}",
        command=(script, "--n_epochs", "1", "--batch_size", "8", *args),
        data=make.mnist("../../data/mnist", 96, 16),
        faults=faults,
        seed=1,
    )


def cleanrl(script: str, *args: str, faults: tuple[Fault, ...]) -> Program:
    return Program(
        name=f"cleanrl-{script.removesuffix('.py').replace('_', '-')}",
        repository="vwxyzjn/cleanrl",
        commit=CLEANRL,
        folder=".",
        command=(f"cleanrl/{script}", "--no-cuda", *args),
        paths=(".",),
        faults=faults,
    )


def tutorial(folder: str, *faults: Fault, batches: int = 12, **more: Any) -> Program:
    return Program(
        name=f"tutorial-{folder.split('/')[-1].replace('_', '-')}",
        repository="yunjey/pytorch-tutorial",
        commit=TUTORIAL,
        folder=f"tutorials/{folder}",
        command=("main.py",),
        data=make.mnist("../../data", 1000, 200),
        faults=faults,
        batches=batches,
        seed=1,
        **more,
    )
