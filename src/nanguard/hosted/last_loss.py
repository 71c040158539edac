"""The loss that a program was looking at when it raised: ``assert torch.isfinite(loss)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanguard import _compat
from nanguard.diagnosis.graph_probe import examine_graph
from nanguard.errors import NonFiniteError
from nanguard.hosted.given import given_nan, passed, raised_by_nonfinite
from nanguard.hosted.iteration import Iteration
from nanguard.source.frames import Place
from nanguard.step.calls import Call
from nanguard.step.discarded import DiscardedPasses
from nanguard.step.pending import PendingStep
from nanguard.step.tape import CallTape, Made, TapedLoss, is_readable
from nanguard.step.tape_recorder import TapeRecorder


def last_loss(error: BaseException | None, before: Sequence[Tensor] = ()) -> tuple[Tensor, Place] | None:
    """The innermost non-finite loss among the variables of the functions that ``error`` has passed, and its line.

    Those of earlier steps do not count. Only for an error that ends the program: reading variables may keep them
    alive. Syncs.
    """
    known = {_compat.storage_key(loss) for loss in before}
    for frame, line in reversed(list(passed(error))):
        for name, value in list(frame.f_locals.items()):
            if _is_bad_loss(name, value) and _compat.storage_key(value) not in known:
                return value, (frame.f_code.co_filename, line, frame.f_code.co_name)
    return None


def end_in_the_middle(
    pending: PendingStep,
    this: Iteration,
    discarded: DiscardedPasses,
    error: BaseException | None,
    taper: TapeRecorder,
    before: Sequence[Tensor] = (),
) -> None:
    """The program ends before the step of this iteration: it is examined if it is not finite. Syncs."""
    if isinstance(error, NonFiniteError):  # ours: it says why itself
        return
    pending.live, pending.graph_finding = this.live, this.graph_finding
    pending.last_seen, pending.microbatches = list(this.batches) or None, list(this.reruns)
    losses = list(this.losses)
    seen = None if losses or isinstance(error, KeyboardInterrupt) else last_loss(error, before)
    if seen is not None:
        losses.append(seen[0].detach().reshape(()))
        pending.graph_finding = examine_graph([seen[0]], seen[1])
    if taper.tape is this.tape:
        end = _note_end(taper, this.tape, None if seen is None else seen[0], this.calls)
        if end is not None:
            pending.graph_finding = examine_graph(*end)
    pending.tape, pending.fetched = this.tape if this.tape.losses else None, list(this.fetched)
    is_inside = any(not call.has_returned for call in this.calls)
    raised = None if isinstance(error, SystemExit) else error
    is_suspect = raised_by_nonfinite(raised, is_in_model=is_inside)
    if is_suspect and pending.graph_finding is None:  # such as int(label)
        pending.graph_finding = given_nan(raised, computed={id(tensor) for _, tensor in taper.held()})
    discarded.end(pending, list(this.calls), losses, raised, is_suspect=is_suspect)


def _note_end(
    taper: TapeRecorder, tape: CallTape, loss: Tensor | None, calls: Sequence[Call]
) -> tuple[list[Tensor], Place | None] | None:
    """What is to be made again: this loss, the call that raised, or the last NaN that the program still holds.

    Returns that NaN, and the line that has ended.
    """
    if loss is not None:
        taper.note_losses([loss])
    elif not tape.losses:
        held = ((made, tensor) for made, tensor in taper.held() if is_readable(tensor) and bool(tensor.isnan().any()))
        last, bad = next(held, (None, None))
        raised = tape.raised
        if raised is None and calls and not calls[-1].has_returned and calls[-1].taped is not None:
            taper.after_module(calls[-1], [])
            raised = max(tape.rows, default=None)
        root = last if raised is None else Made(raised, 0)
        if root is not None:
            tape.losses.append(TapedLoss((root,), (), root.number))
            row = tape.row(root.number)
            return None if bad is None else ([bad], None if row is None else row.place)
    return None


def _is_bad_loss(name: str, value: object) -> bool:
    """A tensor of one element that has dimensions counts only if its name says so: it may be an agent's action."""
    # type(), since isinstance asks proxies for their class, and some of them then do something.
    if not issubclass(type(value), Tensor):
        return False
    assert isinstance(value, Tensor)
    if value.numel() != 1 or value.grad_fn is None or not value.is_floating_point():
        return False
    if value.dim() > 0 and "loss" not in name.lower():
        return False
    return not bool(torch.isfinite(value.detach()).all())
