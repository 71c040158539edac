"""Follow one backward pass whose forward pass was not recorded: the first one of a program without an optimizer.

Until then nothing says that the program trains anything. The pass shows which derivative made a gradient non-finite.
It does not show the line of the op; that is searched for in the source code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nanguard import _compat_modes
from nanguard.diagnosis.graph_probe import GraphFinding, has_compiled_code
from nanguard.diagnosis.look import look
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun
from nanguard.source.frames import Place
from nanguard.source.modules import Modules

log = logging.getLogger("nanguard")


class BackwardProbe:
    """For one pass. ``backward_at`` is the line that starts it."""

    def __init__(self, backward_at: Place | None) -> None:
        self._backward_at = backward_at
        self._trace = Trace(Modules())

    @staticmethod
    def can_follow(losses: Sequence[Tensor]) -> bool:
        """Not from a non-finite loss, nor through compiled code, which would depend on being followed. Syncs."""
        return all(look(loss).is_finite for loss in losses) and not has_compiled_code(losses)

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the backward pass. Inside a dispatch mode of the program it is not followed."""
        if _compat_modes.has_dispatch_mode():
            return backward(*args, **kwargs)
        with self._trace:
            return backward(*args, **kwargs)

    def finding(self, gradients: Sequence[Tensor]) -> GraphFinding | None:
        """What the pass shows, given the gradients that it made. None if they are finite. Syncs."""
        try:
            bad = [gradient for gradient in gradients if not look(gradient).is_finite]
            ends = tuple(event for gradient in bad for event in self._trace.events_of(gradient))
        except Exception:  # a tensor that cannot be looked at
            log.info("what a backward pass has shown could not be read", exc_info=True)
            return None
        if not ends:
            return None
        run = WatchedRun(self._trace, found="gradients", ends=ends)
        return GraphFinding("", None, "", any(event.has_nan for event in ends), self._backward_at, run)
