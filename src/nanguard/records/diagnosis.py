"""What a diagnosis says: frozen records of plain values, so that they can be printed, logged, saved and compared."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nanguard.records.diagnosis_text import long_text_of, panel_of
from nanguard.records.plain import plain

Phase = Literal["forward", "backward", "data", "parameter", "buffer", "optimizer"]
"""``forward``: born in a forward op, also where only a gradient shows it. ``backward``: what mattered forward was
finite. ``data``: the batch holds it. ``parameter``, ``buffer``: it was there before it was used. ``optimizer``: finite
gradients, non-finite update."""

Confidence = Literal["certain", "likely", "guess"]
"""``certain``: an experiment on this very step confirms it. ``likely``: the values say so. ``guess``: little speaks."""

Capture = Literal["step", "module", "live", "update", "graph", "none"]
"""What could be run again: the whole ``step``; the outermost ``module`` from its inputs and the gradient of its
output; nothing, but the step was traced ``live``; or ``none``."""

Depth = Literal["full", "brief"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """What went into the op, or came out.

    ``low`` and ``high`` bound the finite values; ``value`` is the one at the offending element, where that can be said.
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
    """One op on the way of a non-finite value; also a birth that did no harm."""

    op: str
    phase: str
    module: str
    source: Source | None
    dtype: str
    became: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The values inside one module in the failing forward pass, as far as they were finite."""

    module: str
    kind: str
    op: str
    low: float | None
    high: float | None
    dtype: str
    is_finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An experiment on the failing step. ``result`` is None where it was not made; ``detail`` says why."""

    what: str
    result: Literal["finite", "non-finite"] | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """What to do. ``worked`` is True where it made this very step finite, None where it was not tried."""

    words: str
    code: str = ""
    worked: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Where a non-finite value was born, why, and what to do about it.

    ``op`` is torch's name for the operation, that of the forward op for a fault in its derivative; ``module`` the
    qualified name of the innermost module, ``""`` outside any; ``source`` the user's own line. ``because`` says the
    cause in numbers. ``element`` is where the offending value sits, ``samples`` which of the batch it belongs to.
    ``chain`` leads from the birth to where it showed; ``harmless`` births reached neither loss nor gradient.
    Where ``is_line_traced`` is False the line was found by reading the program, not by running it: a likely place.
    ``batch`` is the position of the step's data in the epoch, ``since_step`` when a damaged state was still good.
    """

    phase: Phase
    cause: str
    title: str = ""
    op: str = ""
    module: str = ""
    source: Source | None = None
    is_line_traced: bool = True
    dtype: str = ""
    shape: tuple[int, ...] = ()
    because: str = ""
    evidence: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    element: tuple[int, ...] | None = None
    samples: tuple[int, ...] = ()
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
        """Plain containers only; ``from_dict`` reads it back."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The cause in words. Logs of older versions have no title; for them it is the name of the cause."""
        return self.title or self.cause.replace("_", " ")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Diagnosis:
        """Of what ``as_dict`` gave, also after a way through JSON. Unknown fields are passed over."""
        built: Diagnosis = _build(cls, data)
        return built

    def as_json(self, indent: int | None = None) -> str:
        """The same as text; NaN and Inf, which JSON does not know, are strings in it."""
        return json.dumps(plain(self.as_dict()), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        return panel_of(self)

    def report(self) -> str:
        """The longer text: evidence, chain, what was tried, and the values through the modules before the fault."""
        return long_text_of(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from nanguard.records.notebook import diagnosis_html

        return diagnosis_html(self)


def _build(kind: Any, value: Any) -> Any:
    """A value of a record from its plain form; raises ``ValueError`` for what cannot be one."""
    origin = get_origin(kind)
    if origin in (types.UnionType, Union):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else _build(options[0], value)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__} must be an object, got {type(value).__name__}")
        hints = get_type_hints(kind)
        try:
            return kind(**{f.name: _build(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
        except TypeError as error:
            raise ValueError(f"{kind.__name__}: {error}") from None
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected a list, got {value!r:.60}")
        return tuple(_build(get_args(kind)[0], each) for each in value)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{value!r:.60} is none of {', '.join(map(str, get_args(kind)))}")
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"expected a number, got {value!r:.60}")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.60}")
    return value
