"""The records of a diagnosis: frozen, with plain values, so that they can be printed, logged, saved and compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanguard.records.diagnosis_text import long_text_of, panel_of
from nanguard.records.plain import plain
from nanguard.records.rebuild import built

Phase = Literal["forward", "backward", "data", "parameter", "buffer", "optimizer"]
"""``forward``: a forward op made it, even if only a gradient is non-finite. ``backward``: the forward pass was finite.
``data``: it is in the batch. ``parameter``, ``buffer``: it was there before it was used. ``optimizer``: finite
gradients, non-finite update."""

Confidence = Literal["certain", "likely", "guess"]
"""``certain``: an experiment on this step confirms it. ``likely``: the values say so. ``guess``: weak evidence."""

Capture = Literal["step", "tape", "module", "live", "update", "graph", "none"]
"""What was examined: a replay of the whole ``step``; a replay of its calls from a ``tape``; a replay of the outermost
``module`` from its inputs and the gradient of its output; a ``live`` trace of the step; the optimizer's ``update``; the
autograd ``graph``; ``none``."""

Depth = Literal["full", "brief"]

OF_EARLIER_STEPS = frozenset(
    ("attention_logit_growth", "gradient_explosion", "learning_rate_too_high", "weight_decay_too_high")
)
"""Causes that are not in the batch: the op that fails first is a coincidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A line of the user's program. The ``file`` of a cell of a notebook is ``cell 3``.

    ``statement`` is the whole statement if the line is only a part of it. ``folder`` is the name of the file's folder
    if the program has another file of this name.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""
    statement: str = ""
    folder: str = ""

    def __str__(self) -> str:
        name = self.file.replace(chr(92), "/").rpartition("/")[2]
        name = f"{self.folder}/{name}" if self.folder else name
        return f"{name}, line {self.line}" if self.is_cell else f"{name}:{self.line}"

    @property
    def is_cell(self) -> bool:
        """Whether it is a cell of a notebook."""
        return self.file.startswith("cell ") and self.file[5:].isdigit()


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """An input or output of the op.

    ``low`` and ``high`` bound the finite values. ``value`` is the value at the offending element, None if unknown.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    value: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One op on the path of a non-finite value, or an op with a harmless one."""

    op: str
    phase: str
    module: str
    source: Source | None
    dtype: str
    became: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The range of the finite values inside one module in the failing forward pass.

    ``is_finite`` is False if the module has non-finite values from the fault on. Infinities before it did no harm.
    """

    module: str
    kind: str
    op: str
    low: float | None
    high: float | None
    dtype: str
    is_finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An experiment on the failing step. ``result`` is None if it was not made; ``detail`` says why."""

    what: str
    result: Literal["finite", "non-finite"] | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """What to do. ``worked`` is True if it made this step finite, None if it was not tried."""

    words: str
    code: str = ""
    worked: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Where a non-finite value was born, why, and what to do about it.

    ``cause`` is the name of the cause, ``title`` the same in words. ``op`` is torch's name of the operation; for a
    fault in a derivative it is the forward op. ``module`` is the qualified name of the innermost module, ``""`` outside
    of all modules; ``source`` is the user's line. If a program trains several networks, ``network`` says which one
    the step was of. ``because`` gives the cause in numbers. ``element`` is the index of the offending value,
    ``samples`` are the affected samples of the batch, ``dataset_indices`` their indices in the dataset, if known; with
    ``is_order_assumed`` only if the program's ``collate_fn`` keeps the order; ``is_record_finite``: the first of these
    is finite if the dataset is asked for it again, so it may be drawn at random. ``chain`` leads from the op to the
    non-finite loss or gradient; ``harmless`` ops reached neither. If ``is_line_traced`` is False, the line was found by
    reading the program, not by running it; if it ``makes_data``, it was seen to make a tensor of bad data. ``batch``
    is the position of the step's data in the epoch, ``since_step`` the last step with a good state.
    """

    phase: Phase
    cause: str
    title: str = ""
    op: str = ""
    module: str = ""
    network: str = ""
    source: Source | None = None
    is_line_traced: bool = True
    makes_data: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    because: str = ""
    evidence: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    element: tuple[int, ...] | None = None
    samples: tuple[int, ...] = ()
    dataset_indices: tuple[int, ...] = ()
    is_order_assumed: bool = False
    is_record_finite: bool = False
    chain: tuple[Link, ...] = ()
    harmless: tuple[Link, ...] = ()
    trail: tuple[Stretch, ...] = ()
    tried: tuple[Trial, ...] = ()
    fix: Fix = Fix(words="")
    remedies: tuple[str, ...] = ()
    modules_to_keep: tuple[str, ...] = ()
    confidence: Confidence = "guess"
    repeats: bool = True
    capture: Capture = "none"
    depth: Depth = "brief"
    step: int | None = None
    epoch: int | None = None
    batch: int | None = None
    since_step: int | None = None
    microbatch: int | None = None
    rank: int = 0
    device: str = ""
    num_replays: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis in plain containers; ``from_dict`` reads it back."""
        return asdict(self)

    @property
    def is_well_known(self) -> bool:
        """True if the op was seen to make the value. The graph that autograd keeps, or a guess, may be wrong."""
        return self.cause != "unknown" and self.confidence != "guess" and self.capture != "graph"

    @property
    def is_line_of_maker(self) -> bool:
        """True if the line makes bad data. Else it is the first that uses them, as one that the graph led to."""
        return self.phase == "data" and (self.makes_data or not self.is_line_traced) and self.capture != "graph"

    @property
    def words(self) -> str:
        """The cause in words. Logs of older versions have no title; for them it is the name of the cause."""
        return self.title or self.cause.replace("_", " ")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Diagnosis:
        """The diagnosis from the output of ``as_dict``, also after JSON. Unknown fields are ignored."""
        diagnosis: Diagnosis = built(cls, data, "diagnosis")
        return diagnosis

    def as_json(self, indent: int | None = None) -> str:
        """The diagnosis as JSON. NaN and Inf, which JSON does not have, become strings."""
        return json.dumps(plain(self.as_dict()), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        return panel_of(self)

    def report(self) -> str:
        """The long text: evidence, chain, experiments, and the values in the modules before the fault."""
        return long_text_of(self)

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        from nanguard.records.notebook import diagnosis_html

        return diagnosis_html(self)
