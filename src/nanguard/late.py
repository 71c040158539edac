"""Guarding with the host told later: the device decides by the latch, and nothing waits for it.

A bad step raises the latch, every optimizer step reads it, and only the host takes it down again. Until then all
later steps change nothing either, so the host finds the world exactly as the bad batch found it. The steps in between,
the wake, are then run again; the run is bit for bit the one that asks at every step. In a loop of the user's own they
cannot be run again and count as lost.

The host looks at a step's reading when the second step after it begins. That moment is fixed, not "when the copy
happens to be there", so that all ranks learn at the same point and a run can be repeated. By then the copy has long
arrived, or the device has a full step of work queued: waiting for it leaves no gap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanguard.bench import Bench
from nanguard.errors import ProtocolError
from nanguard.mailbox import Mailbox
from nanguard.measure import Reply
from nanguard.records import Action, Outcome, Verdict
from nanguard.recovery.climber import Climber
from nanguard.undo import Undo
from nanguard.window import LAG, Window


class Late:
    """No sync at all on a healthy step."""

    def __init__(self, bench: Bench, climber: Climber) -> None:
        self._bench, self._climber = bench, climber
        self._averages = Undo(bench.device)
        if bench.ema is not None:
            self._averages.watch_all(bench.ema)
        self._mailbox = Mailbox(bench.device)
        self._in_flight: deque[Window] = deque()
        self.latch = torch.zeros((), dtype=torch.float32, device=bench.device)

    def before(self) -> None:
        """Hears of the steps that are due, before the next one begins."""
        while len(self._in_flight) >= LAG:
            self._hear()

    def settle(self) -> None:
        window = self._bench.window
        if window is not None and window.losses and self._in_flight:
            raise ProtocolError(
                f"guard.settle() was called in the middle of a step, after {len(window.losses)} backward passes and "
                "before its update: steps in flight may have to run again first. Call it between steps"
            )
        if self._in_flight:
            self._bench.window = None  # one that has only begun begins anew
        while self._in_flight:
            self._hear()

    @property
    def is_settled(self) -> bool:
        return not self._in_flight

    def is_verified(self) -> bool:
        """Whether all that was done is known to be finite, as far as the host can tell without waiting."""
        return all(window.letter is not None and window.letter.has_arrived() for window in self._in_flight) and not any(
            map(self._holds_latch, self._in_flight)
        )

    def drop_in_flight(self) -> None:
        """The run goes back: what is under way counts no more."""
        self._in_flight.clear()
        self.latch.zero_()

    def note(self, window: Window) -> None:
        bench = self._bench
        window.elsewhere = [(undo, undo.note_()) for undo in (bench.buffers, self._averages)]
        window.schedule = bench.schedule.note()
        window.num_states = bench.shield.num_states()
        window.training = [(module, module.training) for module in bench.modules]

    def finish(self, window: Window) -> None:
        try:
            self.protect(window)
        except BaseException:
            # No reading of this step will ever arrive to take down a latch that it has raised.
            self._averages.undo_()
            self.latch.fill_(float(any(map(self._holds_latch, self._in_flight))))
            raise
        self.post(window, self._bench.board.filled)

    def _holds_latch(self, window: Window) -> bool:
        assert window.letter is not None
        verdict = self._judge(window, window.letter.values())
        return verdict.kind == "nonfinite" or (verdict.kind == "overflow" and window.latches)

    def _judge(self, window: Window, values: list[float]) -> Verdict:
        reading = self._bench.read(window, Reply(window.layout, values))
        if window.is_spoiled:
            reading = replace(reading, found=(*reading.found, "update"))
        return self._bench.judge(reading)

    def protect(self, window: Window) -> None:
        """Everything on the device: measure, agree, latch, clip, step, put back what must not have changed."""
        bench = self._bench
        groups = bench.gather(window)
        bench.measure(window, groups)
        latched_before = self.latch.clone() if bench.scaler is not None else None
        skip = self._raise_latch_(window)
        bench.clipper.clip_(groups, bench.board.norms)
        self._climber.fence()
        if bench.is_careful:
            self._step_carefully(window, skip)
        else:
            bench.shield.step_unless(skip)
        bench.buffers.undo_where_(skip)
        bench.update_average()
        self._averages.undo_where_(skip)
        bench.clipper.remember_(skip)
        if bench.scaler is not None:
            bench.scaler.update_(skip, frozen=latched_before)
        bench.shield.end_step()

    def _step_carefully(self, window: Window, skip: Tensor) -> None:
        with self._bench.looking_at_update() as spoiled:
            self._bench.shield.step_unless(skip)
        if spoiled:
            window.is_spoiled = True
            skip.fill_(1.0)
            self.latch.fill_(1.0)

    def post(self, window: Window, values: Tensor) -> None:
        """Sends the reading on its way, and takes the step for applied until the host has heard of it."""
        window.letter = self._mailbox.post(values)
        window.lrs = self._bench.schedule.known_rates
        self._in_flight.append(window)
        self._bench.schedule.tick()

    def _raise_latch_(self, window: Window) -> Tensor:
        """Raises the latch where the step is bad; returns the flag by which to skip this one."""
        bench = self._bench
        board, scaler = bench.board, bench.scaler
        agreed = board.agree_()
        # A routine overflow in a loop of the user's own skips its step and no other, as a GradScaler would: what is in
        # flight behind it could not be run again. Optimizer state that the step makes must be taken back, though.
        window.latches = window.rerunnable or scaler is None or agreed is not None or bench.shield.lacks_state()
        if agreed is not None:
            torch.maximum(self.latch, agreed, out=self.latch)
            return self.latch
        if window.latches or scaler is None:
            board.raise_flag_(self.latch)
            return self.latch
        skip = self.latch.clone()
        board.raise_flag_(skip)
        board.raise_flag_but_for_gradients_(self.latch)
        torch.maximum(self.latch, skip * (scaler.scale <= scaler.floor), out=self.latch)
        return skip

    def _hear(self) -> None:
        """Looks at the oldest reading in flight, waits for it if need be, and acts on it."""
        bench, window = self._bench, self._in_flight.popleft()
        assert window.letter is not None
        verdict = self._judge(window, window.letter.read())
        if verdict.kind == "healthy":
            bench.journal.record(Outcome(verdict=verdict, action=Action(response="apply"), applied=True))
            answer = self._climber.watch(window, verdict.reading)
            if answer is not None:
                if answer.went_back:
                    self.drop_in_flight()
                bench.journal.remember(answer.outcome(applied=True))
            return
        overflow = Outcome(verdict=verdict, action=Action(response="back_off"), applied=False)
        if verdict.kind == "overflow":
            self._climber.back_off(verdict.reading.step)
        if verdict.kind == "overflow" and not window.latches:
            self._take_back_tick(window)
            bench.journal.record(overflow)
            return
        wake = self._put_back(window)
        if verdict.kind == "overflow":
            self._go_on(overflow, wake)
            return
        with self._climber.casebook.letting_interrupts_out():
            answer = self._climber.answer(window, verdict.reading)
            if answer.went_back:
                bench.journal.record(answer.outcome(applied=False))
            else:
                self._go_on(answer.outcome(applied=False), wake)

    def _take_back_tick(self, window: Window) -> None:
        """The schedule as if this step had not advanced it and the ones in flight behind it had."""
        schedule = self._bench.schedule
        if schedule.is_ours and window.schedule is not None:
            schedule.restore(window.schedule)
            for later in self._in_flight:
                later.schedule = schedule.note()
                schedule.tick()

    def _put_back(self, window: Window) -> list[Window]:
        """Puts back what only the host can, and takes the latch down; returns the wake."""
        bench, wake = self._bench, list(self._in_flight)
        self._in_flight.clear()
        bench.shield.forget_states_after(window.num_states)
        if bench.schedule.is_ours and window.schedule is not None:
            bench.schedule.restore(window.schedule)
        for undo, copies in window.elsewhere:
            undo.put_back(copies)
        self.latch.zero_()
        return wake

    def _go_on(self, outcome: Outcome, wake: list[Window]) -> None:
        """Records, and runs the wake again."""
        goes_on = outcome.action.response != "halt" and not self._climber.casebook.is_interrupted
        rerun = [each for each in wake if each.rerunnable] if goes_on else []
        self._bench.journal.record(replace(outcome, rerun=len(rerun), lost=len(wake) - len(rerun)))
        if rerun:
            self._run_again(rerun)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _run_again(self, wake: list[Window]) -> None:
        """The steps of the wake, in order, each in the world it had; afterwards the world is as it was."""
        bench, waiting = self._bench, deque(wake)
        rng, schedule = bench.dice.now(), bench.schedule.note()
        training = [(module, module.training) for module in bench.modules]
        try:
            while waiting:
                self._run_one_again(waiting[0])
                waiting.popleft()
        finally:
            rng.restore(bench.device)
            _set_training(training)
            if not bench.schedule.is_ours:
                bench.schedule.restore(schedule)
            bench.journal.counts.update(rerun=-len(waiting), lost=len(waiting))

    def _run_one_again(self, window: Window) -> None:
        bench = self._bench
        if not bench.schedule.is_ours and window.schedule is not None:
            bench.schedule.restore(window.schedule)
        _set_training(window.training)
        again = bench.window = window.afresh()
        self.note(again)
        bench.ranks.forget_()
        for micro in again.microbatches:
            if micro.rng is not None:
                micro.rng.restore(bench.device)
            enabled, dtype = micro.autocast
            with torch.autocast(bench.device.type, dtype=dtype, enabled=enabled):
                loss, _ = bench.forward_backward(again, micro)
            micro.show(loss)
        again.show_mean()
        bench.window = None
        self.finish(again)


def _set_training(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
