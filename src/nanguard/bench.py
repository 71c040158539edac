"""The workbench: the parts of a guarded step, and the stages both ways of guarding share.

Nothing here waits for the device. What follows the measurement depends on when the host may know of it: ``eager``
asks before the optimizers step, ``late`` lets the device decide.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.agree import Ranks
from nanguard.backup import Backup
from nanguard.clipper import Clipper
from nanguard.discarded import LastForward
from nanguard.errors import NonFiniteError
from nanguard.islands import Islands
from nanguard.journal import Journal
from nanguard.measure import Board, Group, Reply, Roll
from nanguard.naming import names_of, unwrapped
from nanguard.numerics.clip import scale_
from nanguard.policy import Policy, judge
from nanguard.precision import Precision, Scaler
from nanguard.records import Found, Reading, Verdict
from nanguard.rng import Dice
from nanguard.salvage import Salvage
from nanguard.schedule import Schedule
from nanguard.shield import Shield
from nanguard.undo import Undo
from nanguard.window import Microbatch, Window

log = logging.getLogger("nanguard")

_CAREFUL_STEPS = 1000


@dataclass(slots=True)
class Bench:
    """``scaler`` is there in fp16, ``salvage`` where bad micro-batches are dropped, ``window`` while a step is open.

    ``num_steps`` have been made; ``is_captured`` where one is in a CUDA graph, which cannot be changed any more;
    updates are looked at until ``careful_until`` steps have been made.
    """

    model: nn.Module
    device: torch.device
    precision: Precision
    policy: Policy
    shield: Shield
    schedule: Schedule
    clipper: Clipper
    scaler: Scaler | None
    salvage: Salvage | None
    roll: Roll
    ranks: Ranks
    board: Board
    buffers: Undo
    last_forward: LastForward
    ema: Any
    islands: Islands
    dice: Dice
    journal: Journal
    names: dict[int, str]
    modules: list[nn.Module]
    window: Window | None = None
    num_steps: int = 0
    is_captured: bool = False
    careful_until: int = 0

    @property
    def is_careful(self) -> bool:
        """Whether each update is looked at, and taken back where it is not finite: one sync and a copy a step."""
        return self.num_steps <= self.careful_until and not self.is_capturing

    def be_careful(self) -> None:
        """Something has been written to the weights that no gradient shows. For a long while updates are looked at."""
        if self.careful_until < self.num_steps:
            log.info("from now on every update is looked at, for %d steps", _CAREFUL_STEPS)
        self.careful_until = self.num_steps + _CAREFUL_STEPS

    @contextlib.contextmanager
    def looking_at_update(self) -> Iterator[list[bool]]:
        """Around the optimizers' step: takes it back where it made something non-finite, and says so in the list."""
        spoiled: list[bool] = []
        backup = Backup(self.shield.optimizers)
        try:
            yield spoiled
            is_spoiled = self.ranks.any(backup.is_spoiled())
        except (KeyboardInterrupt, SystemExit):  # half a step, or one that nobody has looked at
            backup.put_back()
            raise
        if is_spoiled:
            backup.put_back()
            spoiled.append(True)
            self.be_careful()

    @property
    def drops_gradients(self) -> bool:
        """Whether single bad gradients are left out; not where they are scaled."""
        return self.policy.drops_gradients and self.scaler is None

    def forward_backward(self, window: Window, micro: Microbatch) -> tuple[Tensor, tuple[Any, ...]]:
        """Runs one micro-batch of a step; the detached loss, and what else the loss function returned."""
        ddp: Any = self.model
        reduction = contextlib.nullcontext() if micro.reduce_gradients else ddp.no_sync()
        with self.leaving_no_trace(), reduction:
            self.begin_microbatch(window)
            with self.precision.autocast():
                result = micro.loss_fn(self.model, micro.fresh_batch())
            loss, *aux = result if isinstance(result, tuple) else (result,)
            loss = self.backward(window, loss)
        return loss, tuple(aux)

    def note_world(self, micro: Microbatch, step: int) -> None:
        """Before a forward pass that may have to be made again."""
        kind = self.device.type
        micro.rng = self.dice.now(step)
        micro.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def look_back(self, micro: Microbatch) -> None:
        """After it: learns from which generators such passes draw."""
        if micro.rng is not None:
            self.dice.compare(micro.rng)

    def begin_microbatch(self, window: Window) -> None:
        """Before the forward pass, or each part of it."""
        if self.salvage is not None and not window.in_microbatch:
            self.salvage.buffers.note_()
        window.in_microbatch = True

    def begin_own_forward(self, window: Window) -> None:
        """Before a forward pass in a loop of the user's own, who may have thrown away the one before it."""
        if self.is_capturing:
            return
        if window.has_begun:
            self.last_forward.follow_()
        else:
            window.has_begun = True
            self.last_forward.begin_(self.buffers)

    def backward(self, window: Window, loss: Tensor) -> Tensor:
        """Adds the gradients of one loss, or none of them where it is non-finite and such are dropped.

        Returns the loss, detached and 0-dim.
        """
        check_loss(loss)
        loss = loss if loss.ndim == 0 else loss.reshape(())
        seen = loss.detach()
        window.losses.append(seen)
        self.last_forward.was_used([seen])
        window.in_microbatch = False
        mean = loss if window.divisor == 1 else loss / window.divisor
        scaled = mean if self.scaler is None else self.scaler.scaled(mean)
        if self.salvage is None:
            scaled.backward()  # type: ignore[no-untyped-call]
            return seen
        params = [p for group in self.shield.groups() for p in group]
        self.salvage.set_aside(params)
        scaled.backward()  # type: ignore[no-untyped-call]
        # Scaled fp16 gradients may overflow by their scale alone: then the whole step backs off together.
        window.flags.append(self.salvage.join(params, seen, judge_gradients=self.scaler is None))
        return seen

    def gather(self, window: Window) -> list[Group]:
        """The gradients of a step, unscaled, and the mean over its micro-batches."""
        groups = self.roll.call()
        grads = [g for group in groups for g in group.grads]
        if self.scaler is not None and grads:
            self.scaler.unscale_(grads)
        correction = window.correction()
        if correction is not None and grads:
            scale_(grads, correction)
        return groups

    def measure(self, window: Window, groups: list[Group]) -> None:
        """Writes all that the step has to say onto the board."""
        self.board.fill_(
            loss=window.mean_loss(),
            scale=None if self.scaler is None else self.scaler.scale,
            flags=window.flags,
            buffers=self.buffers.peaks(),
            groups=groups,
        )
        window.layout = self.board.layout

    def read(self, window: Window, reply: Reply) -> Reading:
        """A board as the host got it, in words."""
        reading = Reading(
            step=window.step,
            epoch=window.epoch,
            batch=window.batch,
            loss=reply.loss if window.knows_loss else math.nan,
            mean_loss=self.ranks.mean_loss(reply.votes) if reply.votes else reply.loss,
            norms=reply.norms if self.scaler is None else self.scaler.in_true_size(reply.norms, reply.scale),
            lrs=window.lrs,
            scale=None if self.scaler is None else reply.scale,
            dropped_microbatches=reply.dropped,
        )
        if reply.is_finite and self.ranks.all_clear(reply.votes):
            return reading
        gradients, buffers = tuple(self.name(p) for p in reply.bad_params), reply.bad_buffers
        if self.ranks.is_mixed and not gradients:  # the other ranks apply this step, so skipping it would part us
            return reading
        seen: dict[Found, bool] = {
            "loss": not math.isfinite(reply.loss),
            "gradients": bool(gradients),
            "buffers": bool(buffers),
        }
        return replace(
            reading,
            found=self.ranks.found(reply.votes) if reply.votes else tuple(name for name in seen if seen[name]),
            gradients=gradients,
            buffers=buffers,
            ranks=self.ranks.culprits(reply.votes),
        )

    def judge(self, reading: Reading) -> Verdict:
        """What the reading says by itself."""
        floor = None if self.scaler is None else self.scaler.floor
        return judge(reading, scale_floor=floor, progress=self.journal.progress)

    def update_average(self) -> None:
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def look_again(self) -> None:
        """Takes in buffers and parameters that the model has got since."""
        self.buffers.watch_buffers(unwrapped(self.model))
        if self.salvage is not None:
            self.salvage.buffers.watch_buffers(unwrapped(self.model))
        self.last_forward.look_again()
        self.roll.look_again(self.model)
        self.names = names_of(self.model)
        self.modules = list(self.model.modules())

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """What raises before the optimizers step, an interrupt too, leaves nothing; a halt sees to that itself."""
        try:
            yield
        except NonFiniteError:
            raise
        except BaseException:
            self.clear()
            raise

    def drop_unfinished(self) -> None:
        """Lets go of a step that was begun and will not be finished."""
        if self.window is not None and self.window.losses:
            passes = len(self.window.losses)
            log.warning("step %d was left in the middle: its %d backward passes are dropped", self.window.step, passes)
            self.clear()
        self.last_forward.mend_in_any_case_()
        self.window = None

    def clear(self) -> None:
        """Leaves nothing of a step that was not finished."""
        self.buffers.undo_()
        self.last_forward.forget()
        self.shield.end_step()
        self.window = None

    def name(self, param: Tensor) -> str:
        if id(param) not in self.names:
            self.names = names_of(self.model)
        return self.names.get(id(param), f"<parameter of shape {tuple(param.shape)}, not in the model>")


def check_loss(loss: Any) -> None:
    """Raises ``ValueError`` for what has no backward pass."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ValueError(f"the loss must be a tensor with one element, got {what}: return the loss, or (loss, aux)")
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter (requires_grad is False): was it detached, made with "
            ".item(), or computed under torch.no_grad()?"
        )
