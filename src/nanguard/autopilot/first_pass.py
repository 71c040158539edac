"""The first backward pass of a program without an optimizer. Nothing has said before that its torch calls matter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from nanguard.diagnosis.backward_probe import BackwardProbe
from nanguard.diagnosis.graph_probe import GraphFinding, examine_graph
from nanguard.source.frames import calling_line


class FirstPass:
    """Follows that one pass, which is therefore slower, and no other."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_due = is_wanted
        self._probe: BackwardProbe | None = None
        self._thread = 0

    def expect(self, losses: Sequence[Tensor]) -> GraphFinding | None:
        """The program is about to differentiate these. What the graph shows, if they are non-finite. Syncs once."""
        if not self._is_due or not losses:
            return None
        self._is_due, self._thread = False, threading.get_ident()
        if BackwardProbe.can_follow(losses):
            self._probe = BackwardProbe(calling_line())
        return examine_graph(losses, calling_line())

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a backward pass."""
        if self._probe is None or self._thread != threading.get_ident():
            return backward(*args, **kwargs)
        return self._probe.run(backward, *args, **kwargs)

    def finding(self, gradients: Iterable[Tensor | None]) -> GraphFinding | None:
        """What the pass has shown, if it was followed and these, which it made, are non-finite."""
        if self._probe is None or self._thread != threading.get_ident():
            return None
        probe, self._probe = self._probe, None
        return probe.finding([gradient for gradient in gradients if isinstance(gradient, Tensor)])
