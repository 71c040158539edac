"""The guard: what a user calls. It opens a step, has it computed, and hands it to one of two ways of guarding.

    note ─► forward, backward ─► measure ─► agree ─► protect ─► (host) judge ─► decide ─► act ─► record

``eager`` lets the host read the measurement before the optimizers step, ``late`` lets the device decide and tells the
host afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard.assembly import assemble, choose_sync, introduce
from nanguard.clipper import Clip
from nanguard.eager import Eager
from nanguard.epoch import Epoch
from nanguard.errors import ProtocolError
from nanguard.late import Late
from nanguard.measure import Layout
from nanguard.policy import Policy
from nanguard.precision import LossScale
from nanguard.records import Incident, Outcome
from nanguard.window import LossFn, Microbatch, Window

T = TypeVar("T")
_NOTHING: Any = object()


class Guard:
    """Keeps training finite: a step with a non-finite loss, gradient or buffer never changes anything.

    Args:
        model: the module that trains; DDP and ``torch.compile`` wrappers are fine.
        optimizer: one optimizer or several. All of them step, or none does. Fused ones cost no sync.
        scheduler: one scheduler or several, advanced by the guard, and only by steps that were applied.
        schedule_per: ``"step"`` advances the schedule after every applied step, ``"epoch"`` after every epoch.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` (with loss scaling), or ``"auto"``: bf16 where the accelerator
            supports it, else fp16; fp32 on a CPU.
        max_norm: the largest gradient norm; None turns clipping off.
        clip: ``"group"`` clips every parameter group on its own; ``"global"`` all together, as ``clip_grad_norm_``
            does, to the bit; ``AGC()`` (or ``"agc"``) clips by unit, ``ZScore()`` (``"zscore"``) by the recent past.
        policy: how many non-finite steps may be skipped before training halts.
        accumulate: how many micro-batches make a step. The loss is divided by it.
        drop_bad_microbatches: leave a non-finite micro-batch out and keep the rest of the step, at the price of a
            second set of gradients.
        ema: a ``torch.optim.swa_utils.AveragedModel`` (anything with ``update_parameters``), updated after each
            applied step and never by a skipped one.
        loss_scale: how the fp16 loss scale moves.
        sync: ``"late"`` lets the device skip and tells the host later, without a sync; ``"eager"`` asks the device
            once a step; ``"auto"`` is late on CUDA where all optimizers are fused, else eager.
        run_dir: where to write the run log; None writes nothing.
        process_group: the ranks that train together; None is all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        schedule_per: Literal["step", "epoch"] = "step",
        precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
        max_norm: float | None = 5.0,
        clip: Clip = "group",
        policy: Policy | None = None,
        accumulate: int = 1,
        drop_bad_microbatches: bool = False,
        ema: nn.Module | None = None,
        loss_scale: LossScale | None = None,
        sync: Literal["auto", "eager", "late"] = "auto",
        run_dir: str | Path | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._bench = assemble(
            model,
            optimizer,
            scheduler=scheduler,
            schedule_per=schedule_per,
            precision=precision,
            max_norm=max_norm,
            clip=clip,
            policy=policy or Policy(),
            accumulate=accumulate,
            drop_bad_microbatches=drop_bad_microbatches,
            ema=ema,
            loss_scale=loss_scale,
            run_dir=run_dir,
            process_group=process_group,
        )
        self.sync = choose_sync(sync, self._bench)
        self._late = Late(self._bench) if self.sync == "late" else None
        self._mode = self._late or Eager(self._bench)
        self._accumulate = accumulate
        self._captured: tuple[Layout, Tensor] | None = None
        self._num_steps = self._num_epochs = 0
        self._batch: int | None = None
        self._ends_epoch: bool | None = False
        introduce(self._bench, asked_precision=precision, sync=self.sync)

    # ---- the loop handed over ------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFn, batch: Any = _NOTHING, *, microbatches: Iterable[Any] | None = None) -> Any:
        """One guarded step: forward under autocast, backward, measure, protect, schedule, ``zero_grad``.

        ``loss_fn(model, batch)`` returns the loss, or ``(loss, aux)``; what comes back is the same with the loss
        detached, on its device, unsynced. With ``accumulate=n`` every n-th call updates. Or pass a list of
        ``microbatches`` instead of ``batch`` to make a step of them all: the mean loss comes back, and the list of aux.

        Does not sync where ``syncs_per_step`` is 0. What raises before the optimizers step leaves no trace.
        """
        window = self._bench.window
        if window is not None and not window.rerunnable and window.losses:
            raise ProtocolError(
                "guard.step() was called between guard.backward() and guard.update(): finish that step with "
                "guard.update() first, or use guard.step() alone"
            )
        if window is not None and window.rerunnable and window.in_microbatch:
            raise ProtocolError("guard.step() was called by the loss function of another guard.step()")
        if not callable(loss_fn):
            raise ValueError(
                f"guard.step(loss_fn, batch) needs a function of (model, batch) first, got {loss_fn!r:.80}"
            )
        if (batch is _NOTHING) == (microbatches is None):
            raise ValueError("guard.step() takes either a batch or microbatches=[...]")
        if microbatches is None:
            return self._step_on_one(loss_fn, batch)
        return self._step_on_many(loss_fn, list(microbatches))

    def epoch(self, loader: Iterable[T]) -> Epoch[T]:
        """Iterates over ``loader`` as a new epoch: patience starts afresh, and at its end all steps are settled.

        Micro-batches left over when the loader ends make a last, smaller step. For training data only: one at a time.
        """
        return Epoch(loader, begin=self._begin_epoch, at=self._at, end=self._end_epoch, leave=self._leave_epoch)

    # ---- a loop of the user's own --------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """For the forward pass of a loop of your own: begins the step and enters the guard's precision.

        Where gradients are off (validation under ``torch.no_grad()``) it only enters the precision.
        """
        window = self._bench.window
        if window is not None and window.rerunnable:
            raise ProtocolError(
                "guard.autocast() was called while guard.step() is gathering micro-batches: use one or the other"
            )
        if torch.is_grad_enabled():
            window = window or self._open(rerunnable=False, divisor=self._accumulate)
            self._bench.begin_microbatch(window)
        return self._bench.precision.autocast()

    def backward(self, loss: Tensor) -> None:
        """Backward of ``loss / accumulate``, scaled where the precision needs it; may be called several times."""
        window = self._bench.window
        if window is None or window.rerunnable:
            raise ProtocolError(
                "guard.backward() was called without guard.autocast(): compute the loss inside "
                "`with guard.autocast():`, in fp32 too, so that the guard can note what the forward pass may change"
            )
        self._bench.backward(window, loss)

    def update(self) -> None:
        """Ends the step: measure, protect, schedule, ``zero_grad``. Does not sync where ``syncs_per_step`` is 0."""
        window = self._bench.window
        if window is None or window.rerunnable or not window.losses:
            raise ProtocolError("guard.update() was called before guard.backward(): there are no gradients to apply")
        self._finish(window)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replays a CUDA graph that holds one guarded step, and keeps count of it. Does not sync.

        Run a few steps as usual, ``guard.settle()``, and capture ``guard.step`` (or autocast, backward and update).
        Steps in flight behind a bad one count as lost, since their inputs have been overwritten.
        """
        if self._late is None or self._captured is None:
            raise ProtocolError("guard.replay() was called before a guarded step was captured in torch.cuda.graph()")
        layout, values = self._captured
        window = self._open(rerunnable=False, divisor=1)
        window.layout = layout
        self._bench.window = None
        self._num_steps += 1
        graph.replay()
        self._late.post(window, values)

    # ---- looking at it -------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._bench.model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return self._bench.shield.optimizers

    @property
    def policy(self) -> Policy:
        return self._bench.policy

    @property
    def precision(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._bench.precision.name

    @property
    def syncs_per_step(self) -> int:
        """How often a healthy step asks the device and waits for the answer: 0 or 1."""
        return 0 if self._late is not None else 1

    @property
    def current_step(self) -> int:
        """The number of the step being computed, from 0; it goes back while steps are run again."""
        window = self._bench.window
        return self._num_steps if window is None else window.step

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every step that had to be answered so far, as far as the host has heard."""
        return self._bench.journal.incidents

    @property
    def last_outcome(self) -> Outcome | None:
        """What became of the last step the host has heard of."""
        return self._bench.journal.last

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, lost behind a skipped one, run again, backed off (and halted)."""
        return dict(self._bench.journal.counts)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={number}" for name, number in self.counts.items())
        return f"Guard(precision={self.precision!r}, sync={self.sync!r}, {counts})"

    # ---- settling and resuming -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until the host knows all that happened; then every step that could be applied is in the weights.

        ``guard.epoch`` does it at the end of the loader. Call it before saving a checkpoint anywhere else.
        """
        self._mode.settle()

    def close(self) -> None:
        """Settles, and ends the run log. ``with Guard(...) as guard:`` does it for you."""
        self.settle()
        self._bench.journal.close(steps=self._num_steps)

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Counts, loss scale, latch, learned limits and history, in plain numbers. Settles first."""
        self.settle()
        bench = self._bench
        return {
            "version": 1,
            "num_steps": self._num_steps,
            "num_epochs": self._num_epochs,
            "latch": 0.0 if self._late is None else self._late.latch.item(),
            "scaler": None if bench.scaler is None else bench.scaler.state_dict(),
            "clipper": bench.clipper.state_dict(),
            "journal": bench.journal.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes exactly where ``state_dict`` was taken. Model, optimizers, schedulers and EMA have their own."""
        bench = self._bench
        if state.get("version") != 1:
            raise ValueError(f"this guard reads state of version 1, got {state.get('version')!r}")
        if (state["scaler"] is None) != (bench.scaler is None):
            raise ValueError(
                f"the state was saved {'without' if state['scaler'] is None else 'with'} a loss scale, and this guard "
                f"runs in {self.precision}: use the precision it was saved with"
            )
        self.settle()
        self._num_steps, self._num_epochs = state["num_steps"], state["num_epochs"]
        if self._late is not None:
            self._late.latch.fill_(state["latch"])
        if bench.scaler is not None:
            bench.scaler.load_state_dict(state["scaler"])
        bench.clipper.load_state_dict(state["clipper"])
        bench.journal.load_state_dict(state["journal"])

    # ---- one step ------------------------------------------------------------------------------------------------

    def _step_on_one(self, loss_fn: LossFn, batch: Any) -> Any:
        window = self._bench.window
        if window is None or not window.rerunnable:
            window = self._open(rerunnable=True, divisor=self._accumulate)
            self._bench.shield.zero_grad()  # another loss, or another guard, may have left something
        ends = len(window.losses) + 1 == window.divisor
        # Where the loader has no length any batch may be the last one, so ranks then average after each.
        micro = self._microbatch(loss_fn, batch, is_last=ends or self._ends_epoch is not False)
        loss, aux = self._run(window, micro)
        micro.shown = loss
        if ends:
            self._finish(window)
        return (loss, *aux) if aux else loss

    def _step_on_many(self, loss_fn: LossFn, batches: Sequence[Any]) -> Any:
        if not batches or self._accumulate != 1:
            raise ValueError(
                f"microbatches needs at least one batch and accumulate=1, got {len(batches)} batches and "
                f"accumulate={self._accumulate}"
            )
        window = self._open(rerunnable=True, divisor=len(batches))
        self._bench.shield.zero_grad()
        auxes = []
        for place, batch in enumerate(batches, start=1):
            micro = self._microbatch(loss_fn, batch, is_last=place == len(batches))
            _, aux = self._run(window, micro)
            auxes.append(aux[0] if len(aux) == 1 else aux)
        window.shown = window.mean_loss().clone()
        self._finish(window)
        return window.shown if auxes[0] == () else (window.shown, auxes)

    def _microbatch(self, loss_fn: LossFn, batch: Any, *, is_last: bool) -> Microbatch:
        averages_ranks = isinstance(self._bench.model, DistributedDataParallel)
        micro = Microbatch(loss_fn, batch, None, reduce_gradients=is_last or not averages_ranks)
        if self._late is not None and not self._bench.is_capturing:
            self._late.note_world(micro, self.current_step)
        return micro

    def _run(self, window: Window, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        loss, aux = self._bench.forward_backward(window, micro)
        window.microbatches.append(micro)
        if self._late is not None:
            self._late.look_back(micro)
        return loss, aux

    def _open(self, *, rerunnable: bool, divisor: int) -> Window:
        """Begins a step: hears of what is due, then notes what the step may change."""
        if not self._bench.is_capturing:
            self._mode.before()
        elif self._late is None or not self._late.is_settled:
            raise ProtocolError(
                "a guarded step was captured in a CUDA graph with sync='eager' or with other steps in flight: use "
                "fused, capturable optimizers, and call guard.settle() before the capture"
            )
        window = Window(self._num_steps, self._num_epochs, self._batch, rerunnable, divisor)
        self._mode.note(window)
        self._bench.ranks.forget_()
        self._bench.window = window
        return window

    def _finish(self, window: Window) -> None:
        self._bench.window = None
        if self._late is not None and self._bench.is_capturing:
            self._late.protect(window)
            self._captured = window.layout, self._bench.board.filled  # a graph goes on writing to this very memory
        else:
            self._num_steps += 1
            with self._bench.leaving_no_trace():
                self._mode.finish(window)

    # ---- epochs --------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> int:
        if self._batch is not None:  # the last epoch was left early
            self._end_epoch()
        self._bench.drop_unfinished()
        self.settle()
        self._num_epochs += 1
        self._bench.look_again()
        return self._num_epochs

    def _at(self, position: int, is_last: bool | None) -> None:
        self._batch, self._ends_epoch = position, is_last

    def _leave_epoch(self, number: int) -> None:
        if number == self._num_epochs:  # a generator may be closed long after its loop was left
            self._bench.drop_unfinished()
            self._ends_epoch = False

    def _end_epoch(self) -> None:
        window = self._bench.window
        if window is not None and window.rerunnable and self._ends_epoch is not False:
            self._finish(window)
        self._bench.drop_unfinished()
        self.settle()
        self._batch, self._ends_epoch = None, False
        self._bench.schedule.tick_epoch()
