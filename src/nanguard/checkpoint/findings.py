"""The results of a check: ``CheckReport ► FileReport ► TensorReport``. Frozen, without tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from nanguard.records.words import counted

Note = Literal["zero", "subnormal", "over_fp16", "under_fp16", "over_bf16"]
"""Information, not a fault: a note never changes a verdict."""

SHARE = 0.01
"""From this share of the non-zero values on, subnormal and vanishing values are noted.

Weights with a standard deviation of 0.02 have 0.2% subnormal values in fp16, and none in bf16 or fp32. A share below
1% is the normal tail of a distribution.
"""

# Values that start as zeros and may stay zero. A zero weight matrix is unusual; a zero bias is not.
_BORN_ZERO = re.compile(r"(bias|beta|running_mean|lora_[bB](\.\w+)*|zero_?point)s?$")
# The state of an optimizer: moments start as zeros, the step count exceeds 65504, and squared gradients are below the
# range of fp16. They are never loaded in fp16, so zeros and range are not noted.
_OPTIMIZER = re.compile(
    r"(^|[._])(optim|optimizers?|optimizer_states?|optimizer_state_dict)\.|(^|\.)state\.\d+\."
    r"|\.(step|(max_)?exp_avg(_sq)?|momentum_buffer|square_avg|grad_avg|acc_delta|exp_inf)$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorReport:
    """The counts of one tensor. ``skipped`` says why it was not checked (integers, no data), else it is None.

    ``num_subnormal`` counts values too small for full precision in their dtype (not in float8, where they are common),
    ``num_under_fp16`` those that fp16 rounds to zero. The three range counts are for dtypes with a larger range than
    fp16. A complex number counts as two values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_values: int
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0
    num_zero: int = 0
    num_subnormal: int = 0
    num_over_fp16: int = 0
    num_under_fp16: int = 0
    num_over_bf16: int = 0
    skipped: str | None = None
    allowed: bool = False

    @property
    def num_nonfinite(self) -> int:
        return self.num_nan + self.num_posinf + self.num_neginf

    @property
    def faulty(self) -> bool:
        """Whether it has a non-finite value that is not allowed."""
        return self.num_nonfinite > 0 and not self.allowed

    @property
    def notes(self) -> tuple[Note, ...]:
        notes: list[Note] = []
        optimizer = _OPTIMIZER.search(self.name) is not None
        nonzero = self.num_values - self.num_zero
        if nonzero == 0 and self.num_values >= 2 and not optimizer and not _BORN_ZERO.search(self.name):
            notes.append("zero")
        if self.num_subnormal and self.num_subnormal >= SHARE * nonzero:
            notes.append("subnormal")
        if self.num_over_fp16 and not optimizer:
            notes.append("over_fp16")
        if self.num_under_fp16 and self.num_under_fp16 >= SHARE * nonzero and not optimizer:
            notes.append("under_fp16")
        if self.num_over_bf16 and not optimizer:
            notes.append("over_bf16")
        return tuple(notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberReport:
    """A non-finite Python or NumPy number, such as a learning rate."""

    name: str
    value: float
    allowed: bool = False

    @property
    def faulty(self) -> bool:
        """True for NaN, and for Inf in the options of an optimizer. Elsewhere Inf is a usual start for a best loss."""
        return not self.allowed and (math.isnan(self.value) or "param_groups" in self.name.split("."))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReport:
    """The result for one file or one set of shards. ``problems`` say what could not be read and what to do.

    If there are problems, ``tensors`` are those that could still be read. ``path`` is as given.
    """

    path: str
    format: str
    tensors: tuple[TensorReport, ...] = ()
    numbers: tuple[NumberReport, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether everything could be read and nothing is faulty."""
        return self.status == 0

    @property
    def status(self) -> int:
        """0: clean, 1: non-finite values, 2: something could not be read."""
        if self.problems:
            return 2
        return int(any(t.faulty for t in self.tensors) or any(n.faulty for n in self.numbers))

    @property
    def nonfinite(self) -> tuple[TensorReport, ...]:
        """The faulty tensors, those with the most non-finite values first."""
        return tuple(sorted((t for t in self.tensors if t.faulty), key=lambda t: -t.num_nonfinite))

    @property
    def names(self) -> tuple[str, ...]:
        return (*(t.name for t in self.tensors), *(n.name for n in self.numbers))

    @property
    def num_values(self) -> int:
        """How many values were checked."""
        return sum(t.num_values for t in self.tensors if t.skipped is None)

    @property
    def verdict(self) -> str:
        """One line, as ``nanguard check --quiet`` prints it."""
        if not self.problems:
            return self.headline
        more = f" (and {len(self.problems) - 1:,} more)" if len(self.problems) > 1 else ""
        return f"{self.headline}: {self.problems[0]}{more}"

    @property
    def headline(self) -> str:
        """The verdict without the reasons why something could not be read."""
        tensors, numbers = self.nonfinite, [n for n in self.numbers if n.faulty]
        total = counted(len(self.tensors), "tensor")
        bad = []
        if tensors:
            verb = "holds" if len(tensors) == 1 else "hold"
            bad.append(f"{len(tensors):,} of {total} {verb} non-finite values")
        if numbers:
            bad.append(f"{counted(len(numbers), 'number')} {'is' if len(numbers) == 1 else 'are'} non-finite")
        unread = "" if not self.problems else "partly unreadable" if self.tensors else "unreadable"
        if bad:
            return "; ".join(filter(None, [f"NOT clean: {' and '.join(bad)}", unread]))
        return unread or f"clean: {total}, {short_number(self.num_values)} value{'' if self.num_values == 1 else 's'}"

    def as_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """JSON-safe containers, numbers and strings. With ``everything``, also tensors without faults or notes."""
        told = [t for t in self.tensors if everything or t.num_nonfinite or t.notes]
        return {
            "path": self.path,
            "format": self.format,
            "status": self.status,
            "verdict": self.verdict,
            "problems": list(self.problems),
            "num_tensors": len(self.tensors),
            "num_skipped": sum(t.skipped is not None for t in self.tensors),
            "num_values": self.num_values,
            "num_nonfinite_tensors": len(self.nonfinite),
            "tensors": [
                {
                    **{field: getattr(t, field) for field in TensorReport.__slots__},
                    "shape": list(t.shape),
                    "notes": list(t.notes),
                }
                for t in told
            ],
            "numbers": [{"name": n.name, "value": str(n.value), "allowed": n.allowed} for n in self.numbers],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The result for one path: one file, or all files in a folder."""

    path: str
    files: tuple[FileReport, ...]
    passed_over: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.status == 0

    @property
    def status(self) -> int:
        """The exit status of ``nanguard check``: 0 clean, 1 non-finite values, 2 something could not be read."""
        return max((file.status for file in self.files), default=0)


def short_number(number: int) -> str:
    """``987``, ``12.3k``, ``124.4M``, ``6.7B``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
