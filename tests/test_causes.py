"""The table of causes: every rule on a small program with one fault, and on its near misses.

A program is a function of hidden values ``h`` that runs in a module called ``head`` behind an identity layer called
``body``, so that ``h`` is its input to the last bit; a module that does the same; or a loss function of model and
batch. Its guilty line ends with ``# guilty``, and that very line must be named.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, HalfNormal, kl_divergence
from torch.optim import Optimizer

import nanguard
from helpers import INF, NAN
from nanguard.diagnosis import causes, graph_probe, op_faults, process, state_faults
from nanguard.diagnosis.rules import Case
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.panel import panel
from nanguard.report.page import write_report

# ---- how programs run ----------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Runs a function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Net(nn.Module):
    """``body`` gives what it is given, ``head`` is the program."""

    def __init__(self, head: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(width, width, bias=False)
        self.head = head
        nn.init.eye_(self.body.weight)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))  # guilty


def mean(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float().mean()


@dataclass(frozen=True, eq=False)
class Program:
    """What runs, and what must be said of it.

    ``x`` are the rows of the batch, unless ``batch`` makes one. With a learning rate, ``lr``, the program is trained
    under a guard on the batches that ``batch`` makes, until a step fails. ``harmless`` are the ops that may be listed
    as such, ``says`` is part of the reason given, or parts with dots between. ``xfail`` says what is known to be wrong.
    """

    run: Any
    cause: str
    op: str
    says: str
    phase: str = "forward"
    module: str = "head"
    x: Any = ((1, 2, 3, 4),)
    batch: Callable[[], Any] | None = None
    to: torch.dtype = torch.float32
    optimizer: Callable[[Any], Optimizer] | None = None
    prepare: Callable[[Any, Any], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    lr: float = 0.0
    decay: float = 0.0
    harmless: str = ""
    xfail: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.run.__name__)

    def pieces(self) -> tuple[nn.Module, Callable[..., Tensor], Any, Optimizer | None]:
        """The model, the loss function, the batch and the optimizer."""
        head: nn.Module = nn.Identity()
        loss_fn = mean
        if isinstance(self.run, type):
            head = self.run()
        elif len(inspect.signature(self.run).parameters) == 1:
            head = Head(self.run)
        else:
            loss_fn = self.run
        model = Net(head, len(self.x[0])).to(self.to)
        batch = torch.tensor(self.x, dtype=self.to) if self.batch is None else self.batch()
        optimizer = None if self.optimizer is None else self.optimizer(model.parameters())
        if self.prepare is not None:
            self.prepare(model, optimizer)
        return model, loss_fn, batch, optimizer

    def marked(self) -> set[tuple[int, str]]:
        """The guilty lines: of the program, of what made its batch, optimizer or state, or where data are used."""
        parts = [part for part in (self.run, self.batch, self.optimizer, self.prepare) if part is not None]
        return set().union(*map(marked_lines, parts)) or marked_lines(Net)


def marked_lines(thing: Any) -> set[tuple[int, str]]:
    """Numbers and texts of lines that say that they are guilty."""
    lines, first = inspect.getsourcelines(thing)
    return {(n, line.strip()) for n, line in enumerate(lines, first) if line.rstrip().endswith("# guilty")}


PROGRAMS: list[Program] = []


def program(cause: str, op: str, says: str, x: Any = Program.x, **fields: Any) -> Callable[[Any], Any]:
    """Enters a program into the table; what is no field of it is an option of ``nanguard.diagnose``."""
    options = {name: fields.pop(name) for name in list(fields) if name not in Program.__dataclass_fields__}

    def enter(run: Any) -> Any:
        PROGRAMS.append(Program(run, cause, op, says, x=x, options=options, **fields))
        return run

    return enter


in_backward = functools.partial(program, phase="backward")
in_fp16_backward = functools.partial(program, phase="backward", precision="fp16")
in_optimizer = functools.partial(program, phase="optimizer", module="body")

DECIDED: dict[str, set[str]] = {}
"""Which rule of the table decided which programs."""


@contextmanager
def rules_noted(name: str) -> Iterator[None]:
    def noted(case: Case) -> tuple[str, str]:
        rule = next((row.rule.__name__ for row in causes.TABLE if row.rule and row.rule(case)), "")
        DECIDED.setdefault(rule, set()).add(name)
        return causes.name_cause(case)

    with mock.patch.object(op_faults, "name_cause", noted), mock.patch.object(state_faults, "name_cause", noted):
        yield


@functools.cache
def diagnosed(one: Program) -> Diagnosis:
    model, loss_fn, batch, optimizer = one.pieces()
    options = {"precision": "fp32", **one.options}
    with rules_noted(one.name), one.around():
        if not one.lr:
            return nanguard.diagnose(model, loss_fn, batch, optimizer, depth="brief", **options)
        guard = nanguard.Guard(
            model,
            torch.optim.SGD(model.parameters(), lr=one.lr, weight_decay=one.decay),
            policy=nanguard.Policy(divergence=None),
            max_norm=None,
            loss_scale=None,
            snapshots=nanguard.Snapshots(every=2, confirm=1, keep=20),
            diagnose="brief",
            **options,
        )
        for each in batch:
            guard.step(loss_fn, each)
            if guard.incidents:
                break
        diagnosis = guard.incidents[0].diagnosis
        assert diagnosis is not None
        return diagnosis


# ---- values that leave their format --------------------------------------------------------------------------------


@program("exp_overflow", "exp", "exp of 100 exceeds float32: it ends at about 88.7", [[1, 2, 3, 100]])
def an_exponential(h):
    return h.exp()  # guilty


@program("exp_overflow", "exp", "exp of 12 exceeds float16: it ends at about 11.1", [[1, 2, 3, 12]])
def an_exponential_in_half(h):
    return h.half().exp()  # guilty


@program("overflow_fp16", "mm", "operands reach 300", [[300, 1, 1, 1], [300, 1, 1, 1]])
def a_product_in_half(h):
    h = h.half()
    return h @ h.t()  # guilty


@program("overflow_any_precision", "mm", "operands reach 1e+20", [[1e20, 1, 1, 1]])
def a_product_in_fp32(h):
    return h @ h.t()  # guilty


@program("overflow_any_precision", "mul", "operands reach 9.97e+19", [[1e20, 1, 1, 1]])
def a_square_in_bf16(h):
    h = h.bfloat16()
    return h * h  # guilty


@program("overflow_fp16", "to_copy", "operands reach 1e+05", [[1e5, 1, 1, 1]])
def a_cast_to_half(h):
    return h.half()  # guilty


@program("overflow_fp16", "mm", "operands reach 300", [[300, 1, 1, 1], [300, 1, 1, 1]], precision="fp16")
def a_product_under_autocast(h):
    return h @ h.t()  # guilty


@program("overflow_any_precision", "pow", "operands reach 1e+04", [[1e4, 1, 1, 1]])
def a_power_that_no_format_holds(h):
    return h.half() ** 100  # guilty


@program("overflow_any_precision", "mul", "operands reach 1e+200", [[1, 1, 1, 1]])
def a_square_in_float64(h):
    h = h.double() * 1e200
    return h * h  # guilty


# ---- logarithms ----------------------------------------------------------------------------------------------------


@program("log_of_zero", "log", "log of 0", [[1, 2, 0, 4]])
def a_log_of_zero(h):
    return h.log()  # guilty


@program("log_of_zero", "log1p", "log1p of -1 (exactly)", [[-1, 2, 3, 4]])
def a_log_of_one_minus_one(h):
    return h.log1p()  # guilty


@program("log_of_negative", "log", "log of -0.5", [[1, 2, -0.5, 4]])
def a_log_of_less_than_zero(h):
    scaled = h * 1.0
    return torch.log(scaled)  # guilty


@program("log_of_negative", "logit", "logit of 1.5", [[0.5, 0.2, 1.5, 0.1]])
def a_logit_of_no_probability(h):
    return h.logit()  # guilty


@program("log_of_zero", "xlogy", "xlogy of 0", [[0, 1, 2, 3]])
def a_cross_entropy_by_hand(h):
    return torch.xlogy(torch.ones_like(h), h)  # guilty


@program(
    "log_of_negative",
    "linalg_slogdet",
    "determinant is negative",
    [[1, 0], [0, -1]],
)
def a_determinant_below_zero(h):
    return torch.logdet(h)  # guilty


@program("log_of_zero", "linalg_slogdet", "the determinant is 0", [[1, 1], [1, 1]])
def a_determinant_of_zero(h):
    return torch.linalg.slogdet(h).logabsdet  # guilty


@program("log_of_zero", "masked_fill", "puts an infinity where the loss ... (log_softmax at test_causes.py:")
def a_mask_over_the_target(h):
    hidden = torch.tensor([True, False, False, False])
    scores = h.masked_fill(hidden, -math.inf)  # guilty
    return F.cross_entropy(scores, torch.tensor([0]))


@program("nonfinite_constant", "where", "outside of the support of a distribution", [[1, -2, 3, 4]])
def a_density_outside_of_its_support(h):
    return HalfNormal(1.0, validate_args=False).log_prob(h)  # guilty


@program("nonfinite_constant", "index_put", "an infinity is put into a value that the loss adds up")
def a_divergence_from_what_is_impossible(h):
    never = Categorical(torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    return kl_divergence(Categorical(logits=h), never)  # guilty


@program("eps_underflow", "log", "the eps of 1e-08 that was added is 0 in float16", [[1, 2, 0, 4]])
def a_log_with_an_eps_of_nothing(h):
    return (h.half() + 1e-8).log()  # guilty


# ---- divisions -----------------------------------------------------------------------------------------------------


@program("zero_over_zero", "div", "0 / 0", [[1, 0, 3, 0]])
def a_ratio_of_nothing(h):
    up, down = h[:, 1], h[:, 3]
    return up / down  # guilty


@program("div_by_zero", "div", "3 / 0", [[1, 0, 3, 0]])
def a_ratio_to_nothing(h):
    up, down = h[:, 2], h[:, 3]
    return up / down  # guilty


@program("division_by_near_zero_norm", "div", "zeros is divided by its own norm", [[0, 0, 0, 0], [1, 2, 3, 4]])
def a_direction_of_zeros(h):
    return h / h.norm(dim=1, keepdim=True)  # guilty


@program("division_by_near_zero_norm", "div", "zeros is divided by its own norm", [[0, 0, 0, 0], [1, 2, 3, 4]])
def a_direction_by_hand(h):
    length = (h * h).sum(1, keepdim=True).sqrt()
    return h / length  # guilty


@program("division_by_near_zero_norm", "div", "7 is divided by a norm of 0", [[7, 8, 0, 0]])
def a_vector_over_the_norm_of_another(h):
    up, down = h[:, :2], h[:, 2:]
    return up / torch.linalg.vector_norm(down)  # guilty


@program("div_by_zero", "div", "5 / 0", [[3, 4, 0, 0]])
def a_ratio_of_norms(h):
    up, down = h[:, :2].norm(), h[:, 2:].norm()
    return up / down  # guilty


@program("division_by_near_zero_norm", "div", "is divided by a norm of 1e-", [[1, 1, 1e-40, 0]])
def a_vector_over_a_tiny_norm(h):
    return h[:, :2] / h[:, 2:].abs().amax().norm()  # guilty


@program("div_by_zero", "div", "1 / 1e-40 leaves float32", [[1, 2, 3, 1e-40]])
def a_ratio_to_next_to_nothing(h):
    up, down = h[:, :1], h[:, 3:]
    return up / down  # guilty


@program("div_by_zero", "reciprocal", "1 / 0", [[1, 2, 0, 4]])
def an_inverse(h):
    return 1.0 / h  # guilty


@program("div_by_zero", "rsqrt", "1 / 0", [[1, 2, 0, 4]])
def an_inverse_root(h):
    return h.rsqrt()  # guilty


@program("eps_underflow", "div", "the eps of 1e-08 that was added to the denominator is 0 in float16", [[0, 0, 3, 4]])
def a_ratio_with_an_eps_of_nothing(h):
    h = h.half()
    return h / (h.abs() + 1e-8)  # guilty


@program("eps_underflow", "div", "the eps of 1e-10 ", [[0, 0, 0, 0]])
def a_norm_clamped_to_nothing(h):
    h = h.half()
    return h / h.norm(dim=1, keepdim=True).clamp(min=1e-10)  # guilty


@program("eps_underflow", "reciprocal", "the eps of 1e-08 ", [[0, 2, 3, 4]])
def a_floor_of_nothing(h):
    floor = torch.tensor(1e-8)
    return 1 / torch.maximum(h.half(), floor)  # guilty


@program("eps_underflow", "div", "the eps of 1e-08 ", [[0, 0, 0, 0]])
def a_similarity_with_an_eps_of_nothing(h):
    h = h.half()
    return F.cosine_similarity(h, h, eps=1e-8)  # guilty


@program("division_by_near_zero_norm", "div", "zeros is divided by its own norm", [[0, 0, 0, 0]])
def a_direction_whose_eps_is_elsewhere(h):
    other = h.half() + 1e-8
    return h / h.norm() + other.float()  # guilty


@program("zero_over_zero", "div", "0 / 0", [[0, 0, 3, 4]])
def a_sign_by_hand(h):
    return h / h.abs()  # guilty


@program("zero_over_zero", "div", "0 / 0")
def a_mean_over_a_mask_of_none(h):
    kept = h > 10
    return (h * kept).sum() / kept.sum()  # guilty


# ---- roots and powers ----------------------------------------------------------------------------------------------


@program("sqrt_of_negative", "sqrt", "sqrt of -0.25", [[1, 2, -0.25, 4]])
def a_root_of_less_than_zero(h):
    return h.sqrt()  # guilty


@program("sqrt_of_negative", "rsqrt", "rsqrt of -4", [[1, 2, -4, 4]])
def an_inverse_root_of_less_than_zero(h):
    return h.rsqrt()  # guilty


@program("pow_negative_base", "pow", "-8 to the power of 0.333333", [[1, 2, -8, 4]])
def a_cube_root(h):
    return h ** (1 / 3)  # guilty


@program("div_by_zero", "pow", "0 to the power of -2", [[1, 2, 0, 4]])
def an_inverse_square(h):
    return h**-2  # guilty


@in_backward("sqrt_grad_at_zero", "sqrt", "the derivative of sqrt at 0 is infinite", [[1, 0, 3, 4]])
def a_root_of_zero(h):
    return h.sqrt()  # guilty


@in_backward("sqrt_grad_at_zero", "pow", "the derivative of x**0.5 at 0", [[1, 0, 3, 4]])
def a_root_as_a_power(h):
    return h**0.5  # guilty


@in_backward("sqrt_grad_at_zero", "hypot", "the derivative of hypot at 0", [[1, 0, 3, 0]])
def a_hypotenuse(h):
    return torch.hypot(h[:, 1], h[:, 3])  # guilty


@in_backward("sqrt_grad_at_zero", "sqrt", "the derivative of sqrt at 0", [[5, 5, 5, 5]])
def a_spread_of_equals(h):
    return h.var(dim=1).sqrt()  # guilty


@in_backward("sqrt_grad_at_zero", "sqrt", "at 0 is infinite", [[1, 0, 3, 4]])
def a_root_that_is_not_chosen(h):
    root = h.sqrt()  # guilty
    return torch.where(h > 0, root, torch.zeros_like(h))


@in_backward("sqrt_of_negative", "sqrt", "sqrt of -1", [[1, -1, 3, 4]])
def a_root_of_less_than_zero_that_is_not_chosen(h):
    root = h.sqrt()  # guilty
    return torch.where(h > 0, root, torch.zeros_like(h))


@in_backward("sqrt_grad_at_zero", "sqrt", "at 0 is infinite", [[2, 2, 2, 2]])
def a_distance_to_itself(h):
    gaps = h[:, :, None] - h[:, None, :]
    return (gaps * gaps).sum(0).sqrt()  # guilty


# ---- ends of domains -----------------------------------------------------------------------------------------------


@program("acos_asin_domain", "acos", "acos of 1.25", [[0.5, 1.25, 0, 0]])
def an_angle_beyond_its_end(h):
    return h.acos()  # guilty


@in_backward("acos_asin_domain", "acos", "the derivative of acos is infinite", [[0.5, 1, 0, 0]])
def an_angle_at_its_end(h):
    return h.acos()  # guilty


@program("acos_asin_domain", "atanh", "atanh of 1", [[0.5, 1, 0, 0]])
def an_inverse_tangent(h):
    return torch.atanh(h)  # guilty


@program("acos_asin_domain", "erfinv", "erfinv of -1", [[0.5, -1, 0, 0]])
def a_quantile(h):
    return torch.erfinv(h)  # guilty


@program("log_of_zero", "lgamma", "lgamma has a pole at -2", [[0.5, -2, 1, 1]])
def a_pole(h):
    return torch.lgamma(h)  # guilty


@program("log_of_zero", "digamma", "digamma has a pole at 0", [[0.5, 0, 1, 1]])
def a_pole_of_digamma(h):
    return torch.digamma(h)  # guilty


# ---- statistics and sums over nothing ------------------------------------------------------------------------------


@program("std_of_single_element", "std", "std over 1 element divides by 1 - 1")
def a_spread_of_one(h):
    return h.std(dim=0)  # guilty


@program("std_of_single_element", "var", "var over 1 element divides by 1 - 1")
def a_variance_of_one(h):
    return h.var(dim=0)  # guilty


@in_backward("std_of_single_element", "var", "the derivative of var over one element divides by 1 - 1", harmless="var")
def a_variance_of_one_that_is_not_chosen(h):
    spread = h.var(dim=0)  # guilty
    return spread if len(h) > 1 else torch.where(torch.tensor(False), spread, 0)


@program("zero_over_zero", "mean", "mean over nothing")
def a_mean_of_nothing(h):
    return h[h > 10].mean()  # guilty


@program("all_labels_ignored", "nll_loss_forward", "every label is -100, which the loss leaves out")
def a_loss_of_ignored_targets(h):
    return F.cross_entropy(h, torch.tensor([-100]))  # guilty


@program("all_labels_ignored", "nll_loss2d_forward", "every label is 7, which the loss leaves out")
def a_loss_of_ignored_pixels(h):
    return F.nll_loss(h[:, :, None, None], torch.full((1, 1, 1), 7), ignore_index=7)  # guilty


@program("all_labels_ignored", "div", "every label is -100, which the loss leaves out: 0 / 0")
def a_mean_by_hand_over_ignored_targets(h):
    labels = torch.tensor([-100])
    total = F.cross_entropy(h, labels, reduction="sum")
    return total / (labels != -100).sum()  # guilty


@program("zero_over_zero", "nll_loss_forward", "averages over nothing")
def a_loss_of_classes_without_weight(h):
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    return F.cross_entropy(h, torch.tensor([2]), weight=weight)  # guilty


@program("masked_softmax_all_neg_inf", "softmax", "every entry of a row is -inf")
def a_softmax_of_nothing(h):
    scores = h.masked_fill(torch.ones_like(h, dtype=torch.bool), -math.inf)
    return scores.softmax(-1)  # guilty


@program("zero_over_zero", "native_layer_norm", "eps=0", [[3, 3, 3, 3]])
def a_norm_without_eps(h):
    return F.layer_norm(h, (4,), eps=0.0)  # guilty


@program("eps_underflow", "native_layer_norm", "eps=1e-60", [[3, 3, 3, 3]])
def a_norm_with_an_eps_of_nothing(h):
    return F.layer_norm(h, (4,), eps=1e-60)  # guilty


@program(
    "std_of_single_element",
    "std",
    "divides by 1 - 1; the program itself writes the result into head.scale",
    phase="parameter",
)
class AScaleMadeOfTheFirstBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, h):
        with torch.no_grad():
            spread = h.std(0)  # guilty
            self.scale.data.copy_(1 / spread)
        return h * self.scale


# ---- infinities that were there ------------------------------------------------------------------------------------


@program("inf_minus_inf", "sub", "two infinities are subtracted")
def a_difference_of_masks(h):
    mask = torch.full_like(h, -math.inf)
    return (h + mask) - (h + mask)  # guilty


@program("zero_times_inf", "mul", "0 is multiplied by an infinity", [[1, 0, 3, 4]])
def a_mask_that_is_multiplied(h):
    mask = torch.tensor([0.0, -math.inf, 0.0, 0.0])
    return h * mask  # guilty


@program("zero_times_inf", "mul", "0 is multiplied by an infinity, the logarithm of 0")
def a_divergence_of_a_certain_teacher(h):
    p = torch.tensor([1.0, 0.0, 0.0, 0.0])
    return p * (p.log() - h.log_softmax(-1))  # guilty


@program("inf_minus_inf", "div", "an infinity is divided by an infinity")
def a_ratio_of_masks(h):
    mask = torch.full_like(h, math.inf)
    return (h + mask) / (h + mask)  # guilty


@program("inf_minus_inf", "sin", "sin of an infinity")
def a_wave_of_a_mask(h):
    far = h + torch.full_like(h, math.inf)
    return far.sin()  # guilty


# ---- derivatives ---------------------------------------------------------------------------------------------------


@in_backward("zero_times_inf", "log", "log is infinite where its result is not used", [[1, 0, 3, 4]])
def a_log_that_is_not_chosen(h):
    logs = h.log()  # guilty
    return torch.where(h > 0, logs, torch.zeros_like(h))


@in_backward("zero_times_inf", "div", "div is infinite where its result is not used", [[1, 0, 3, 4]])
def a_ratio_that_is_not_chosen(h):
    ratio = h.sum() / h  # guilty
    return ratio[h > 0]


@in_backward("zero_times_inf", "exp", "exp is infinite where its result is not used", [[1, 2, 3, 200]])
def an_exponential_that_is_not_chosen(h):
    grown = h.exp()  # guilty
    return grown.masked_fill(h > 80, 0.0)


@in_backward("custom_backward_bug", "div", "0.25 / 0", [[1, 0, 3, 4]])
class ARootByHand(nn.Module):
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            root = x.sqrt()
            ctx.save_for_backward(root)
            return root

        @staticmethod
        def backward(ctx, grad):
            (root,) = ctx.saved_tensors
            return grad / (2 * root)  # guilty

    def forward(self, h):
        return self.Root.apply(h)


@in_backward("div_by_zero", "div", "0.25 / 0", [[1, 0, 3, 4]])
def a_hook_that_divides(h):
    out = h * 1.0
    out.register_hook(lambda grad: grad / h.detach())  # guilty
    return out


@program("log_of_zero", "log", "log of 0", [[1, 0, 3, 4]])
class ALogWithADerivativeByHand(nn.Module):
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.log()  # guilty

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def forward(self, h):
        return self.Log.apply(h)


@in_backward("div_by_zero", "linalg_svd", "two are equal", [[1, 0], [0, 1]])
def a_decomposition_of_equals(h):
    u, s, v = torch.linalg.svd(h)  # guilty
    return u[0] * s * v[0]


@in_backward("div_by_zero", "linalg_eig", "differences of eigenvalues, and two are equal", [[1, 0], [0, 1]])
def eigenvectors_of_equals(h):
    return torch.linalg.eig(h).eigenvectors.real.abs()  # guilty


@in_backward("div_by_zero", "linalg_qr", "diagonal of R, and columns are linearly dependent", [[1, 1], [0, 0]])
def a_basis_of_the_same_twice(h):
    return torch.linalg.qr(h).Q  # guilty


@program("div_by_zero", "linalg_inv_ex", "the matrix is singular, so linalg_inv_ex divides by 0", [[1, 2], [2, 4]])
def an_inverse_that_nobody_checks(h):
    return torch.linalg.inv_ex(h).inverse  # guilty


@program(
    "div_by_zero",
    "linalg_inv_ex",
    "nearly singular, and what linalg_inv_ex gives exceeds float32",
    [[1e-30, 0], [0, 1]],
)
def an_inverse_that_is_too_large(h):
    return torch.linalg.inv_ex(h * h[1, 1] * 1e-10).inverse  # guilty


@program("div_by_zero", "linalg_solve_triangular", "the matrix is singular", [[1, 0], [1, 0]])
def a_factor_with_a_zero_on_its_diagonal(h):
    return torch.linalg.solve_triangular(h, torch.ones(2, 1), upper=False)  # guilty


@in_backward("pow_negative_base", "pow", "derivative of x ** p by p is a logarithm of x, and x is -2", [[1, -2, 3, 4]])
class AnExponentThatIsTrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(2.0))

    def forward(self, h):
        return h**self.p  # guilty


@in_backward("log_of_zero", "special_entr", "in the derivative of special_entr, log of 0", [[0, 1, 1, 1]])
def an_entropy_of_nothing(h):
    return torch.special.entr(h)  # guilty


# ---- what single functions do --------------------------------------------------------------------------------------


@program("zero_over_zero", "segment_reduce", "a segment has no elements")
def a_mean_of_an_empty_segment(h):
    return torch.segment_reduce(h[0], "mean", lengths=torch.tensor([4, 0]))  # guilty


@program("overflow_any_precision", "add", "two masks of finfo.min are added: twice -3.4e+38 exceeds float32")
def two_masks_of_the_lowest_number(h):
    hidden = torch.full((4,), torch.finfo(torch.float32).min)
    mask = hidden + hidden  # guilty
    return (h + mask).softmax(-1)


@program("ctc_inf", "ctc_loss", "a target is too long for its input")
def an_alignment_that_does_not_exist(h):
    logs = h.log_softmax(-1)[:, None]
    return F.ctc_loss(logs, torch.tensor([[1, 2]]), torch.tensor([1]), torch.tensor([2]))  # guilty


@in_backward(
    "overflow_any_precision", "ctc_loss", "in the derivative of ctc_loss, operands reach", [[6, 0, 3, 1], [0, 9, 1, 2]]
)
def an_alignment_of_huge_scores(h):
    """The target can be aligned, and the loss of it is finite."""
    logs = (h * 1e10).log_softmax(-1)[:, None]
    return F.ctc_loss(logs, torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([2]))  # guilty


@program("division_by_near_zero_norm", "weight_norm_interface", "by its norm")
class AWeightOfZeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2, 4))
        self.g = nn.Parameter(torch.ones(2, 1))

    def forward(self, h):
        return h @ torch._weight_norm(self.v, self.g, 0).t()  # guilty


# ---- targets and data ----------------------------------------------------------------------------------------------


def ones_and(*target: float) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.ones(len(target), 4), torch.tensor(target, dtype=torch.float32))


@program("label_out_of_domain", "log", "log of a target of -3", batch=ones_and(1, -3), module="")
def a_target_below_zero(model, batch):
    x, target = batch
    wanted = target.log()  # guilty
    return F.mse_loss(model(x).mean(1), wanted)


@program(
    "label_out_of_domain",
    "log",
    "log of a target of -3",
    batch=lambda: (torch.ones(1, 4), torch.tensor([-3])),
    module="",
)
def a_whole_number_below_zero(model, batch):
    x, count = batch
    return F.mse_loss(model(x).mean(1), count.log())  # guilty


@program("log_of_negative", "log", "log of -3", batch=ones_and(1, -3), module="")
def an_input_below_zero(model, batch):
    x, more = batch
    more = more.log()  # guilty
    return model(x * more[:, None]).mean()


@program("label_out_of_domain", "sqrt", "sqrt of a target of -9", batch=ones_and(-9), module="")
def a_target_under_a_root(model, batch):
    x, target = batch
    return F.mse_loss(model(x).mean(1), target.sqrt())  # guilty


@program("sqrt_of_negative", "sqrt", "sqrt of -9", batch=ones_and(-9), module="")
def an_input_under_a_root(model, batch):
    x, more = batch
    return model(x * more.sqrt()).mean()  # guilty


@program("label_out_of_domain", "pow", "a target of -9 to the power of 0.5", batch=ones_and(-9), module="")
def a_target_to_a_power(model, batch):
    x, target = batch
    return F.mse_loss(model(x).mean(1), target**0.5)  # guilty


@program("label_out_of_domain", "lgamma", "lgamma of 0", batch=ones_and(-1), module="")
def a_count_below_zero(model, batch):
    x, count = batch
    rate = model(x).mean(1)
    return (rate.exp() - count * rate + torch.lgamma(count + 1)).mean()  # guilty


def photos():
    light = torch.tensor([[1.0, 2, 0, 4], [1, 2, 3, 4]])
    pixels = light / light.new_tensor([1, 1, 0, 1])  # guilty
    return {"pixels": pixels}


@program("input_nonfinite", "mm", "batch['pixels'] holds NaN at [0, 2]", batch=photos, phase="data", module="body")
def data_made_of_nothing(model, batch):
    return model(batch["pixels"]).mean()


@program(
    "input_nonfinite", "mm", "batch holds Inf at [1, 3]", [[1, 2, 3, 4], [1, 2, 3, INF]], phase="data", module="body"
)
def data_that_came_so(model, batch):
    return model(batch).mean()


made_in_the_step = functools.partial(program, "input_nonfinite", phase="data")
BAD = np.array([[1, 2, np.nan, 4], [1, 2, 3, 4]], dtype=np.float32)


@made_in_the_step("mm", "this line makes a tensor of data that hold NaN at [0, 2]", module="body")
def an_array(model, batch):
    return model(torch.from_numpy(BAD)).mean()  # guilty


@made_in_the_step("mm", "this line makes a tensor of data that hold NaN at [0, 2]", module="body")
def an_array_that_is_converted(model, batch):
    x = torch.as_tensor(BAD.astype(np.float64), dtype=torch.float32)  # guilty
    return model(x).mean()


@made_in_the_step("mm", "this line makes a tensor of data that hold Inf at [0, 2]", module="body")
def an_array_with_an_infinity(model, batch):
    x = torch.tensor(np.where(np.isnan(BAD), np.inf, BAD).astype(np.float32))  # guilty
    return model(x).mean()


@made_in_the_step("mm", "this line makes a tensor of data that hold NaN at [0, 2]", module="body")
def an_array_that_is_copied(model, batch):
    x = torch.full((2, 4), NAN)
    x.copy_(torch.from_numpy(BAD))  # guilty
    return model(x).mean()


@made_in_the_step("mm", "this line puts a number that is NaN into a tensor", module="body")
def an_element(model, batch):
    x = batch.clone()
    x[0, 1] = NAN  # guilty
    return model(x).mean()


@made_in_the_step("mm", "this line puts a number that is Inf into a tensor", module="body")
def a_row_of_infinities(model, batch):
    x = batch.clone()
    x[0] = INF  # guilty
    return model(x).mean()


@made_in_the_step("native_layer_norm", "this line puts a number that is Inf into a tensor", module="")
def an_infinity_that_is_normalised(model, batch):
    x = batch.clone()
    x[0, 1] = INF  # guilty
    return model(F.layer_norm(x, (4,))).mean()


@made_in_the_step("sub", "this line puts a number that is Inf into a tensor", module="")
def an_infinity_in_a_target(model, batch):
    y = torch.ones(1, 4)
    y[0, 1] = INF  # guilty
    return (model(batch) - y).abs().mean()


@program("zero_times_inf", "mm", "an infinity is multiplied by 0, or added to one of the other sign", module="")
def an_infinity_in_a_product(model, batch):
    out = model(batch)
    far = out.masked_fill(out < 2, -math.inf)
    return (far @ torch.tensor([[0.0], [1.0], [1.0], [1.0]])).mean()  # guilty


@made_in_the_step("mul", "this line makes a tensor of data that hold NaN at [1]", module="")
def weights_in_a_list(model, batch):
    weight = torch.tensor([1.0, NAN, 1.0, 1.0])  # guilty
    return (model(batch) * weight).mean()


TABLE_OF_THE_PROGRAM = torch.tensor([1.0, 2, NAN, 4])


@made_in_the_step("add", "other of add, which no op of the step was seen to make, holds NaN at [2]", module="")
def a_table_of_the_program(model, batch):
    return (model(batch) + TABLE_OF_THE_PROGRAM).mean()  # guilty


FAR_TARGETS = torch.tensor([[1.0, INF, INF, 4]])


@made_in_the_step("mse_loss", "target of mse_loss, which no op of the step was seen to make, holds Inf", module="")
def targets_that_are_infinite(model, batch):
    return F.mse_loss(model(batch), FAR_TARGETS)  # guilty


@program("div_by_zero", "div", "1 / 0: the divisor is a number of the program")
def a_division_by_what_is_false(h):
    return h / (len(h) > 5)  # guilty


QUEUE_OF_THE_PROGRAM = torch.tensor([1.0, 2, NAN, 4])


@made_in_the_step("add", "other of add, which no op of the step was seen to make, holds NaN at [2]", module="")
def a_queue_of_which_a_part_is_new(model, batch):
    QUEUE_OF_THE_PROGRAM[:2] = 0.5  # not uninitialised memory
    return (model(batch) + QUEUE_OF_THE_PROGRAM).mean()  # guilty


def an_edge_without_weight():
    return torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, NAN], (2, 2), check_invariants=True), torch.ones(2, 4)


@made_in_the_step("sparse_addmm", "batch[0] holds NaN", batch=an_edge_without_weight, module="")
def a_sparse_matrix(model, batch):
    edges, x = batch
    return model(torch.sparse.mm(edges, x)).mean()  # guilty


def rows_without_weight():
    rows = torch.tensor([[0.0, NAN], [1.0, 0.0]]).to_sparse_csr()
    return rows, torch.ones(2, 4)


@made_in_the_step("mm", "batch[0] holds NaN", batch=rows_without_weight, module="")
def a_sparse_matrix_by_rows(model, batch):
    rows, x = batch
    return model(rows @ x).mean()  # guilty


# ---- what was there before the step --------------------------------------------------------------------------------


@program("parameter_corrupted", "mul", "head.scale was non-finite before the step: 1 of 4", phase="parameter")
class AParameterThatIsNaN(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2, 3, 4]) / torch.tensor([1, 1, 0, 1]))  # guilty

    def forward(self, h):
        return h * self.scale


def fill_some(model, optimizer):
    with torch.no_grad():
        model.head.table[0, 1] = model.head.table[2, 3] = NAN


@program("uninitialized_memory", "mul", "2 of 12 elements", phase="parameter", prepare=fill_some)
class AParameterNobodyFilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, 4).zero_())  # guilty

    def forward(self, h):
        return h * self.table


def fill_all(model, optimizer):
    nn.init.constant_(model.head.lookup, 1e30)


@program(
    "uninitialized_memory",
    "mm",
    "head.lookup holds values of 1e+30",
    [[1e9, 2, 3, 4]],
    phase="parameter",
    prepare=fill_all,
)
class AParameterOfHugeValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = nn.Parameter(torch.empty(4, 3))  # guilty

    def forward(self, h):
        return h @ self.lookup


@contextmanager
def memory_holds_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN, as memory may."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@program("log_of_zero", "masked_fill", "masked_fill puts an infinity where the loss asks for the log")
def a_choice_that_was_masked(h):
    scores = h.masked_fill(h > 3, -INF)  # guilty
    return -torch.distributions.Categorical(logits=scores).log_prob(torch.tensor(3))


@program("zero_over_zero", "div", "0 / 0: the denominator is a sum of zeros, such as a mask that leaves nothing")
def a_mean_by_hand_over_nothing_in_one_row(h):
    keep = torch.ones_like(h)
    keep[0] = 0
    return ((h * keep).sum(1) / keep.sum(1)).sum()  # guilty


@program("zero_over_zero", "div", "0 / 0: the denominator is the spread of values that are all equal")
def equal_values_that_are_standardised(h):
    rewards = torch.ones(8)
    advantages = (rewards - rewards.mean()) / rewards.std(dim=0, keepdim=True)  # guilty
    return h.sum() * advantages.sum()


@program("zero_over_zero", "div", "0 / 0: the denominator is the spread of values that are all equal")
def equal_values_and_the_root_of_their_variance(h):
    rows = torch.zeros_like(h)
    return ((h * 0 - rows) / rows.var(1, keepdim=True).sqrt()).sum()  # guilty


@program("zero_over_zero", "div", "a difference of equal values, such as the maximum and the minimum")
def equal_values_that_are_brought_to_0_and_1(h):
    rows = h * 0 + 3
    return ((rows - rows.min()) / (rows.max() - rows.min())).sum()  # guilty


@program("div_by_zero", "div", "2 / 0: the denominator is the spread of values that are all equal")
def a_signal_over_its_noise(h):
    quiet = torch.zeros(4)
    return ((h * 0 + 2) / quiet.std()).sum()  # guilty


@program("exp_overflow", "sum", "the sum of exponentials up to 3.")
def a_logsumexp_by_hand(h):
    scores = h * 0 + 88.7
    return torch.log(torch.exp(scores).sum())  # guilty


@program("zero_over_zero", "div", "0 / 0: the denominator is a sum of zeros, such as a mask that leaves nothing")
def a_mean_by_hand_over_nothing(h):
    keep = h > 9
    return (h * keep).sum() / keep.sum()  # guilty


@program("nonfinite_constant", "masked_fill", "masked_fill is given a number of the program that is NaN")
def a_nan_that_is_written_down(h):
    return h.masked_fill(h > 3, NAN)  # guilty


@program("nonfinite_constant", "mul", "a number of the program that is NaN")
def a_factor_that_is_nan(h):
    return h * NAN  # guilty


@program("nonfinite_constant", "mul", "a number of the program that is inf")
def a_factor_that_is_infinite(h):
    return h * INF  # guilty


@program("zero_times_inf", "mul", "0 is multiplied by an infinity")
def a_mask_that_is_multiplied_by_a_constant(h):
    return h + (h > 0).float() * 0 * -INF  # guilty


@program("unknown", "special_entr", "no rule fits", [[1, 2, 3, -1]])
def an_op_without_a_rule(h):
    return torch.special.entr(h)  # guilty


@program("uninitialized_memory", "empty", "empty gives memory that", around=memory_holds_nan)
def memory_that_is_half_written(h):
    out = torch.empty(8)  # guilty
    out[:4] = h[0]
    return out * 2


@program("buffer_corrupted", "sub", "buffer head.center held NaN at [0] before the step", phase="buffer")
class ABufferThatIsNaN(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.tensor([0.0, 1, 2, 3]) / torch.tensor([0, 1, 1, 1]))  # guilty

    def forward(self, h):
        return h - self.center


@program("buffer_corrupted", "log", "written into head.seen: log of 0", [[1, 0, 3, 4]], phase="buffer")
class ABufferThatIsWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, h):
        with torch.no_grad():
            self.seen.lerp_(h.mean(0).log(), 0.1)  # guilty
        return h


@program(
    "division_by_near_zero_norm",
    "div",
    "norm; the program itself writes the result into head.axis during the step",
    phase="parameter",
)
class AParameterThatIsWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.axis = nn.Parameter(torch.zeros(4))

    def forward(self, h):
        with torch.no_grad():
            self.axis.div_(self.axis.norm())  # guilty
        return h * self.axis


# ---- the optimizer -------------------------------------------------------------------------------------------------


def adam_in_half(params):
    return torch.optim.Adam(params, lr=1e-3, eps=1e-8)  # guilty


@in_optimizer(
    "optimizer_eps_underflow", "addcdiv", "the eps of 1e-08", [[1, 0, 0, 0]], to=torch.float16, optimizer=adam_in_half
)
def an_optimizer_eps_of_nothing(h):
    return h.float() ** 2


def nadam_without_eps(params):
    return torch.optim.NAdam(params, lr=1e-3, eps=0.0)  # guilty


@in_optimizer("optimizer_eps_underflow", "addcdiv", "since its eps is 0", [[1, 0, 0, 0]], optimizer=nadam_without_eps)
def an_optimizer_eps_of_zero(h):
    return h**2


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=1e-3)


def a_negative_moment(model, optimizer):
    state = optimizer.state[model.body.weight]
    state["step"] = torch.tensor(1.0)
    state["square_avg"] = torch.full_like(model.body.weight, -0.5)  # guilty


@in_optimizer(
    "optimizer_state_corrupted",
    "sqrt",
    "a second moment can never be negative",
    [[0, 0, 0, 0]],
    optimizer=rmsprop,
    prepare=a_negative_moment,
)
def an_optimizer_with_a_negative_moment(h):
    return h


def sgd_with_momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def a_momentum_of_inf(model, optimizer):
    state = optimizer.state[model.body.weight]
    state["momentum_buffer"] = torch.full_like(model.body.weight, INF)  # guilty


@in_optimizer(
    "optimizer_state_corrupted",
    "mul",
    "momentum_buffer of body.weight is non-finite",
    optimizer=sgd_with_momentum,
    prepare=a_momentum_of_inf,
)
def an_optimizer_with_a_momentum_of_inf(h):
    return h


def remember_the_optimizer(model, optimizer):
    a_momentum_of_inf(model, optimizer)
    model.moments = optimizer.state[model.body.weight]


@program(
    "optimizer_state_corrupted",
    "mul",
    "momentum_buffer of body.weight is non-finite before the step",
    optimizer=sgd_with_momentum,
    prepare=remember_the_optimizer,
    phase="optimizer",
    module="",
)
def a_loss_that_uses_the_momentum(model, x):
    ahead = 0.9 * model.moments["momentum_buffer"]  # guilty
    return model(x).mean() + ahead.mean()


def adam_whose_state_is_reset(params):
    return torch.optim.AdamW(params, lr=1e-3)


def one_step(model, optimizer):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.moments = optimizer.state[model.body.weight]


@in_optimizer(
    "optimizer_state_corrupted",
    "sqrt",
    "sqrt of -0.999: a second moment can never be negative",
    optimizer=adam_whose_state_is_reset,
    prepare=one_step,
)
def a_loss_that_writes_to_the_moments(model, x):
    model.moments["exp_avg_sq"].fill_(-1.0)  # guilty
    return model(x).mean()


def adadelta(params):
    return torch.optim.Adadelta(params, lr=INF)  # guilty


@in_optimizer("div_by_zero", "add", "the learning rate is inf", optimizer=adadelta)
def an_optimizer_without_a_rate(h):
    return h


class Trust(Optimizer):
    """Steps as long as the weights are, in the direction of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / p.grad.norm()  # guilty
                p.sub_(group["lr"] * ratio * p.grad)


@in_optimizer("div_by_zero", "div", "2 / 0", optimizer=Trust)
def an_optimizer_of_our_own(h):
    return h * 0


def a_huge_rate(params):
    return torch.optim.ASGD(params, lr=1e38)  # guilty


@in_optimizer("learning_rate_too_high", "add", "lr=1e+38", [[1, 2, 3, 400]], optimizer=a_huge_rate)
def an_optimizer_that_overflows(h):
    return h


# ---- gradients that fp16 cannot hold: what made them large is to blame ---------------------------------------------


@in_fp16_backward(
    "loss_scale_overflow", "to_copy", "multiplied by 1.67772e+07", loss_scale=nanguard.LossScale(initial=2.0**24)
)
def a_loss_scale_that_is_too_high(h):
    return h.float()  # guilty


@in_fp16_backward("loss_scale_overflow", "to_copy", "the loss is multiplied by 1e+06", module="")
def a_loss_scaled_by_hand(model, x):
    out = model(x).float()
    return out.mean() * 1e6  # guilty


@in_fp16_backward("overflow_fp16", "mm", "the loss is a sum over 4000 elements", [[100, 1, 1, 1]] * 1000, module="")
def a_loss_that_is_a_sum(model, x):
    out = model(x).float()
    return out.sum()  # guilty


@in_fp16_backward("overflow_fp16", "to_copy", "makes gradients grow from 0.25 to 2.5e+05")
def a_steep_function(h):
    return h.float() * torch.tensor(1e6)  # guilty


@in_fp16_backward(
    "overflow_fp16",
    "to_copy",
    "makes gradients grow",
    loss_scale=nanguard.LossScale(initial=2.0),
)
def a_steep_function_under_a_small_loss_scale(h):
    return h.float() * torch.tensor(1e7)  # guilty


# ---- what training was heading for ---------------------------------------------------------------------------------


def sentences():
    return [torch.randn(2, 3, 4) for _ in range(30)]


@program(
    "attention_logit_growth",
    "bmm",
    "queries and keys have grown from ... 65504",
    batch=sentences,
    lr=0.5,
    precision="fp16",
)
class AttentionThatGrows(nn.Module):
    """Its loss rewards long queries and keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h):
        h = h.detach()
        q, k = self.q(h), self.k(h)
        scores = q @ k.transpose(1, 2)  # guilty
        return (scores.softmax(-1) @ h).float().mean() - (q.float() ** 2 + k.float() ** 2).mean()


def sentences_and_a_loud_one():
    return [*sentences()[:6], torch.full((2, 3, 4), 400.0)]


@program("overflow_fp16", "bmm", "operands reach 400", batch=sentences_and_a_loud_one, lr=1e-3, precision="fp16")
class AttentionThatIsShouted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h):
        scores = h @ h.transpose(1, 2)  # guilty
        return scores.softmax(-1) * self.scale


def inputs():
    return [3 * torch.randn(8, 4) for _ in range(30)]


@program(
    "gradient_explosion",
    "pow",
    "operands of pow grew from ... since step 0; gradient norms of the last steps",
    batch=inputs,
    lr=5.0,
)
class AStepTooLong(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h):
        out = self.layer(h.detach())
        return (out**2).amax()  # guilty


@program(
    "learning_rate_too_high",
    "pow",
    "head.layer.weight grew from ... in 3 steps of SGD with lr=100000",
    batch=inputs,
    lr=1e5,
)
class AStepFarTooLong(AStepTooLong):
    def forward(self, h):
        out = self.layer(h.detach())
        return (out**2).amax()  # guilty


@program(
    "weight_decay_too_high",
    "pow",
    "head.layer.weight grew from ... and weight_decay=1e+09: the decay alone multiplies weights by -1e+08 in each step",
    batch=inputs,
    lr=0.1,
    decay=1e9,
)
class ADecayFarTooHigh(AStepTooLong):
    def forward(self, h):
        out = self.layer(h.detach())
        return (out**2).amax()  # guilty


def inputs_and_a_huge_one():
    return [*inputs()[:6], torch.full((8, 4), 1e25)]


@program("overflow_any_precision", "pow", "operands reach 9.9", batch=inputs_and_a_huge_one, lr=1e-4)
class AnInputTooLarge(nn.Module):
    def forward(self, h):
        return h**2  # guilty


@program(
    "nondeterministic_hardware_fault",
    "mm",
    "finite 2 times in a row",
    batch=inputs,
    lr=1e-3,
    phase="backward",
    module="body",
)
class AHookThatStrikesOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h):
        h = h * 1.0
        h.register_hook(self.strike)  # guilty
        return h

    def strike(self, grad):
        self.calls += 1
        return grad * NAN if self.calls == 4 else grad


# ---- innocent: what is meant, dropped or overwritten, with a fault elsewhere ---------------------------------------


@program("log_of_zero", "log", "log of 0", [[1, 0, 3, 4]])
def innocent_causal_mask(h):
    scores = h[:, :, None] * h[:, None, :]
    hidden = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return weights.sum(-1) * h.log()  # guilty


@program("sqrt_of_negative", "sqrt", "sqrt of -1", [[1, -1, 3, 4]])
def innocent_mask_that_is_added(h):
    mask = torch.full((4, 4), -INF).triu(1)
    weights = (h[:, :, None] + mask).softmax(-1)
    return weights.sum(-1) * h.sqrt()  # guilty


@program("div_by_zero", "div", "1 / 0", [[1, 0, 3, 4]])
def innocent_log_of_a_mask(h):
    allowed = torch.tensor([1.0, 0, 1, 1])
    weights = (h + allowed.log()).softmax(-1)
    return weights + h[:, 0] / h[:, 1]  # guilty


@program("log_of_negative", "log", "log of -2", [[1, -2, 3, 4]])
def innocent_padding_in_log_space(h):
    padded = F.pad(h, (0, 2), value=-math.inf)
    total = torch.logsumexp(padded, -1)
    return total + h.log().sum()  # guilty


@program("exp_overflow", "exp", "exp of 100", [[1, 0, 3, 100]], harmless="log mul div")
def innocent_metrics(h):
    with torch.no_grad():
        entropy = (h.log() * h).sum()
        share = h / h[:, 1:2]
    print(end=f"{entropy.item():.0f}{share.sum().item():.0f}"[:0])
    return h.exp()  # guilty


@in_backward("sqrt_grad_at_zero", "sqrt", "derivative of sqrt at 0", [[1, 0, 3, 4]], harmless="log")
def innocent_detached_weight(h):
    weight = h.detach().log().clamp(min=0)
    return weight + h.sqrt()  # guilty


@program("zero_over_zero", "div", "0 / 0", [[1, 0, 3, 0]], harmless="reciprocal")
def innocent_safe_where(h):
    safe = torch.where(h == 0, torch.ones_like(h), h)
    inverse = torch.where(h == 0, torch.zeros_like(h), 1 / safe)
    return inverse + h[:, 1:2] / h[:, 3:]  # guilty


@program("acos_asin_domain", "acos", "acos of 3", [[1, 0, 3, 0]], harmless="div sqrt")
def innocent_value_nobody_uses(h):
    unused = (h / h).sqrt()
    return h.acos() if unused is not None else h  # guilty


@program("pow_negative_base", "pow", "-4 to the power of 0.5", [[-4, 0, 3, 2]])
def innocent_max_pool(h):
    best = F.max_pool1d(h[:, None], 3, stride=1, padding=1).flatten()
    return best + h**0.5  # guilty


@program("log_of_zero", "log", "log of 0", [[1, 0, 3, 4]], harmless="ctc_loss")
def innocent_ctc(h):
    logs = h.log_softmax(-1)[:, None]
    loss = F.ctc_loss(logs, torch.tensor([[1, 2]]), torch.tensor([1]), torch.tensor([2]), zero_infinity=True)
    return loss + h.log()  # guilty


@program("inf_minus_inf", "sub", "two infinities", around=memory_holds_nan)
def innocent_memory_that_is_overwritten(h):
    out = torch.empty(4)
    out.copy_(h[0])
    far = h + torch.full_like(h, INF)
    return out + (far - far)  # guilty


@program("log_of_zero", "log", "log of 0", [[1, 0, 3, 4]], around=memory_holds_nan)
def innocent_memory_that_is_filled_part_by_part(h):
    out = torch.empty(4)
    for place in range(4):
        out[place] = h[0, place].log()  # guilty
    return out


@program("std_of_single_element", "std", "std over 1 element", [[1, 0, 3, 4]], harmless="div")
def innocent_nan_to_num(h):
    share = (h.detach() / h.detach()).nan_to_num()
    return share * h.std(0)  # guilty


@program("masked_softmax_all_neg_inf", "softmax", "every entry of a row is -inf", [[1, 0, 3, 4]], harmless="log")
def innocent_best_of_logs(h):
    best = h.detach().log().amax()
    dead = h.masked_fill(h > -1, -math.inf)
    return best * dead.softmax(-1)  # guilty


@program("log_of_zero", "log", "log of 0", [[1, 0, 3, 4]])
class InnocentMaskInABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, h):
        weights = (h[:, :, None] + self.mask).softmax(-1)
        return weights.sum(-1) * h.log()  # guilty


@program("log_of_zero", "add", "add puts an infinity where the loss asks for the log of a probability, which is 0")
class InnocentMaskInABufferThatIsMisused(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([-INF, 0, 0, 0]))

    def forward(self, h):
        scores = h + self.mask  # guilty
        return F.cross_entropy(scores, torch.tensor([0]))


# ---- tests ---------------------------------------------------------------------------------------------------------


def as_parameter(one: Program) -> Any:
    return pytest.param(one, marks=pytest.mark.xfail(strict=True, reason=one.xfail) if one.xfail else ())


@pytest.mark.filterwarnings("ignore:.*(degrees of freedom|Sparse ):UserWarning")
@pytest.mark.parametrize("one", [as_parameter(one) for one in PROGRAMS], ids=lambda one: one.name)
def test_each_program_is_diagnosed(one: Program) -> None:
    found = diagnosed(one)
    assert (found.cause, found.op, found.module, found.phase) == (one.cause, one.op, one.module, one.phase)
    assert all(part in found.because for part in one.says.split(" ... "))
    assert found.source is not None
    assert found.source.file == __file__
    assert (found.source.line, found.source.text) in one.marked()
    assert {link.op for link in found.harmless} <= set(one.harmless.split())


def test_a_weight_that_was_damaged_between_two_steps() -> None:
    model = Net(Head(torch.tanh))
    guard = nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    for step in range(4):
        if step == 3:
            model.body.weight.data[1, 2] = NAN
        guard.step(mean, torch.ones(2, 4))
    found = guard.incidents[0].diagnosis
    assert found is not None
    assert (found.phase, found.cause, found.module, found.op) == ("parameter", "parameter_corrupted", "body", "")
    assert "body.weight became non-finite after step 2" in found.because


def test_a_learning_rate_that_is_infinite_is_named_although_its_update_was_not_seen() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: INF if step == 2 else 1.0)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.cause, found.since_step) == ("nonfinite_constant", 2)
    assert "the learning rate of step 2 was inf" in found.because


def test_a_learning_rate_that_rises_at_once_is_blamed_for_the_explosion_after_it() -> None:
    with nanguard.install() as autopilot:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(16):
            optimizer.param_groups[0]["lr"] = 0.01 if step < 10 else 100.0
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert found.cause == "learning_rate_too_high"
    assert found.because.startswith("the learning rate rose from 0.01 to 100 at step 10; ")


def test_data_are_used_first_by_an_op_that_computes() -> None:
    with nanguard.install() as autopilot:
        model = nn.GRU(3, 4, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        series = torch.randn(2, 40, 3)
        series[1, 13, 2] = NAN
        for start in range(0, 40, 10):
            optimizer.zero_grad()
            model(series[:, start : start + 10])[0].square().mean().backward()
            optimizer.step()
    found = autopilot.incidents[0].diagnosis
    assert found is not None
    assert (found.cause, found.op) == ("input_nonfinite", "mm")


def squares(h):
    return h * h


@pytest.mark.parametrize(
    ("x", "to", "precision", "cause"),
    [
        (300.0, torch.float16, "fp32", "overflow_fp16"),
        (300.0, torch.bfloat16, "fp32", None),
        (300.0, torch.float32, "fp32", None),
        (300.0, torch.float32, "fp16", "overflow_fp16"),
        (300.0, torch.float32, "bf16", None),
        (1e25, torch.bfloat16, "fp32", "overflow_any_precision"),
        (1e25, torch.float32, "fp32", "overflow_any_precision"),
        (1e25, torch.float32, "bf16", "overflow_any_precision"),
    ],
    ids=str,
)
def test_one_program_in_every_format(x: float, to: torch.dtype, precision: Any, cause: str | None) -> None:
    model, batch = Net(Head(squares)).to(to), torch.full((2, 4), x).to(to)
    if cause is None:
        with pytest.raises(nanguard.ProtocolError, match="nothing to diagnose"):
            nanguard.diagnose(model, mean, batch, precision=precision)
        return
    found = nanguard.diagnose(model, mean, batch, precision=precision)
    assert (found.cause, found.op, found.module, found.phase) == (cause, "mul", "head", "forward")
    assert found.source is not None
    assert found.source.text == "return h * h"


# ---- nothing to find -----------------------------------------------------------------------------------------------


def attention_with_a_mask(h):
    scores = h[:, :, None] * h[:, None, :]
    return scores.masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf).softmax(-1)


def attention_to_nobody(h):
    h = h[:, None, :, None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=torch.zeros(4, 4, dtype=torch.bool))


def scores_padded_in_log_space(h):
    return F.pad(h, (0, 2), value=-math.inf).logsumexp(-1)


def a_mask_over_other_classes(h):
    return F.cross_entropy(h.masked_fill(torch.tensor([True, True, False, False]), -math.inf), torch.tensor([2]))


def a_metric_of_nan(h):
    with torch.no_grad():
        h.log().div(0).mean()
    return h


def a_weight_of_nan_that_is_dropped(h):
    return h.detach().div(h.detach()).nan_to_num() * h


def a_value_nobody_uses(h):
    (h / h).sqrt().log()
    return h


def a_safe_where(h):
    return torch.where(h == 0, 0, torch.where(h == 0, 1, h).log())


def a_pool(h):
    return F.max_pool1d(h[:, None], 3, padding=1)


def an_alignment_counted_as_zero(h):
    logs = h.log_softmax(-1)[:, None]
    return F.ctc_loss(logs, torch.tensor([[1, 2]]), torch.tensor([1]), torch.tensor([2]), zero_infinity=True)


def memory_that_is_overwritten(h):
    out = torch.empty(8)
    out[:4], out[4:] = h[0], 0
    return out


def directions(h):
    return F.normalize(h * 0) + h.std(dim=1, keepdim=True) + (h - h).norm()


@pytest.mark.parametrize(
    "harmless",
    [
        attention_with_a_mask,
        attention_to_nobody,
        scores_padded_in_log_space,
        a_mask_over_other_classes,
        a_metric_of_nan,
        a_weight_of_nan_that_is_dropped,
        a_value_nobody_uses,
        a_safe_where,
        a_pool,
        an_alignment_counted_as_zero,
        memory_that_is_overwritten,
        directions,
    ],
    ids=lambda function: function.__name__,
)
def test_nothing_is_found_where_nothing_is_wrong(harmless: Callable[[Tensor], Tensor]) -> None:
    model = Net(Head(harmless))
    with memory_holds_nan(), pytest.raises(nanguard.ProtocolError, match="nothing to diagnose"):
        nanguard.diagnose(model, mean, torch.tensor([[1.0, 0, 3, 4]]), precision="fp32")


# ---- a NaN that was there before is inherited ------------------------------------------------------------------------

OF_ONE = (
    *("exp", "expm1", "exp2", "sinh", "cosh", "log", "log2", "log10", "log1p", "logit", "sqrt", "rsqrt", "reciprocal"),
    *("acos", "asin", "acosh", "atanh", "erfinv", "lgamma", "digamma", "tan", "square", "sigmoid", "neg"),
)
BY_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in OF_ONE if hasattr(torch, name)},
    "log_sigmoid": F.logsigmoid,
    "xlogy": lambda h: torch.xlogy(h, h),
    "div": lambda h: 1 / h,
    "div_by_itself": lambda h: h / h,
    "remainder": lambda h: h % 2,
    "addcdiv": lambda h: torch.addcdiv(h, h, h),
    "pow": lambda h: h**0.5,
    "pow_of_a_tensor": lambda h: h**h,
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "normalize": F.normalize,
    "cosine_similarity": lambda h: F.cosine_similarity(h, h),
    "cdist": lambda h: torch.cdist(h, h),
    "std": lambda h: h.std(0),
    "var": lambda h: h.var(0),
    "mean": lambda h: h.mean(0),
    "prod": lambda h: h.prod(1),
    "cumprod": lambda h: h.cumprod(1),
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "logsumexp": lambda h: h.logsumexp(-1),
    "layer_norm": lambda h: F.layer_norm(h, (4,), eps=0.0),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "mm": lambda h: h @ h.t(),
    "half": lambda h: h.half(),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None]),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.tensor([0, 1])),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    "masked_fill": lambda h: h.masked_fill(h > 3, -INF).exp(),
    "clamp": lambda h: h.clamp(max=INF),
    "where": lambda h: torch.where(h > 0, h.log(), h),
    "logdet": lambda h: torch.logdet(h @ h.t()),
}


@pytest.mark.parametrize("name", BY_RULES)
def test_of_a_nan_no_rule_is_a_cause(name: str) -> None:
    """Neither in a replay, nor by the graph that autograd keeps."""
    function, x = BY_RULES[name], torch.tensor([[1.0, 2, NAN, 0.5], [1, 2, 3, 0.5]])
    diagnosis = nanguard.diagnose(Net(Head(function)), mean, x, depth="brief", precision="fp32")
    assert (diagnosis.cause, diagnosis.because) == ("input_nonfinite", "batch holds NaN at [0, 2]")

    h = torch.tensor([[1.0, 2, 3, 0.5]] * 2, requires_grad=True)
    loss = function(h * 1 + x * 0).float().mean()
    finding = graph_probe.examine_graph([loss], None)
    assert finding is None or finding.data


# ---- none is left out ----------------------------------------------------------------------------------------------


def test_every_cause_is_expected_of_some_program() -> None:
    expected = {one.cause for one in PROGRAMS if not one.xfail}
    assert expected >= {row.name for row in causes.TABLE} - {"unknown"}


@pytest.mark.parametrize(
    ("op", "advice"),
    [
        ("acos", "x.clamp(-1 + 1e-6, 1 - 1e-6)"),
        ("acosh", "x.clamp(min=1 + 1e-6)"),
        ("special_ndtri", "x.clamp(1e-6, 1 - 1e-6)"),
    ],
)
def test_advice_fits_the_op(op: str, advice: str) -> None:
    """What keeps an argument in the domain of one function takes it out of that of another."""
    found = causes.with_remedy(Diagnosis(phase="forward", cause="acos_asin_domain", op=op))
    assert advice in found.fix.words


@pytest.mark.parametrize(("confidence", "advice"), [("certain", "correct this line"), ("likely", "find what wrote")])
def test_advice_for_a_damaged_parameter_is_about_the_line_that_was_seen_to_write(confidence: Any, advice: str) -> None:
    damaged = Diagnosis(phase="parameter", cause="parameter_corrupted", op="div", confidence=confidence)
    assert advice in causes.with_remedy(damaged).fix.words


def test_every_pattern_of_advice_is_of_an_op() -> None:
    ops = {name.strip("_") for name in dir(torch.ops.aten)}
    patterns = [pattern for row in causes.TABLE for pattern, _ in row.fixes]
    assert [pattern for pattern in patterns if not fnmatch.filter(ops, pattern)] == []


@pytest.mark.filterwarnings("ignore:.*(degrees of freedom|Sparse ):UserWarning")
def test_every_rule_decides_some_program() -> None:
    for one in PROGRAMS:
        diagnosed(one)
    assert {row.rule.__name__ for row in causes.TABLE if row.rule} <= DECIDED.keys()


# ---- a cause is one row --------------------------------------------------------------------------------------------


def outcomes_of(node: ast.expr | None) -> list[str]:
    """The strings that an expression can be: ``"a" if x else "b"``."""
    if isinstance(node, ast.IfExp):
        return outcomes_of(node.body) + outcomes_of(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def causes_named_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "cause":
            yield from outcomes_of(node.value)
        elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "cause":
            yield from outcomes_of(node.comparators[0])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                yield from (
                    name for to, value in pairs if getattr(to, "id", "") == "cause" for name in outcomes_of(value)
                )
        elif (
            isinstance(node, ast.Return)
            and path.stem.startswith(("rules", "causes"))
            and isinstance(node.value, ast.Tuple)
        ):
            yield from outcomes_of(node.value.elts[0])


def test_every_cause_that_the_source_names_is_a_row() -> None:
    package = Path(nanguard.__file__).parent
    files = [*(package / "diagnosis").glob("*.py"), package / "recovery" / "incident_recorder.py"]
    named = {name for path in files for name in causes_named_in(path)}
    named |= {name for name, _ in graph_probe._BY_RESULT.values()} | set(process._OVERFLOWS)
    for node in ast.parse((package / "replay" / "rerun.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_BY_HISTORY", "_OVERFLOWS", "_DAMAGE"):
            named |= set(ast.literal_eval(node.value))
    names = [row.name for row in causes.TABLE]
    assert named == set(names)
    assert len(names) == len(set(names))


def test_the_rules_are_tried_in_this_order() -> None:
    assert [row.rule.__name__.strip("_") for row in causes.TABLE if row.rule] == [
        *("given", "ctc", "custom_backward", "discarded", "root_gradient", "exp", "log"),
        *(
            "determinant",
            "divide",
            "sqrt",
            "power",
            "domain",
            "gamma",
            "ignored_labels",
            "statistic",
            "softmax",
            "normalisation",
            "norm_inside",
            "infinities",
        ),
        *("overflow", "over_nothing"),
    ]


def test_a_diagnosis_of_a_cause_without_a_row_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="cause 'bad_luck' has no row"):
        causes.with_remedy(Diagnosis(phase="forward", cause="bad_luck"))


def test_a_log_of_an_older_version_shows_the_name_of_the_cause() -> None:
    told = causes.with_remedy(Diagnosis(phase="forward", cause="log_of_zero")).as_dict()
    assert Diagnosis.from_dict(told).words == "logarithm of zero"
    del told["title"]
    assert Diagnosis.from_dict(told).words == "log of zero"


def test_a_new_cause_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rule(case: Case) -> tuple[str, str] | None:
        return ("silent_room", "nobody spoke, and the level is 0") if case.op == "log10" else None

    row = causes.CauseRow(
        name="silent_room",
        title="decibels of silence",
        fix="record something louder",
        helps=("fix_data",),
        rule=rule,
    )
    monkeypatch.setattr(causes, "TABLE", (row, *causes.TABLE))
    model = Net(Head(torch.log10))
    guard = nanguard.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path, precision="fp32")
    guard.step(mean, torch.zeros(1, 4))
    guard.close()
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.remedies[0]) == ("silent_room", "fix_data")
    command = [sys.executable, "-m", "nanguard", "explain", str(tmp_path)]
    explained = subprocess.run(
        command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=True
    )
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    for text in (panel(incident), explained.stdout, page):
        for words in (row.title, "nobody spoke, and the level is 0", row.fix):
            assert words in text.lower()
    again = nanguard.read_run(tmp_path).incidents[0].diagnosis
    assert again is not None
    assert again.words == row.title
