"""Copies of tensors that may change outside the optimizer: of one by its place in a module, and of many small ones."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanguard import _compat, _compat_kernels

_WATCHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Slot:
    """One tensor by its place in a module, since programs may replace the tensor itself, or have none there."""

    name: str
    owner: dict[str, Any]
    key: str
    saved: Tensor | None = None
    origin: Tensor | None = None
    version: int | None = None
    module: int = 0
    """The number of the module that it belongs to, among those that have tensors here."""
    looks_left: int = 0
    """So often it is noted before torch is trusted to count what is written to it."""
    is_counted: bool = True
    """Whether torch counts that. Not so what a program writes to ``buffer.data``, as codebooks do."""

    @property
    def current(self) -> Tensor | None:
        return self.owner.get(self.key)

    @property
    def fits(self) -> bool:
        """Whether the copy has the shape and kind of the current tensor, which the program may have replaced."""
        now, saved = self.current, self.saved
        return now is saved if now is None or saved is None else _alike(now, saved)

    def was_written_to(self) -> bool:
        """Also true if that is not certain. Syncs as long as ``looks_left``."""
        if self.looks_left:
            self._look()
            return True
        now = self.current
        if now is not self.origin or not self.is_counted:
            return True
        return now is not None and _compat.version(now) != self.version

    def note_(self) -> None:
        now = self.current
        if now is None or self.saved is None:
            self.saved = None
        else:
            self.saved.copy_(now)
        self.origin, self.version = now, None if now is None else _compat.version(now)
        self.looks_left = max(0, self.looks_left - 1)

    def _look(self) -> None:
        """Whether torch counts what is written to it shows if it differs from its copy."""
        now, saved = self.current, self.saved
        if now is None or saved is None or now is not self.origin or _compat.version(now) != self.version:
            return
        if not torch.equal(now, saved):
            self.is_counted, self.looks_left = False, 0

    def put_(self, saved: Tensor | None) -> None:
        """Puts ``saved`` back: into the module's tensor if that is still there, else as a new tensor.

        What a program has put there instead may be its own (a batch that the module remembers) and is not written to.
        """
        now = self.current
        if saved is None:
            if self.key in self.owner:
                self.owner[self.key] = None
        elif now is not None and now is self.origin and _alike(now, saved) and not is_fixed(now):
            now.data.copy_(saved)  # by .data: torch would say of a backward pass under way that it was tampered with
        else:
            self.owner[self.key] = saved.clone()

    def undo_where_(self, bad: Tensor) -> None:
        now = self.current
        if now is None or self.saved is None or not self.fits:
            return
        if now is self.origin:
            torch.where(bad, self.saved, now, out=now)
        else:
            self.owner[self.key] = torch.where(bad, self.saved, now)

    def peak(self) -> Tensor | None:
        """The largest absolute value now, of the elements that were finite before; None if that is not known."""
        now, saved = self.current, self.saved
        if now is None or saved is None or now.dtype not in _WATCHED or now.numel() == 0 or not self.fits:
            return None
        return _where_finite(saved, now).amax().double().reshape(1)


class Bank:
    """Small tensors of one kind: their copies lie in one flat tensor, and one kernel copies them all."""

    def __init__(self, slots: list[Slot], tensors: list[Tensor]) -> None:
        self.slots = slots
        shapes, sizes = [t.shape for t in tensors], [t.numel() for t in tensors]
        self._saved = torch.cat([t.detach().reshape(-1) for t in tensors])
        self._now = torch.empty_like(self._saved)
        self._lengths = torch.tensor(sizes, device=self._saved.device)
        self._modules = torch.tensor([slot.module for slot in slots], device=self._saved.device)
        self._saved_views, self._now_views = (
            [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
            for flat in (self._saved, self._now)
        )
        self._known = tensors
        self._places = [(slot.owner, slot.key) for slot in slots]
        self._versions: list[int | None] = []
        for slot, view, tensor in zip(slots, self._saved_views, tensors, strict=True):
            slot.saved, slot.origin = view, tensor

    @property
    def is_watched(self) -> bool:
        return self._saved.dtype in _WATCHED

    def unchanged(self) -> bool:
        """Whether the module still has the very tensors it had when they were noted."""
        return all(map(operator.is_, [owner.get(key) for owner, key in self._places], self._known))

    def is_noted(self) -> bool:
        """Whether torch has counted no write since the last note."""
        return self.unchanged() and self._versions == _compat.versions(self._known)

    def differs(self) -> Tensor:
        """Whether an element is another one than when it was noted, on the device."""
        now = _compat_kernels.flatten(self._known)
        differs: Tensor = ((now != self._saved) & ((now == now) | (self._saved == self._saved))).any()
        return differs

    def is_as_noted(self) -> bool:
        """Whether the values are what they were when they were noted, and no NaN. Syncs."""
        return self.unchanged() and torch.equal(_compat_kernels.flatten(self._known), self._saved)

    def note_(self, *, are_unchanged: bool = False) -> None:
        """``are_unchanged``: ``unchanged`` has just been asked."""
        if not (are_unchanged or self.unchanged()):
            self._known = [slot.owner[slot.key] for slot in self.slots]
            for slot, tensor in zip(self.slots, self._known, strict=True):
                slot.origin = tensor
        self._copy_to_(self._saved, self._saved_views)
        self._versions = _compat.versions(self._known)

    def _copy_to_(self, flat: Tensor, views: list[Tensor]) -> None:
        """A GPU copies them all by one kernel. A CPU copies one by one, and joins them faster."""
        if flat.device.type == "cpu":
            flat.copy_(_compat_kernels.flatten(self._known))
        else:
            _compat_kernels.foreach_copy_(views, self._known)

    def undo_where_(self, bad: Tensor) -> None:
        if not self.unchanged():
            for slot in self.slots:
                slot.undo_where_(bad)
            return
        was_noted = self._versions == _compat.versions(self._known)
        self._copy_to_(self._now, self._now_views)
        torch.where(bad, self._saved, self._now, out=self._now)
        _compat_kernels.foreach_copy_(self._known, self._now_views)
        if was_noted:  # by the program nothing was written to them
            self._versions = _compat.versions(self._known)

    def find_spoiled_(self, modules: Tensor) -> None:
        """Sets the flags of the modules that have a tensor here with a new non-finite element."""
        flags = (~torch.isfinite(self.peaks())).to(modules.dtype)
        modules.scatter_reduce_(0, self._modules, flags, "amax")

    def mend_(self, modules: Tensor) -> None:
        """Puts back the tensors of the modules with a flag. Writes every tensor, the others with what they hold."""
        bad = torch.repeat_interleave(modules[self._modules] != 0, self._lengths, output_size=self._saved.numel())
        self._copy_to_(self._now, self._now_views)
        torch.where(bad, self._saved, self._now, out=self._now)
        # By .data, or torch would raise in the backward pass of a loss that needs one of them.
        _compat_kernels.foreach_copy_([tensor.data for tensor in self._known], self._now_views)

    def peaks(self) -> Tensor:
        """The largest absolute value of each tensor, over the elements that were finite before the step."""
        self._copy_to_(self._now, self._now_views)
        counted = _where_finite(self._saved, self._now)
        return torch.segment_reduce(counted.double(), "max", lengths=self._lengths, unsafe=True)

    def was_finite(self) -> bool:
        """Whether they held no NaN or Inf when they were noted. Syncs."""
        return math.isfinite(torch.linalg.vector_norm(self._saved).item())

    def is_finite(self) -> bool:
        """Whether they are the same tensors as when they were noted, and hold no NaN or Inf. Syncs."""
        return self.unchanged() and math.isfinite(torch.linalg.vector_norm(_compat_kernels.flatten(self._known)).item())


def _where_finite(before: Tensor, now: Tensor) -> Tensor:
    """Absolute values of ``now``, and 0 where ``before`` was NaN or Inf, or ``now`` is -Inf: a mask that has moved."""
    counts = (before.abs() < math.inf) & (now != -math.inf)
    return torch.where(counts, now.abs(), torch.zeros_like(now))


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device


def is_fixed(tensor: Tensor) -> bool:
    """Whether it cannot be written to in place: empty, made in inference mode, or with elements that share memory."""
    if tensor.numel() == 0 or tensor.is_inference():
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
