"""The result of a guarded program in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from nanguard.autopilot.entry import Autopilot
from nanguard.records.summary import closing_line

_FIND_CALL = "CUDA_LAUNCH_BLOCKING=1 shows the call in the traceback; CUDA_VISIBLE_DEVICES= runs the program on the CPU"


def sentence(autopilot: Autopilot, *, unsound: Sequence[str] | None) -> str:
    """For the last line of ``nanguard run``. ``unsound`` are the names of what was not finite at the end.

    None if they could not be looked at.
    """
    if not autopilot.num_optimizers and autopilot.unguarded:
        return f"NOT GUARDED: {', '.join(dict.fromkeys(autopilot.unguarded))} could not be"
    if not autopilot.num_optimizers:
        if autopilot.has_guard:
            return "nothing to do, since the program has a Guard of its own"
        none = "nothing to guard: this process made no step of an optimizer and no backward pass"
        return autopilot.of_children.removeprefix("; ") or none + _children(
            autopilot.num_children + autopilot.num_in_pools
        )
    told = closing_line(
        autopilot.counts,
        autopilot.incidents,
        unsound=unsound,
        refused_in_a_row=autopilot.refused_in_a_row,
        refused_by=autopilot.refused_by,
        num_not_kept=autopilot.num_not_kept,
    )
    return told + _stopped(autopilot) + autopilot.of_children + _children(autopilot.num_children)


def _stopped(autopilot: Autopilot) -> str:
    if not autopilot.stopped_by:
        return ""
    told = f"; the GPU has stopped ({autopilot.stopped_by}), and the weights on it could not be looked at"
    if autopilot.is_stop_explained:
        return told
    return f"{told}. The data of the last steps that are in the host's memory are finite. {_FIND_CALL}"


def _children(number: int) -> str:
    """Processes that the program started."""
    if not number:
        return ""
    if number == 1:
        return "; a child process was started, which is guarded only if it calls nanguard.install()"
    return f"; {number:,} child processes were started, which are guarded only if they call nanguard.install()"
