"""Forward passes that a program throws away itself: ``if not torch.isfinite(loss): continue``.

Such a pass may have left NaN in buffers (BatchNorm's running statistics), and the next good step would be refused for
them. So each forward pass has its buffers noted, and they are put back if its loss never reached a step. What a pass
with finite results has written stays: it is the program's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanguard.numerics.finite import nonfinite
from nanguard.state.names import unwrapped
from nanguard.state.undo import Undo

_EACH = 256
"""So many passes of one step are all noted, of more only some: a program may call a module thousands of times."""

_MOST_LOSSES = 256


class LastForward:
    """The buffers as they were before the last forward pass. Does not sync on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self.is_on = False
        """Whether buffers were noted that may have to be put back. If not, nothing below has an effect."""
        self._before: Undo | None = None
        self._later: Undo | None = None
        self._losses: list[Tensor] = []
        self._is_used = False
        self._number = 0

    def begin_(self, noted: Undo) -> None:
        """The first pass of a step begins. ``noted`` has just noted the buffers, if there are any."""
        self._number = 1
        self._start(noted)

    def follow_(self) -> None:
        """Another pass of the same step begins."""
        self._number += 1
        if self._number > _EACH and self._number & (self._number - 1):
            return
        self.mend_()
        if self._later is None:
            self._later = Undo(self._device)
            self._later.watch_buffers(unwrapped(self._model), only_small=True)
        self._later.note_()
        self._start(self._later)

    def _start(self, before: Undo) -> None:
        self.is_on = before.is_used
        self._before, self._losses, self._is_used = before if before.is_used else None, [], False

    def was_used(self, losses: Sequence[Tensor]) -> None:
        """There was a backward pass, from these."""
        self._is_used = True
        if self._before is not None:
            self._losses = [*self._losses, *losses][-_MOST_LOSSES:]

    def mend_(self) -> None:
        """Puts non-finite buffers back, unless the pass led to a backward pass from a finite loss."""
        if self._before is not None and not self._is_used:
            self._before.mend_()
        elif self._before is not None and self._losses:
            self._before.mend_(nonfinite(self._losses, self._device))
        self.forget()

    def mend_unused_(self) -> None:
        """Puts non-finite buffers back, if there was no backward pass since: the last batch of a step was left out."""
        if not self._is_used:
            self.mend_()

    def mend_in_any_case_(self) -> None:
        """Puts non-finite buffers back: the step that the pass belonged to was never made."""
        if self._before is not None:
            self._before.mend_()
        self.forget()

    def forget(self) -> None:
        """The step has been judged, and buffers with it."""
        self.is_on = False
        self._before, self._losses, self._is_used = None, [], False

    def look_again(self) -> None:
        """The model may have other buffers now."""
        self._later = None
