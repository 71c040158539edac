"""The guard: what a user calls."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nanguard.diagnosis.scheduler import How
from nanguard.errors import ProtocolError
from nanguard.incidents.bundle import CaptureLevel
from nanguard.policy.policy import Policy
from nanguard.policy.rungs import Rollback
from nanguard.records.steps import Incidents, Outcome
from nanguard.state.snapshots.options import Snapshots
from nanguard.step.assembly import assemble, choose_policy, choose_snapshots, choose_sync
from nanguard.step.clipping import Clip
from nanguard.step.epoch import Epoch
from nanguard.step.observers import Observer
from nanguard.step.pending import LossFn
from nanguard.step.precision import LossScale
from nanguard.step.resuming import facts_of, load_facts, resume
from nanguard.wiring import introduce, make_engine, make_journal

T = TypeVar("T")
_NOTHING: Any = object()


class Guard:
    """Keeps training finite: a step with a non-finite loss, gradient or buffer never changes anything.

    Args:
        model: the module that trains; DDP and ``torch.compile`` wrappers are fine.
        optimizer: one optimizer or several. All of them step, or none does. Fused ones cost no sync.
        scheduler: one scheduler or several, advanced by the guard, and only by steps that were applied.
        schedule_per: ``"step"`` advances the schedule after every applied step, ``"epoch"`` after every epoch.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` (with loss scaling), or ``"auto"``: bf16 if the accelerator
            supports it, else fp16; fp32 on a CPU.
        max_norm: the largest gradient norm; None turns clipping off, ``"policy"`` takes the policy's.
        clip: ``"group"`` clips every parameter group on its own; ``"global"`` all together, as ``clip_grad_norm_``
            does, to the bit; ``AGC()`` (or ``"agc"``) clips by unit, ``ZScore()`` (``"zscore"``) by the recent past.
        policy: what to do about trouble, from skipping a step to going back to a snapshot. ``Policy()`` is our own
            ladder, ``Policy.recipe(name)`` one of those in docs/recipes.md.
        snapshots: how snapshots are taken; None takes none, ``"auto"`` takes them if the policy can roll back and
            there is enough memory.
        accumulate: how many micro-batches make a step. The loss is divided by it.
        drop_bad_microbatches: leave a non-finite micro-batch out and keep the rest of the step, at the price of a
            second set of gradients.
        ema: a ``torch.optim.swa_utils.AveragedModel`` (anything with ``update_parameters``), updated after each
            applied step and never by a skipped one.
        loss_scale: how the fp16 loss scale moves; None does not scale the loss.
        sync: ``"late"`` lets the device skip and tells the host later, without a sync; ``"eager"`` asks the device
            once a step; ``"auto"`` is late on CUDA if all optimizers are fused, else eager.
        diagnose: ``"auto"`` replays a bad step to say where it came from, fully for the first of a kind and briefly for
            repeats; ``"full"`` and ``"brief"`` always do so, ``"off"`` never.
        capture: what ``run_dir/incidents`` holds of a bad step: ``"none"`` nothing, ``"meta"`` what happened, without
            data, ``"batch"`` also batch, random states and torch calls, ``"full"`` the weights too.
        run_dir: where to write the run log, and snapshots that go to disk; None writes nothing.
        observers: objects that are told what happens, such as your own ``nanguard.Observer``.
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
        max_norm: float | Literal["policy"] | None = "policy",
        clip: Clip = "group",
        policy: Policy | None = None,
        snapshots: Snapshots | Literal["auto"] | None = "auto",
        accumulate: int = 1,
        drop_bad_microbatches: bool = False,
        ema: nn.Module | None = None,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        sync: Literal["auto", "eager", "late"] = "auto",
        diagnose: How = "auto",
        capture: CaptureLevel = "batch",
        run_dir: str | Path | None = None,
        observers: Sequence[Observer] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        policy = choose_policy(policy)
        self._parts = assemble(
            model,
            optimizer,
            scheduler=scheduler,
            schedule_per=schedule_per,
            precision=precision,
            max_norm=policy.max_norm if isinstance(max_norm, str) and max_norm == "policy" else max_norm,
            clip=clip,
            policy=policy,
            accumulate=accumulate,
            drop_bad_microbatches=drop_bad_microbatches,
            ema=ema,
            loss_scale=loss_scale,
            process_group=process_group,
            make_journal=lambda is_first: make_journal(run_dir, is_first=is_first, observers=observers),
        )
        self.sync = choose_sync(sync, self._parts)
        self._engine, self._recovery = make_engine(
            self._parts,
            sync=self.sync,
            accumulate=accumulate,
            snapshots=choose_snapshots(snapshots, policy),
            diagnose=diagnose,
            capture=capture,
            run_dir=run_dir,
            snapshot_dir=None if run_dir is None else Path(run_dir) / "snapshots",
        )
        introduce(self._parts, asked_precision=precision, sync=self.sync)
        weakref.finalize(self, self._parts.journal.sum_up)  # for a program that never closes its guard

    # ---- the loop handed over ------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFn, batch: Any = _NOTHING, *, microbatches: Iterable[Any] | None = None) -> Any:
        """One guarded step: forward under autocast, backward, measure, protect, schedule, ``zero_grad``.

        ``loss_fn(model, batch)`` returns the loss, or ``(loss, aux)``; what comes back is the same with the loss
        detached, on its device, unsynced. With ``accumulate=n`` every n-th call updates. Or pass a list of
        ``microbatches`` instead of ``batch`` to make a step of them all: the mean loss comes back, and the list of aux.

        Does not sync if ``syncs_per_step`` is 0. An exception before the optimizers step leaves everything as it was.
        """
        pending = self._parts.pending
        if pending is not None and not pending.rerunnable and pending.losses:
            raise ProtocolError(
                "guard.step() was called between guard.backward() and guard.update(): finish that step with "
                "guard.update() first, or use guard.step() alone"
            )
        if pending is not None and pending.rerunnable and pending.in_microbatch:
            raise ProtocolError("guard.step() was called by the loss function of another guard.step()")
        if not callable(loss_fn):
            raise ValueError(
                f"guard.step(loss_fn, batch) needs a function of (model, batch) first, got {loss_fn!r:.80}"
            )
        if (batch is _NOTHING) == (microbatches is None):
            raise ValueError("guard.step() takes either a batch or microbatches=[...]")
        if microbatches is None:
            return self._engine.on_one(loss_fn, batch)
        return self._engine.on_many(loss_fn, list(microbatches))

    def epoch(self, loader: Iterable[T]) -> Epoch[T]:
        """Iterates over ``loader`` as a new epoch. Counts per epoch start again, and at its end all steps are settled.

        Micro-batches left over when the loader ends make a last, smaller step. If the run goes back to a snapshot,
        batches come again. For training data only, and one epoch at a time.
        """
        return Epoch(loader, self._engine)

    # ---- a loop of the user's own --------------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """For the forward pass of your own loop: begins the step and enters the guard's precision.

        If gradients are off (validation under ``torch.no_grad()``), it only enters the precision.
        """
        pending = self._engine.stop_taping()
        if pending is not None and pending.rerunnable:
            raise ProtocolError(
                "guard.autocast() was called while guard.step() is gathering micro-batches: use one or the other"
            )
        if torch.is_grad_enabled():
            pending = pending or self._engine.open(rerunnable=False, divisor=self._engine.accumulate)
            self._engine.before_own_forward(pending)
            return self._engine.in_own_loop()
        self._parts.last_forward.mend_()
        return self._parts.precision.autocast()

    def backward(self, loss: Tensor) -> None:
        """Backward of ``loss / accumulate``, scaled if the precision needs it. May be called several times."""
        pending = self._parts.pending
        if pending is None or pending.rerunnable:
            raise ProtocolError(
                "guard.backward() was called without guard.autocast(): compute the loss inside "
                "`with guard.autocast():`, in fp32 too, so that the guard can note what the forward pass may change"
            )
        self._engine.backward(pending, loss)

    def update(self) -> None:
        """Ends the step: measure, protect, schedule, ``zero_grad``. Does not sync if ``syncs_per_step`` is 0."""
        pending = self._parts.pending
        if pending is None or pending.rerunnable or not pending.losses:
            raise ProtocolError("guard.update() was called before guard.backward(): there are no gradients to apply")
        self._engine.update(pending)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replays a CUDA graph that holds one guarded step, and counts it. Does not sync.

        Run a few steps as usual, ``guard.settle()``, and capture ``guard.step`` (or autocast, backward and update).
        Steps in flight after a bad one count as lost, since their inputs have been overwritten.
        """
        self._engine.replay(graph)

    # ---- looking at it -------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._parts.state.model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return self._parts.state.optimizers

    @property
    def policy(self) -> Policy:
        return self._parts.policy

    @property
    def precision(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._parts.precision.name

    @property
    def syncs_per_step(self) -> int:
        """How often a healthy step waits for the device: 0 or 1."""
        return 0 if self.sync == "late" else 1

    @property
    def current_step(self) -> int:
        """The number of the step being computed, from 0. While a step is run again, it is the number of that step.

        It counts attempts: a rollback does not set it back.
        """
        pending = self._parts.pending
        return self._parts.num_steps if pending is None else pending.step

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 1; 0 before the first. A rollback sets it back."""
        return self._engine.num_epochs

    @property
    def incidents(self) -> Incidents:
        """Every incident so far, as far as the host knows."""
        return self._parts.journal.incidents

    @property
    def last_outcome(self) -> Outcome | None:
        """The outcome of the last step that the host knows of."""
        return self._parts.journal.last

    @property
    def counts(self) -> dict[str, int]:
        """How many steps were applied, skipped, lost after a skipped one, run again, backed off (and halted).

        ``rolled_back`` says how often the run went back, ``undone`` by how many steps in all.
        """
        return Counter(self._parts.journal.counts)  # 0 for what has not happened

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={number}" for name, number in self.counts.items())
        return f"Guard(precision={self.precision!r}, sync={self.sync!r}, {counts})"

    def _repr_html_(self) -> str:
        """What a notebook shows. Does not sync."""
        from nanguard.records.guard_html import guard_html

        return guard_html(
            counts=self.counts,
            precision=self.precision,
            in_fp32=self.kept_fp32,
            syncs=self.sync == "eager",
            incidents=self.incidents,
        )

    # ---- precision of single modules -----------------------------------------------------------------------------

    def keep_fp32(self, *names: str) -> tuple[str, ...]:
        """Runs these modules in fp32, forward and backward, inside a model that runs in lower precision.

        Names are those of ``model.named_modules()``; patterns such as ``"decoder.layers.*.attn"`` are fine. Returns the
        names that are new. Takes effect with the next step, and is saved by ``state_dict``.
        """
        self.settle()
        return self._parts.islands.keep(*names)

    def release_fp32(self, *names: str) -> tuple[str, ...]:
        """Undoes ``keep_fp32``, for all modules if no name is given. Returns the names that were released."""
        self.settle()
        return self._parts.islands.release(*names)

    @property
    def kept_fp32(self) -> tuple[str, ...]:
        """The modules that are kept in fp32, by you or by the ladder."""
        return self._parts.islands.names

    # ---- snapshots -----------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The good snapshots, each by the number of the step it was taken before; oldest first."""
        return () if self._engine.ring is None else self._engine.ring.steps

    def roll_back(self, steps: int = 1, *, skip_batches: int = 0, lr: float = 1.0) -> str:
        """Goes back to the newest good snapshot at least ``steps`` old, by hand. Returns what it did, in words.

        The rung ``Rollback`` does the same. Inside ``guard.epoch`` the data are rewound too.
        """
        if self._engine.ring is not None:
            self._engine.ring.agree()
        if not self.snapshots:
            raise ProtocolError(
                "guard.roll_back() was called and there is no good snapshot: the first is good some steps after it was "
                "taken, and with snapshots=None there is none"
            )
        if not isinstance(skip_batches, int):
            raise ValueError(f"skip_batches must be a whole number here, got {skip_batches!r}: nothing has failed")
        self._parts.drop_unfinished()
        self.settle()
        did = self._recovery.go_back(self._parts.num_steps, Rollback(steps, skip_batches=skip_batches, lr=lr))
        self._engine.mode.drop_in_flight()
        self._parts.journal.note("roll_back", step=self._parts.num_steps, did=did)
        return did

    def resume(self) -> int | None:
        """Restores the newest good snapshot that an earlier process has written to ``run_dir``; None if there is none.

        Returns the number of steps made by then. With everything put back, the next ``guard.epoch(loader)`` goes on
        at the batch before which the snapshot was taken. Needs ``Snapshots(where="disk")``.
        """
        self.settle()
        return resume(self._engine)

    def can_save(self) -> bool:
        """Whether a checkpoint saved right now is sound: ``if guard.can_save(): torch.save(...)``.

        False in the middle of a step, while steps are in flight whose readings have not arrived (``guard.settle()``
        waits for them), and if a weight, buffer or moment is non-finite. Checks all of them, which syncs. Asks no
        other rank.
        """
        return self._parts.pending is None and self._engine.mode.is_verified() and not self._parts.state.unsound()

    # ---- settling and resuming -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until the host knows of all steps. Then every step that could be applied is in the weights.

        ``guard.epoch`` does it at the end of the loader. Call it before saving a checkpoint anywhere else.
        """
        self._engine.settle()

    def close(self) -> None:
        """Settles, ends the run log, and sums up what happened. ``with Guard(...) as guard:`` does it for you."""
        self.settle()
        self._engine.close()
        self._parts.journal.close(steps=self._parts.num_steps)
        self._parts.journal.sum_up(self._parts.state.unsound)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._engine.end(error)
        if error is None:
            self.close()
        self._parts.journal.sum_up()

    def state_dict(self) -> dict[str, Any]:
        """Counts, loss scale, learned limits, mitigations, history, the past of a ``Monitor``; plain. Settles first."""
        self.settle()
        parts = self._parts
        return {
            "version": 2,
            **facts_of(self._engine),
            "scaler": None if parts.precision.scaler is None else parts.precision.scaler.state_dict(),
            "clipper": parts.clipper.state_dict(),
            "observers": parts.journal.observers.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes exactly where ``state_dict`` was taken. Model, optimizers, schedulers and EMA have their own."""
        parts = self._parts
        if state.get("version") != 2:
            raise ValueError(f"this guard reads state of version 2, got {state.get('version')!r}")
        if (state["scaler"] is None) != (parts.precision.scaler is None):
            raise ValueError(
                f"the state was saved {'without' if state['scaler'] is None else 'with'} a loss scale, and this guard "
                f"runs in {self.precision}: use the precision it was saved with"
            )
        self.settle()
        self._recovery.forget()
        self._engine.mode.drop_in_flight()
        load_facts(self._engine, state)
        if parts.precision.scaler is not None:
            parts.precision.scaler.load_state_dict(state["scaler"])
        parts.clipper.load_state_dict(state["clipper"])
        parts.journal.observers.load_state_dict(state.get("observers", ()))  # older versions saved none
