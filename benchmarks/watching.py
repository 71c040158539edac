"""Sees from outside what becomes of every batch: from weights, learning rates and dtypes alone, whoever trains.

No contender is asked what it did. The weights of each optimizer are read before every forward pass and around every
step. A step that moves them from a known state to another adds its batches to the history of the new state; weights
that are back in a known state were rolled back, and have its history. What counts is the history of the final weights.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divergences import Run
from nanguard.testing import inject
from tasks import Batch

History = tuple[Any, ...]
"""``(the history before, ids of the batches of the last step)``, or nothing at the start."""


class Lineage:
    """The states that the weights of one optimizer have been in, and which batches have made each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.applied, self._edited = set[int](), set[bytes]()
        self._histories, self._weights = dict[bytes, History](), list[tuple[bytes, Tensor]]()
        self._read()
        self._remember(())
        self._left = self._now, self._moments

    def look(self) -> None:
        """Reads what is there now. What is unknown was made of the known state that is nearest to it."""
        self._read()
        if self._now not in self._histories:
            near = min(self._weights, key=lambda known: _distance(known[1], self._flat))[0]
            self._remember(self._histories[near])
            self._edited.add(self._now)

    def moved(self) -> str | None:
        """What was done to the weights or the optimizer state since the last step left them."""
        self.look()
        before, self._left = self._left, (self._now, self._moments)
        if before == self._left:
            return None
        return "edited" if self._now == before[0] or self._now in self._edited else "rolled back"

    def hit(self) -> None:
        """The fault of the run has struck: what the weights are made of is as before."""
        history = self._histories[self._now]
        self._read()
        self._remember(history)
        self._left = self._now, self._moments

    def stepped(self, ids: tuple[int, ...], nan: set[int]) -> None:
        """The optimizer has stepped on the batches ``ids``; the loss of ``nan`` was NaN."""
        before = self._now, self._moments
        self._read()
        if before == (self._now, self._moments):
            return  # a step without gradients, or a fused one that was told to do nothing
        if self._flat.isfinite().all():
            ids = tuple(i for i in ids if i not in nan)  # a NaN cannot be in finite weights: it was left out
        self.applied.update(ids)
        history = self._histories[before[0]], ids
        if self._now == before[0]:  # an update of nothing is in the weights too
            self._histories[self._now] = history
        self._remember(history)
        self._left = self._now, self._moments

    def batches(self) -> set[int]:
        """The batches that the weights are made of now."""
        found, history = set[int](), self._histories[self._now]
        while history:
            history, ids = history
            found.update(ids)
        return found

    def _read(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._flat = torch.cat([p.detach().float().flatten() for p in parameters])
        states = [v for p in parameters for v in self.optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
        self._now = _digest(self._flat)
        self._moments = _digest(torch.cat([v.detach().float().flatten() for v in states])) if states else b""

    def _remember(self, history: History) -> None:
        if self._now not in self._histories:
            self._histories[self._now] = history
            self._weights.append((self._now, self._flat))


class Watch:
    """Watches one run while it is open: ``with Watch(run) as watch``. Contenders train on ``watch.loss``.

    The faults of the run are injected here, the same for all: they belong to the batch being computed, and a weight or
    moment that was hit once is not hit again.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.batch = run, -1
        self.passes = Counter[int]()
        self._changes = Counter[str]()
        self._window, self._nan = list[int](), set[int]()
        self._dtypes, self._dtypes_before = dict[str, torch.dtype](), dict[str, torch.dtype]()
        self._rates = [optimizer.param_groups[0]["lr"] / run.schedule(0) for optimizer in run.optimizers]
        self._factors = [1.0 for _ in run.optimizers]
        self._lineages = [Lineage(optimizer) for optimizer in run.optimizers]
        self._injector = inject(run.model, *run.faults, optimizer=run.optimizers, clock=lambda: self.batch)
        self._handles = list[Any]()

    def __enter__(self) -> Watch:
        for number, optimizer in enumerate(self.run.optimizers):
            self._handles += [
                optimizer.register_step_pre_hook(partial(self._before_step, number)),
                optimizer.register_step_post_hook(partial(self._after_step, number)),
            ]
        leaves = [(name, module) for name, module in self.run.model.named_modules() if not list(module.children())]
        self._handles += [module.register_forward_hook(partial(self._saw_output, name)) for name, module in leaves]
        self._injector.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._injector.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._count_moves()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss function of the run, watched. A pass that no step follows may look at any weights it likes."""
        for lineage in self._lineages:
            lineage.look()
        if batch.id % self.run.accumulate == 0:
            self._window = []
        self._window.append(batch.id)
        self.passes[batch.id] += 1
        self.batch, hits = batch.id, len(self._injector.fired)
        loss = self.run.loss_fn(model, batch)
        (self._nan.add if loss.isnan().item() else self._nan.discard)(batch.id)
        if len(self._injector.fired) > hits:
            for lineage in self._lineages:
                lineage.hit()
        return loss

    # ---- what was seen -----------------------------------------------------------------------------------------------

    def lost(self) -> int:
        """Batches of the run whose update is not in the weights: left out, or undone and not made again.

        With several optimizers a batch counts as lost unless all of them have made its update.
        """
        whole = set.intersection(*(lineage.batches() for lineage in self._lineages))
        return sum(batch.id not in whole for batch in self.run.batches)

    def recomputed(self) -> int:
        """Forward passes beyond the first of each batch."""
        return self.passes.total() - len(self.passes)

    def interventions(self) -> dict[str, int]:
        """How often something was changed, by kind: batches never applied, roll-backs, edits, rates, precision."""
        applied = set.intersection(*(lineage.applied for lineage in self._lineages))
        skipped = sum(i not in applied for i in self.passes)
        return {kind: n for kind, n in {"skipped": skipped, **self._changes}.items() if n}

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _count_moves(self) -> None:
        self._changes.update({kind for lineage in self._lineages if (kind := lineage.moved())})

    def _before_step(self, number: int, *unused: object) -> None:
        self._count_moves()
        before, self._dtypes_before = self._dtypes_before, dict(self._dtypes)
        self._changes["precision"] += any(before.get(name, dtype) != dtype for name, dtype in self._dtypes.items())
        due = self._rates[number] * self.run.schedule(self.run.schedulers[number].last_epoch)
        factor = self.run.optimizers[number].param_groups[0]["lr"] / due if due else self._factors[number]
        if not math.isclose(factor, self._factors[number], rel_tol=1e-6):
            self._changes["learning rate"] += 1
            self._factors[number] = factor

    def _after_step(self, number: int, *unused: object) -> None:
        self._lineages[number].stepped(tuple(self._window), self._nan)

    def _saw_output(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        self._dtypes[name] = (output[0] if isinstance(output, tuple) else output).dtype


def _digest(flat: Tensor) -> bytes:
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


def _distance(a: Tensor, b: Tensor) -> float:
    distance = (a - b).norm().item()
    return distance if math.isfinite(distance) else math.inf
