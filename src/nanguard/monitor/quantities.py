"""The quantities that are watched, and the limit that each of them runs into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from nanguard.diagnosis.causes import row_of

QuantityKind = Literal[
    "overflow", "zero", "gradient", "update", "loss", "scale", "attention", "moment", "spectral", "collapse"
]
"""What a quantity is held against.

``overflow``: the largest output of an op, against the largest number of its format. ``zero``: the smallest operand of a
logarithm, division or root, against the smallest number that it can be. ``gradient``: how many elements of a gradient
are not exactly zero. ``update``: the size of an update against the size of the weight. ``loss``: the loss against three
times its best. ``scale``: the loss scale against 1. ``attention``: the largest logit that queries and keys can have,
against the largest number of their format. ``moment``: g² against Adam's v, up to where v is made of the last gradient
alone. ``spectral``: what a recurrent weight makes of a vector in one pass, against the largest number of the format.
``collapse``: the differences between the samples of a batch in an output, against the resolution of its format."""

KINDS: tuple[QuantityKind, ...] = get_args(QuantityKind)

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
FORMATS = {name: dtype for dtype, name in _FORMATS.items()}

_CAUSES = {
    "exp": "exp_overflow",
    "exp2": "exp_overflow",
    "expm1": "exp_overflow",
    "log": "log_of_zero",
    "log2": "log_of_zero",
    "log10": "log_of_zero",
    "div": "div_by_zero",
    "reciprocal": "div_by_zero",
    "sqrt": "sqrt_grad_at_zero",
    "rsqrt": "division_by_near_zero_norm",
}
_ADVICE = {
    "gradient": "multiply the loss by a scale (LossScale, GradScaler), or use bf16 or fp32",
    "update": "lower the learning rate",
    "loss": "lower the learning rate, or stop the rise of it",
    "moment": "clip gradients by their norm, lower beta2, or lower the learning rate",
    "spectral": "normalise the hidden state or the weight, clip gradients, or lower the learning rate",
    "collapse": "add a term to the loss that keeps samples apart, or lower the learning rate",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """``form`` is fp16, bf16, fp32 or fp64. ``op`` is the name of a parameter for ``gradient`` and ``update``."""

    kind: QuantityKind
    module: str
    op: str = ""
    form: str = ""
    backward: bool = False

    @property
    def key(self) -> str:
        return "|".join([self.kind, self.module, self.op, self.form, "backward" if self.backward else ""])

    @classmethod
    def from_key(cls, key: str) -> Quantity:
        kind, module, op, form, phase = key.split("|")
        if kind not in KINDS:
            raise ValueError(f"a watched quantity is one of {', '.join(KINDS)}, got {kind!r}")
        return cls(kind=kind, module=module, op=op, form=form, backward=bool(phase))

    def room(self, value: float, limit: float) -> float:
        """The distance from the limit in bits; NaN if the value says nothing."""
        if not (0 < value < math.inf and 0 < limit < math.inf):
            return math.nan
        bits = math.log2(limit) - math.log2(value)
        return bits if self.is_below else -bits

    def value(self, room: float, limit: float) -> float:
        """The value that has this room."""
        return limit * math.exp2(max(-1000.0, min(1000.0, -room if self.is_below else room)))

    @property
    def is_below(self) -> bool:
        """Whether healthy values are below the limit."""
        return self.kind not in ("zero", "gradient", "scale", "collapse")

    @property
    def usual_limit(self) -> float:
        """The limit, unless another one was measured with the value."""
        if self.kind in ("overflow", "attention", "spectral"):
            return largest(self.form)
        if self.kind == "zero":
            return smallest(self.form)
        return resolution(self.form) if self.kind == "collapse" else 1.0

    def most(self, limit: float) -> float:
        """The room of a value of 1. Small values that grow up to 1 are no danger, nor are large ones that fall to 1."""
        return math.inf if self.kind in ("gradient", "update", "loss", "scale") else abs(math.log2(limit))

    @property
    def cause(self) -> str:
        """The row of the table of causes that it would become; empty if there is none."""
        if self.kind == "zero" or (self.kind == "overflow" and self.op in ("exp", "exp2", "expm1")):
            return _CAUSES.get(self.op, "")
        if self.kind == "overflow":
            if self.form == "fp16":
                return "overflow_fp16"
            return "gradient_explosion" if self.backward else "overflow_any_precision"
        if self.kind == "attention":
            return "overflow_fp16" if self.form == "fp16" else "overflow_any_precision"
        return "loss_scale_overflow" if self.kind == "scale" else ""

    @property
    def advice(self) -> str:
        return row_of(self.cause).fix if self.cause else _ADVICE[self.kind]

    @property
    def words(self) -> str:
        """What is measured."""
        whose = "gradient of " if self.backward else ""
        return {
            "overflow": f"largest output of {whose}{self.op} in {self.form}",
            "zero": f"smallest operand of {whose}{self.op} in {self.form}",
            "gradient": f"gradient elements of {self.op} that are not zero",
            "update": f"update of {self.op} in relation to the weight",
            "loss": "loss",
            "scale": "loss scale",
            "attention": f"largest possible attention logit in {self.form}",
            "moment": f"square of the gradient of {self.op} in relation to Adam's second moment",
            "spectral": f"growth by {self.op} over a pass in {self.form}",
            "collapse": f"differences between samples in the output in {self.form}",
        }[self.kind]

    def reason(self, now: float, limit: float) -> str:
        """Why this is trouble, as the beginning of a sentence that ends with when."""
        means = {
            "overflow": f"will pass {limit:.5g}, the largest number of {self.form},",
            "zero": f"will fall below {limit:.2g} and become exactly 0",
            "gradient": "will vanish, so that nothing is learned any more,",
            "update": "will become as large as the weight itself",
            "loss": f"is rising, and will reach three times its best ({limit:.4g})",
            "scale": "will fall below 1",
            "attention": f"will pass {limit:.5g}, the largest number of {self.form},",
            "moment": f"will reach {limit:.4g}, where the moment consists of the last gradient alone,",
            "spectral": f"will pass {limit:.5g}, the largest number of {self.form},",
            "collapse": "will vanish, so that all samples are the same,",
        }[self.kind]
        shown = f"{now:.0f}" if self.kind == "gradient" else f"{now:.3g}"
        return f"{self.words}, now {shown}, {means}"


Samples = Mapping[Quantity, tuple[float, float]]
"""Value and limit of each quantity."""


def name_of(dtype: torch.dtype) -> str:
    """``fp16`` and so on; empty for a format whose limits are not watched."""
    return _FORMATS.get(dtype, "")


def largest(form: str) -> float:
    return float(torch.finfo(FORMATS[form]).max)


def smallest(form: str) -> float:
    """The smallest positive number, a subnormal one."""
    info = torch.finfo(FORMATS[form])
    return float(info.smallest_normal * info.eps)


def resolution(form: str) -> float:
    """The distance from 1 to the next smaller number: what is left of ``1 - p`` at the very least."""
    return float(torch.finfo(FORMATS[form]).eps) / 2
