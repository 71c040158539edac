"""The step function of a host, to be run again: a framework computes the loss in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nanguard.source.frames import runs_user_code
from nanguard.step.dry_run import apart


class HostStep:
    """A loss function: ``rerun(batch)`` is the host's own step. It calls ``root``, which may be wrapped in DDP.

    The host may turn autocast on inside, so an experiment in fp32 has to turn it off there.
    """

    def __init__(self, rerun: Callable[[Any], Tensor], root: nn.Module) -> None:
        self._rerun, self._root = rerun, root

    @runs_user_code
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with apart(self._root, alone=True):  # the other ranks do not run it
            return self._rerun(batch)
