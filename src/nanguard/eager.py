"""Guarding with the host in the know: it reads every measurement before it lets the optimizers step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from nanguard.bench import Bench
from nanguard.measure import Group, Reply
from nanguard.records import Action, Means, Outcome, Reading, Verdict
from nanguard.recovery.climber import Climber
from nanguard.window import LAG, Window


class Eager:
    """One sync a step, where the device is not the CPU."""

    def __init__(self, bench: Bench, climber: Climber) -> None:
        self._bench, self._climber = bench, climber
        self._good = torch.zeros((), dtype=torch.float32, device=bench.device)
        self._bad = torch.ones_like(self._good)
        self._unwatched: deque[tuple[Window, Reading]] = deque()

    def before(self) -> None:
        """Looks at the trend of the loss as late as the other way of guarding does, so that both do the same."""
        while len(self._unwatched) >= LAG:
            self._watch()

    def settle(self) -> None:
        """Not in the middle of a step, which going back would tear apart."""
        window = self._bench.window
        if window is None or not window.losses:
            self._catch_up()

    def is_verified(self) -> bool:
        return True

    def drop_in_flight(self) -> None:
        self._unwatched.clear()

    def note(self, window: Window) -> None:
        bench = self._bench
        bench.buffers.note_()
        window.training = [(module, module.training) for module in bench.modules]

    def finish(self, window: Window) -> None:
        bench = self._bench
        window.lrs = bench.schedule.known_rates
        groups = bench.gather(window)
        reply = self._ask(window, groups)
        verdict = bench.judge(bench.read(window, reply))
        action = Action(response="apply")
        if bench.drops_gradients and verdict.kind == "nonfinite":
            could = replace(verdict, means=Means(can_drop_gradients=True))
            action = bench.policy.decide(bench.journal.history, could)
        if action.response == "drop_gradients":
            # Asked again by all ranks together, whatever each of them has dropped: their answers must not differ.
            _drop_gradients(groups, reply.bad_params)
            groups = bench.roll.call()
            left = bench.read(window, self._ask(window, groups))
            verdict = bench.judge(replace(left, dropped_gradients=verdict.reading.gradients))
        if verdict.kind == "healthy":
            self._apply(window, groups, verdict, action)
        else:
            self._refuse(window, verdict)

    def _apply(self, window: Window, groups: list[Group], verdict: Verdict, action: Action) -> None:
        bench = self._bench
        bench.clipper.clip_(groups, bench.board.norms)
        self._climber.fence()
        with bench.looking_at_update() if bench.is_careful else contextlib.nullcontext() as spoiled:
            bench.shield.step()
        if spoiled:
            reading = replace(verdict.reading, found=("update",))
            self._refuse(window, replace(verdict, kind="nonfinite", reading=reading))
            return
        bench.update_average()
        bench.clipper.remember_()
        bench.schedule.tick()
        if bench.scaler is not None:
            bench.scaler.update_(self._good)
        bench.shield.end_step()
        self._unwatched.append((window, verdict.reading))
        bench.journal.record(Outcome(verdict=verdict, action=action, applied=True))

    def _refuse(self, window: Window, verdict: Verdict) -> None:
        bench = self._bench
        self._climber.fence()
        is_routine = verdict.kind == "overflow" and not verdict.reading.buffers
        if not (is_routine and bench.scaler is not None and bench.scaler.keeps_buffers):
            bench.buffers.undo_()
        if bench.scaler is not None:
            bench.scaler.update_(self._bad)
        bench.shield.end_step()
        if verdict.kind == "overflow":
            self._climber.back_off(verdict.reading.step)
            bench.journal.record(Outcome(verdict=verdict, action=Action(response="back_off"), applied=False))
            return
        if not self._catch_up():
            with self._climber.casebook.letting_interrupts_out():
                bench.journal.record(self._climber.answer(window, verdict.reading).outcome(applied=False))

    def _catch_up(self) -> bool:
        """Looks at all there is; whether the run has gone back by it, and what came after counts no more."""
        return any(iter(self._watch, None))

    def _watch(self) -> bool | None:
        """Looks at the oldest reading there is, None where there is none."""
        if not self._unwatched:
            return None
        answer = self._climber.watch(*self._unwatched.popleft())
        if answer is None:
            return False
        if answer.went_back:
            self.drop_in_flight()
        self._bench.journal.remember(answer.outcome(applied=True))
        return answer.went_back

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
