"""Guarding with the host in the know: it reads every measurement before it lets the optimizers step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from nanguard.bench import Bench
from nanguard.measure import Group, Reply
from nanguard.records import Outcome
from nanguard.window import Window


class Eager:
    """One sync a step, where the device is not the CPU."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._good, self._bad = torch.zeros((), device=bench.device), torch.ones((), device=bench.device)

    def before(self) -> None:
        """Nothing is ever in flight."""

    def settle(self) -> None:
        """Nothing is ever in flight."""

    def note(self, window: Window) -> None:
        self._bench.buffers.note_()

    def finish(self, window: Window) -> None:
        bench = self._bench
        groups = bench.gather(window)
        reply = self._ask(window, groups)
        verdict, action = bench.respond(bench.read(window, reply))
        if bench.drops_gradients and verdict.reading.found == ("gradients",):
            # Asked again by all ranks together, whatever each of them has dropped: their answers must not differ.
            _drop_gradients(groups, reply.bad_params)
            groups = bench.roll.call()
            left = bench.read(window, self._ask(window, groups))
            verdict, action = bench.respond(replace(left, dropped_gradients=verdict.reading.gradients))
        applied = action.response in ("apply", "drop_gradients")
        if applied:
            bench.clipper.clip_(groups, bench.board.norms)
            bench.shield.step()
            bench.update_average()
            bench.clipper.remember_()
            bench.schedule.tick()
        else:
            bench.buffers.undo_()
        if bench.scaler is not None:
            bench.scaler.update_(self._good if applied else self._bad)
        bench.shield.zero_grad()
        bench.journal.record(Outcome(verdict=verdict, action=action, applied=applied))

    def _ask(self, window: Window, groups: list[Group]) -> Reply:
        """Measures, and waits for the answer: the one sync."""
        self._bench.measure(window, groups)
        self._bench.board.agree_()
        return Reply(window.layout, self._bench.board.filled.tolist())


def _drop_gradients(groups: list[Group], bad: Sequence[nn.Parameter]) -> None:
    """Leaves the bad gradients out, before any clipping: None, so that no momentum or decay moves the parameter.

    Where all are bad there is no step to save, and they stay.
    """
    if len(bad) < sum(len(group.params) for group in groups):
        for param in bad:
            param.grad = None
