"""Who tries to keep a run alive: the loops people write, torch's GradScaler, two libraries made for it, and ours.

Each is used as its own documentation says, with its defaults. All clip by ``clip_grad_norm_`` (ours by its equal).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from divergences import Run
from tasks import Batch
from watching import Watch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Plain:
    """autocast, backward, `clip_grad_norm_`, step, schedule, `zero_grad`; nothing is checked"""

    title: ClassVar[str] = "plain loop"
    package: ClassVar[str] = "torch"

    def __init__(self, run: Run, watch: Watch) -> None:
        self.run, self.watch = run, watch
        self.setup()

    @classmethod
    def version(cls) -> str | None:
        """What is installed, or None if it is not."""
        try:
            return f"{cls.package} {importlib.metadata.version(cls.package)}"
        except importlib.metadata.PackageNotFoundError:
            return None

    def setup(self) -> None:
        """What is done once, before the loop."""

    def train(self) -> None:
        for batch in self.run.batches:
            loss = self.forward(batch)
            self.backward(loss)
            if (batch.id + 1) % self.run.accumulate == 0:
                self.update(loss)

    def forward(self, batch: Batch) -> Tensor:
        dtype = DTYPES.get(self.run.precision)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self.watch.loss(self.run.model, batch) / self.run.accumulate

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, loss: Tensor) -> None:
        self.clip()
        for optimizer in self.run.optimizers:
            optimizer.step()
        self.tick()

    def clip(self) -> list[Tensor]:
        """Clips what each optimizer trains, and returns the norms."""
        return [nn.utils.clip_grad_norm_(part.parameters(), self.run.max_norm) for part in self.run.parts]

    def tick(self) -> None:
        for scheduler in self.run.schedulers:
            scheduler.step()
        self.clear()

    def clear(self) -> None:
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()


class IsfiniteNorm(Plain):
    """plain, with `if torch.isfinite(norm)` around the step"""

    title = "`if isfinite(norm)`"

    def update(self, loss: Tensor) -> None:
        for norm, optimizer in zip(self.clip(), self.run.optimizers, strict=True):
            if torch.isfinite(norm):
                optimizer.step()
        self.tick()


class Scaler(Plain):
    """plain, with `torch.amp.GradScaler`, in every precision, as it skips steps with non-finite gradients"""

    title = "GradScaler"

    def setup(self) -> None:
        refused = any(p.dtype == torch.float16 for p in self.run.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", enabled=not refused)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, loss: Tensor) -> None:
        for optimizer in self.run.optimizers:
            self.scaler.unscale_(optimizer)
        self.clip()
        for optimizer in self.run.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.tick()


class Arc(Plain):
    """a `Controller` for each optimizer, given its scheduler, and in fp16 the GradScaler"""

    title = "arc-training"
    package = "arc-training"

    def setup(self) -> None:
        arc: Any = importlib.import_module("arc")
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.run.precision == "fp16")
        scaler = self.scaler if self.scaler.is_enabled() else None
        trios = zip(self.run.parts, self.run.optimizers, self.run.schedulers, strict=True)
        self.controllers = [
            arc.Controller(
                part,
                optimizer,
                scheduler=scheduler,
                scaler=scaler,
                config=arc.ControllerConfig(gradient_accumulation_steps=self.run.accumulate, verbose=False),
            )
            for part, optimizer, scheduler in trios
        ]

    def train(self) -> None:
        for batch in self.run.batches:
            if batch.id % self.run.accumulate == 0:
                self.clear()
            loss = self.forward(batch)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            actions = [controller.step(loss) for controller in self.controllers]
            if (batch.id + 1) % self.run.accumulate == 0:
                self.act(actions)
        for controller in self.controllers:
            controller.close()

    def act(self, actions: list[Any]) -> None:
        """Steps what may be stepped, and only then advances its schedule."""
        rows = zip(actions, self.run.parts, self.run.optimizers, self.run.schedulers, strict=True)
        for action, part, optimizer, scheduler in rows:
            if not action.should_skip:
                nn.utils.clip_grad_norm_(part.parameters(), self.run.max_norm)
                self.scaler.step(optimizer)
                scheduler.step()
        if not all(action.should_skip for action in actions):
            self.scaler.update()


class Stability(Plain):
    """a `GuardedOptimizer` around each optimizer, and in fp16 a GradScaler around that"""

    title = "stabilityguard"
    package = "stabilityguard"
    action: ClassVar[str] = "skip"

    def setup(self) -> None:
        stabilityguard: Any = importlib.import_module("stabilityguard")
        self.folder = tempfile.TemporaryDirectory()
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.run.precision == "fp16")
        self.guarded = [
            stabilityguard.GuardedOptimizer(
                optimizer, part, nan_action=self.action, log_dir=self.folder.name, verbose=False
            )
            for optimizer, part in zip(self.run.optimizers, self.run.parts, strict=True)
        ]

    def train(self) -> None:
        with self.folder:
            super().train()
            for optimizer in self.guarded:
                optimizer.close()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, loss: Tensor) -> None:
        for optimizer in self.guarded:
            self.scaler.unscale_(optimizer)
        self.clip()
        for optimizer in self.guarded:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.tick()


class StabilityRollback(Stability):
    """the same with `nan_action="rollback"`, which copies everything after every step"""

    title = "stabilityguard, rollback"
    action = "rollback"


class Nanguard(Plain):
    """`guard.step` with the default policy and a snapshot every 25 steps"""

    title = "**nanguard**"
    package = "nanguard"

    @classmethod
    def version(cls) -> str | None:
        nanguard: Any = importlib.import_module("nanguard") if importlib.util.find_spec("nanguard") else None
        return nanguard and f"nanguard {nanguard.__version__}"

    def train(self) -> None:
        guard = build_guard(self.run)
        for batch in guard.epoch(self.run.batches):
            guard.step(self.watch.loss, batch)
        guard.close()


def build_guard(run: Run) -> Any:
    """The guard as a user would write it. Everything that is ours to choose is chosen here, for all scenarios alike."""
    nanguard: Any = importlib.import_module("nanguard")
    return nanguard.Guard(
        run.model,
        run.optimizers,
        scheduler=run.schedulers,
        precision=run.precision,
        max_norm=run.max_norm,
        clip="global" if len(run.optimizers) == 1 else "group",
        accumulate=run.accumulate,
        drop_bad_microbatches=run.accumulate > 1,
        policy=nanguard.Policy.recipe("default"),
        snapshots=nanguard.Snapshots(every=25, keep=2),
    )


CONTENDERS: dict[str, type[Plain]] = {
    "nanguard": Nanguard,
    "plain": Plain,
    "isfinite": IsfiniteNorm,
    "grad_scaler": Scaler,
    "arc": Arc,
    "stabilityguard": Stability,
    "stabilityguard_rollback": StabilityRollback,
}
