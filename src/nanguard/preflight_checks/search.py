"""A search, by gradients, for inputs or weights that bring the operand of a dangerous op to the edge of its domain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanguard.preflight_checks.edges import DangerSite, EdgeWatch
from nanguard.preflight_checks.ranges import TensorRange
from nanguard.preflight_checks.step_runner import StepRunner, copied
from nanguard.state.trees import exchanged, named_tensors

_FIRST_STEP, _SMALLEST_STEP, _MOST_STEPS = 0.5, 1e-4, 40
REACH = 4.0
"""Weights may move by so many times the typical size of the weights of their tensor."""

_FRESH = 0.02
"""The typical size of weights that begin with 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """A batch that brings an op nearer to its edge. ``crosses``: a denominator has both signs, now or before."""

    batch: Any
    crosses: bool


class Searcher:
    """Searches one program, from one batch. Call everything inside ``runner.untouched()``."""

    def __init__(self, runner: StepRunner, batch: Any, ranges: Mapping[str, TensorRange]) -> None:
        self._runner, self._ranges = runner, ranges
        self._start = batch
        self._names = self._real_names()
        self._params = [p for p in runner.parameters if p.is_floating_point()]
        self._home = [p.detach().clone() for p in self._params]
        self._reach = [REACH * _typical_size(p) for p in self._home]

    def sites(self, *, in_weights: bool) -> list[DangerSite]:
        """The dangerous ops whose operand depends on the numbers of the batch, or else on the weights."""
        watch, leaves = self._watched(self._start)
        points = self._params if in_weights else leaves
        return [] if watch is None else [site for site, margin in watch.margins().items() if _moves(margin, points)]

    def push(self, site: DangerSite, *, in_weights: bool) -> Iterator[Pushed]:
        """Nearer and nearer to the edge: over inputs in the range of the data, with ``in_weights`` over weights too.

        Follows the sign of the gradient, and if that does not help, the gradient; then with smaller steps. When it
        yields, the weights are those it is about.
        """
        params = self._params if in_weights else []
        best, step, is_signed = math.inf, _FIRST_STEP, True
        batch, good = self._start, (self._start, [p.detach().clone() for p in params])
        grads: list[Tensor | None] = []
        for _ in range(_MOST_STEPS):
            watch, leaves = self._watched(batch)
            margin = None if watch is None else watch.margins().get(site)
            value = math.nan if margin is None else float(margin.detach())
            if watch is not None and margin is not None and value < best:
                best, good = value, (batch, [p.detach().clone() for p in params])
                grads = _gradients(margin, [*leaves, *params])
                yield Pushed(batch=batch, crosses=watch.crosses(site))
            elif margin is not None and math.isnan(value):  # what feeds the op has become NaN
                yield Pushed(batch=batch, crosses=False)
                return
            else:
                is_signed = not is_signed
                step /= 4 if is_signed else 1
            if step < _SMALLEST_STEP or not any(grad is not None and bool(grad.any()) for grad in grads):
                return
            ways = [None if grad is None else _way(grad, is_signed) for grad in grads]
            batch = self._moved(good[0], step, ways[: len(leaves)])
            if in_weights:
                self._move_weights(params, good[1], step, ways[len(leaves) :])

    def _moved(self, batch: Any, step: float, grads: list[Tensor | None]) -> Any:
        now, new = dict(named_tensors(batch)), {}
        for name, grad in zip(self._names, grads, strict=True):
            if grad is not None:
                low, high = self._ranges[name].low, self._ranges[name].high
                new[id(now[name])] = (now[name] - step * (high - low) * grad).clamp(low, high)
        return exchanged(batch, new)

    @torch.no_grad()
    def _move_weights(self, params: list[Tensor], good: list[Tensor], step: float, grads: list[Tensor | None]) -> None:
        for param, now, grad, home, reach in zip(params, good, grads, self._home, self._reach, strict=True):
            moved = now if grad is None else now - step * reach * grad
            param.copy_(moved.clamp(home - reach, home + reach))

    def _real_names(self) -> list[str]:
        tensors = dict(named_tensors(self._start))
        known = (self._ranges[name] for name in tensors)
        return [e.name for e in known if e.is_free and e.low < e.high and tensors[e.name].is_floating_point()]

    def _watched(self, batch: Any) -> tuple[EdgeWatch | None, list[Tensor]]:
        """The margins, and the numbers of the batch as leaves. None if the program does not accept the batch."""
        whole = copied(batch)
        tensors = dict(named_tensors(whole))
        leaves = [tensors[name].requires_grad_() for name in self._names]
        used = {id(leaf): leaf.clone() for leaf in leaves}  # programs may write to what they get
        watch = EdgeWatch()
        try:
            with watch:
                self._runner.loss_of(exchanged(whole, used))
        except Exception:
            return None, leaves
        return watch, leaves


def _typical_size(weights: Tensor) -> float:
    return (float(weights.float().square().mean().sqrt()) if weights.numel() else 0.0) or _FRESH


def _gradients(margin: Tensor, points: Sequence[Tensor]) -> list[Tensor | None]:
    if not margin.requires_grad or not points:
        return [None] * len(points)
    try:
        return list(torch.autograd.grad(margin, points, allow_unused=True, retain_graph=True))
    except RuntimeError:  # the program wrote to a tensor of the graph, or it has a backward pass of its own
        return [None] * len(points)


def _way(grad: Tensor, is_signed: bool) -> Tensor:
    """The direction of a step whose largest entry is 1."""
    size = grad.abs().amax()
    return grad.sign() if is_signed or not 0 < float(size) < math.inf else grad / size


def _moves(margin: Tensor, points: Sequence[Tensor]) -> bool:
    return any(grad is not None for grad in _gradients(margin, points))
