"""Buffers of a module that several optimizers train: one hosted step notes them, for all."""

from __future__ import annotations

import torch

from nanguard.state.undo import Undo


class SharedBuffers(Undo):
    """Puts back the buffers that another hosted step has noted."""

    def __init__(self, owner: Undo, device: torch.device) -> None:
        super().__init__(device)
        self._owner = owner

    def undo_(self) -> None:
        self._owner.undo_()
