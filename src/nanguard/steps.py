"""Opens steps, has them computed, hands them to one of the two ways of guarding, and knows where the data are."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nanguard.bench import Bench
from nanguard.capture import Call, Ear
from nanguard.data import Data
from nanguard.diagnosis.autopsy import examine_graph
from nanguard.diagnosis.clinic import How
from nanguard.diagnosis.source import calling_line
from nanguard.eager import Eager
from nanguard.errors import ProtocolError
from nanguard.incident.bundle import Bundles
from nanguard.late import Late
from nanguard.measure import Layout
from nanguard.recovery.climber import Climber
from nanguard.rng import RngState
from nanguard.snapshot.keeper import Keeper
from nanguard.snapshot.options import Snapshots
from nanguard.window import LossFn, Microbatch, Window

log = logging.getLogger("nanguard")


class Steps:
    """One at a time. ``late`` is there where the device decides by itself."""

    def __init__(
        self,
        bench: Bench,
        *,
        sync: str,
        accumulate: int,
        snapshots: Snapshots | None,
        diagnose: How,
        bundles: Bundles | None,
        run_dir: str | Path | None,
    ) -> None:
        self.bench = bench
        self.accumulate = accumulate
        self.num_epochs = 0
        self.data = Data(bench.device, bench.dice)
        folder = None if run_dir is None else Path(run_dir) / "snapshots"
        self.keeper = (
            None
            if snapshots is None
            else Keeper(bench, self.data, snapshots, folder=folder, run_facts=self.facts, prepare=self._prepare)
        )
        self.climber = Climber(bench, self.data, self.keeper, diagnose=diagnose, bundles=bundles)
        self.late = Late(bench, self.climber) if sync == "late" else None
        self.mode = self.late or Eager(bench, self.climber)
        self._captured: tuple[Layout, Tensor] | None = None
        self._left_early = False
        self._ear = Ear(self._open_calls, self._note_random_states, bench.device.type)
        self._listens = diagnose == "off"

    # ---- one step ------------------------------------------------------------------------------------------------

    def on_one(self, loss_fn: LossFn, batch: Any) -> Any:
        """A micro-batch; the last of a step finishes it."""
        window = self.bench.window
        if window is None or not window.rerunnable:
            window = self.open(rerunnable=True, divisor=self.accumulate)
            self.bench.shield.zero_grad()  # another loss, or another guard, may have left something
        ends = len(window.losses) + 1 == window.divisor
        # Where the loader has no length any batch may be the last one, so ranks then average after each.
        micro = self._microbatch(loss_fn, batch, is_last=ends or self._may_end_epoch)
        loss, aux = self._run(window, micro)
        micro.shown = loss
        if ends:
            self.finish(window)
        return (loss, *aux) if aux else loss

    def on_many(self, loss_fn: LossFn, batches: Sequence[Any]) -> Any:
        """A whole step of several micro-batches."""
        if not batches or self.accumulate != 1:
            raise ValueError(
                f"microbatches needs at least one batch and accumulate=1, got {len(batches)} batches and "
                f"accumulate={self.accumulate}"
            )
        window = self.open(rerunnable=True, divisor=len(batches))
        self.bench.shield.zero_grad()
        auxes = []
        for place, batch in enumerate(batches, start=1):
            micro = self._microbatch(loss_fn, batch, is_last=place == len(batches))
            _, aux = self._run(window, micro)
            auxes.append(aux)
        window.shown = window.mean_loss().clone()
        self.finish(window)
        # By how many values came back, never by what they are: an array has no single truth value.
        if not any(len(aux) for aux in auxes):
            return window.shown
        return window.shown, [aux[0] if len(aux) == 1 else aux for aux in auxes]

    def open(self, *, rerunnable: bool, divisor: int) -> Window:
        """Begins a step: hears of what is due, then notes what the step may change."""
        if not self.bench.is_capturing:
            self.bench.last_forward.mend_in_any_case_()
            self.mode.before()
            self._ease()
            self._before_the_first_step()
        elif self.late is None or not self.late.is_settled:
            raise ProtocolError(
                "a guarded step was captured in a CUDA graph with sync='eager' or with other steps in flight: use "
                "fused, capturable optimizers, and call guard.settle() before the capture"
            )
        window = Window(self.bench.num_steps, self.num_epochs, self._position, rerunnable, divisor)
        window.last_seen = self.data.last
        self.bench.islands.put_back()
        self.mode.note(window)
        self.bench.ranks.forget_()
        self.bench.window = window
        if not rerunnable:
            self.climber.clinic.live.begin(window.last_seen)
        return window

    @contextlib.contextmanager
    def in_own_loop(self) -> Iterator[None]:
        """Around the forward pass of a loop of the user's own: what the model is given is noted."""
        if not self._listens:
            self._listens = True
            self._ear.listen(self.bench.model)
        with self._giving_memory_back(), self.climber.clinic.live.watching(), self.bench.precision.autocast():
            yield

    def backward(self, window: Window, loss: Tensor) -> None:
        """In a loop of the user's own."""
        live = self.climber.clinic.live
        if self.bench.device.type == "cpu" and isinstance(loss, Tensor):  # elsewhere looking would mean waiting
            window.remains = examine_graph([loss], calling_line()) or window.remains
        with self._giving_memory_back(), live.watching():
            self.bench.backward(window, loss)
        window.live = live.after_backward(loss) or window.live

    def _open_calls(self) -> list[Call] | None:
        window = self.bench.window
        return None if window is None or window.rerunnable or self.bench.is_capturing else window.calls

    def _note_random_states(self) -> RngState:
        return self.bench.dice.now(self.bench.num_steps)

    def finish(self, window: Window) -> None:
        self.bench.window = None
        window.last_batch = self._position
        if self.late is not None and self.bench.is_capturing:
            self.late.protect(window)
            self.bench.is_captured = True
            self._captured = window.layout, self.bench.board.filled  # a graph goes on writing to this very memory
            return
        self.bench.last_forward.mend_unused_()
        self.bench.last_forward.forget()
        self.bench.num_steps += 1
        if self.data.is_going_back:  # the rest of a loop's body, of a batch that will come again
            self.bench.clear()
            self.bench.journal.counts["lost"] += 1
            return
        with self._giving_memory_back(), self.bench.leaving_no_trace():
            self.mode.finish(window)
        self._after_step()

    def replay(self, graph: Any) -> None:
        """A step that was captured before."""
        if self.late is None or self._captured is None:
            raise ProtocolError("guard.replay() was called before a guarded step was captured in torch.cuda.graph()")
        layout, values = self._captured
        window = self.open(rerunnable=False, divisor=1)
        window.layout = layout
        self.bench.window = None
        self.bench.num_steps += 1
        self.climber.fence()
        graph.replay()
        self.late.post(window, values)
        self._after_step()

    def _before_the_first_step(self) -> None:
        if self.keeper is not None and self.bench.num_steps == 0:
            self.keeper.take_first()

    def _after_step(self) -> None:
        """Inside ``guard.epoch`` snapshots are taken between two batches, of which each may make several steps."""
        if self.keeper is not None and self.data.current is None:
            self.keeper.after_step(self.bench.num_steps)

    def _ease(self) -> None:
        """Measures that have been in force for long enough are taken back, with nothing in flight."""
        step, climber = self.bench.num_steps, self.climber
        if climber.measures.are_due(step, climber.last_trouble):
            self.mode.settle()
            climber.ease(step)

    def _microbatch(self, loss_fn: LossFn, batch: Any, *, is_last: bool) -> Microbatch:
        averages_ranks = isinstance(self.bench.model, DistributedDataParallel)
        micro = Microbatch(loss_fn, batch, None, reduce_gradients=is_last or not averages_ranks)
        if not self.bench.is_capturing:
            window = self.bench.window
            self.bench.note_world(micro, self.bench.num_steps if window is None else window.step)
        return micro

    def _run(self, window: Window, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        loss, aux = self._forward_backward(window, micro)
        window.microbatches.append(micro)
        self.bench.look_back(micro)
        return loss, aux

    # ---- memory that has run out ---------------------------------------------------------------------------------

    def _forward_backward(self, window: Window, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """If memory runs out, it gets back what is held for recovery, and the step is run again, once."""
        try:
            return self.bench.forward_backward(window, micro)
        except torch.OutOfMemoryError:
            if not (self.climber.give_memory_back() and self._can_run_alone(micro)):
                raise
        # Not inside the handler: the error holds all that the failed pass had computed.
        log.warning("step %d ran out of memory: nanguard gave back what it held, and runs it again", window.step)
        gc.collect()
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._from_its_beginning(window, micro)

    def _can_run_alone(self, micro: Microbatch) -> bool:
        """Not if other ranks have gone on, if DDP waits for the rest of a backward pass, or in a CUDA graph."""
        ddp = isinstance(self.bench.model, DistributedDataParallel)
        return micro.rng is not None and self.bench.ranks.size == 1 and not ddp

    def _from_its_beginning(self, window: Window, last: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """All micro-batches of a step that was cleared, in the world each had: gradients may hold half of the last."""
        bench = self.bench
        for module, training in window.training:
            module.training = training
        window.losses.clear()
        window.flags.clear()
        window.in_microbatch = False
        bench.window = window
        self.mode.note(window)
        bench.ranks.forget_()
        for micro in (*window.microbatches, last):
            if micro.rng is not None:
                micro.rng.restore(bench.device)
            enabled, dtype = micro.autocast
            with torch.autocast(bench.device.type, dtype=dtype, enabled=enabled):
                loss, aux = bench.forward_backward(window, micro)
            micro.show(loss)
        return loss, aux

    @contextlib.contextmanager
    def _giving_memory_back(self) -> Iterator[None]:
        """Around what cannot be run again here: the program may catch the error, and try again with more memory."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.climber.give_memory_back()
            raise

    # ---- the course of an epoch ----------------------------------------------------------------------------------

    @property
    def _position(self) -> int | None:
        """Of the batch at hand; None outside ``guard.epoch``."""
        return None if self.data.current is None else self.data.current.position - 1

    @property
    def _may_end_epoch(self) -> bool:
        walk = self.data.current
        return walk is not None and not self._left_early and (walk.length is None or walk.position == walk.length)

    def begin_epoch(self, loader: Iterable[Any]) -> int:
        self.bench.drop_unfinished()
        self.settle()
        if self.data.current is not None:  # the last epoch was left early
            self.data.abandon()
            self.bench.schedule.tick_epoch()
        if self.keeper is None:  # nobody will ever go back to an earlier pass
            self.data.passes.clear()
        self.num_epochs += 1
        self._left_early = False
        self.num_epochs = self.data.begin(loader, self.num_epochs).number
        self.bench.look_again()
        self._before_the_first_step()
        return self.num_epochs

    def hear(self) -> None:
        between_steps = self.bench.window is None or not self.bench.window.losses
        if between_steps:
            self.bench.last_forward.mend_()  # a snapshot may be taken now
            self.mode.before()
        self._follow()
        if between_steps and self.keeper is not None:
            self.keeper.after_step(self.bench.num_steps)

    def leave_epoch(self, number: int) -> None:
        if number == self.num_epochs:  # a generator may be closed long after its loop was left
            self.bench.drop_unfinished()
            self._left_early = True

    def end_epoch(self) -> bool:
        window = self.bench.window
        if window is not None and window.rerunnable and self._may_end_epoch:
            self.finish(window)
        self.bench.drop_unfinished()
        self.settle()
        if not self.data.is_going_back:
            self._look_at_what_is_left()
        if self.data.is_going_back:
            self._follow()
            return True
        self.bench.schedule.tick_epoch()
        goes_on = self.data.end()
        self._follow()
        return goes_on

    def _look_at_what_is_left(self) -> None:
        """What an optimizer has made of finite gradients shows in the next step; after the last there is none."""
        answer = self.climber.look(Window(self.bench.num_steps, self.num_epochs, self._position, False, 1))
        if answer is not None:
            self.mode.drop_in_flight()
            self.bench.journal.remember(answer.outcome(applied=False))

    def settle(self) -> None:
        if self.bench.window is None or not self.bench.window.losses:
            self.bench.last_forward.mend_()
        self.mode.settle()

    def ask_the_host(self) -> None:
        """Before each step, from now on."""
        self.settle()
        self.late, self.mode = None, Eager(self.bench, self.climber)

    def _follow(self) -> None:
        """The data take the way back that was chosen, and the number of the epoch goes with them."""
        self.data.settle()
        if self.data.current is not None:
            self.num_epochs = self.data.current.number

    # ---- to be saved ---------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What another process needs besides the snapshot itself, in plain numbers. Does not sync."""
        return {
            "num_steps": self.bench.num_steps,
            "num_epochs": self.num_epochs,
            "journal": self.bench.journal.state_dict(),
            "measures": self.climber.measures.state_dict(),
            "kept_fp32": self.bench.islands.state_dict(),
        }

    def resume(self) -> int | None:
        """From the newest snapshot on disk; how many steps had been made."""
        if self.keeper is None:
            raise ProtocolError("guard.resume() needs snapshots on disk: Guard(..., snapshots=Snapshots(where='disk'))")
        facts = self.keeper.resume()
        if facts is None:
            return None
        self.mode.drop_in_flight()
        self.load_facts(facts["run"])
        self.num_epochs = max(0, self.num_epochs - (facts["data"] is not None))  # the next epoch is the one it was in
        self.data.resume_at(facts["data"], RngState.from_dict(facts["rng"]))
        return self.bench.num_steps

    def _prepare(self, facts: dict[str, Any]) -> None:
        """Before a snapshot of another process is put back: weights that had been cast to fp32 are to be so again."""
        if facts["measures"]["cast"]:
            self.climber.measures.cast()

    def load_facts(self, facts: dict[str, Any]) -> None:
        self.bench.num_steps, self.num_epochs = facts["num_steps"], facts["num_epochs"]
        self.bench.journal.load_state_dict(facts["journal"])
        self.bench.islands.load_state_dict(facts["kept_fp32"])
        self.climber.measures.load_state_dict(facts["measures"])
