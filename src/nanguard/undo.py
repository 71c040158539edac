"""Tensors that change outside the optimizer and must not show a bad step: module buffers and averaged models.

BatchNorm writes its running statistics in the forward pass, before any gradient can be checked. So what may change is
copied when a step begins and put back when the step is skipped: by the host where it knows, else on the device.

Small tensors are copied at every step, all of one kind by one kernel: torch does not count what ``batch_norm`` writes.
Large ones are copied only after torch has counted a write, so that masks and position tables cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.numerics.finite import nonfinite
from nanguard.numerics.norm import tensor_norms

Key = tuple[int, str]
Copies = dict[Key, Tensor]

_LARGE = 1 << 16


@dataclass(slots=True)
class _Slot:
    """One tensor by its place in a module, since programs may replace the tensor itself."""

    name: str
    owner: dict[str, Any]
    key: str
    saved: Tensor
    watched: bool
    origin: Tensor | None = None
    version: int | None = None

    @property
    def current(self) -> Tensor:
        tensor: Tensor = self.owner[self.key]
        return tensor

    @property
    def fits(self) -> bool:
        """Whether the copy still fits: a program may have put in a tensor of another shape or kind."""
        now, saved = self.current, self.saved
        return now.shape == saved.shape and now.dtype is saved.dtype and now.device == saved.device

    def was_written_to(self) -> bool:
        return self.current is not self.origin or self.version is None or self.version != _compat.version(self.origin)

    def note_(self) -> None:
        self.origin = self.current
        self.saved.copy_(self.origin)
        self.version = _compat.version(self.origin)

    def undo_(self) -> None:
        if self.fits:
            self.current.copy_(self.saved)
        else:
            self.owner[self.key] = self.saved.clone()

    def undo_where_(self, bad: Tensor) -> None:
        if self.fits:  # a tensor of another shape can only be put back by the host
            torch.where(bad, self.saved, self.current, out=self.current)


class _Bank:
    """Small tensors of one kind: their copies lie in one flat tensor, and one kernel copies them all."""

    def __init__(self, slots: list[_Slot]) -> None:
        self.slots = slots
        shapes, sizes = [s.saved.shape for s in slots], [s.saved.numel() for s in slots]
        self._saved = torch.cat([s.saved.reshape(-1) for s in slots])
        self._now = torch.empty_like(self._saved)
        self._lengths = torch.tensor(sizes, device=self._saved.device)
        self._saved_views, self._now_views = (
            [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
            for flat in (self._saved, self._now)
        )
        self._known = [slot.current for slot in slots]
        for slot, view in zip(slots, self._saved_views, strict=True):
            slot.saved = view

    def current(self) -> list[Tensor] | None:
        """The tensors as they are now; None where one no longer fits its copy."""
        tensors: list[Tensor] = [slot.owner[slot.key] for slot in self.slots]
        if any(now is not known for now, known in zip(tensors, self._known, strict=True)):
            if not all(slot.fits for slot in self.slots):
                return None
            self._known = tensors
        return tensors

    def note_(self, current: list[Tensor]) -> None:
        _compat.foreach_copy_(self._saved_views, current)

    def undo_where_(self, current: list[Tensor], bad: Tensor) -> None:
        _compat.foreach_copy_(self._now_views, current)
        torch.where(bad, self._saved, self._now, out=self._now)
        _compat.foreach_copy_(current, self._now_views)

    def peaks(self, current: list[Tensor]) -> Tensor:
        _compat.foreach_copy_(self._now_views, current)
        return torch.segment_reduce(self._now.abs().double(), "max", lengths=self._lengths, unsafe=True)


class Undo:
    """Notes tensors, and puts them back. Nothing here syncs but ``add_buffers``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[Key, _Slot] = {}
        self._banks: list[_Bank] = []
        self._large: list[_Slot] = []

    def add_buffers(self, module: nn.Module) -> None:
        """Every buffer of ``module``. One that holds NaN or Inf now is meant to, and is not watched for more.

        Syncs for buffers that are new here, so call it between epochs, not in a step. Buffers that the module no longer
        has are forgotten.
        """
        self._slots = {key: slot for key, slot in self._slots.items() if slot.owner.get(slot.key) is not None}
        for path, owner in module.named_modules():
            self._add(path, owner._buffers, watch=True)
        self._sort()

    def add_all(self, module: nn.Module) -> None:
        """Every parameter and buffer of ``module``, such as an averaged model. They are not watched."""
        for path, owner in module.named_modules():
            self._add(path, owner._parameters, watch=False)
            self._add(path, owner._buffers, watch=False)
        self._sort()

    def note_(self) -> Copies:
        """Copies what may have changed. Returns copies of tensors on other devices, for the host to put back."""
        return self._note_() if self._slots else {}

    @torch.no_grad()
    def _note_(self) -> Copies:
        currents = [bank.current() for bank in self._banks]
        if not all(currents) or not all(slot.fits for slot in self._large):
            self._sort()
            currents = [bank.current() for bank in self._banks]
        for bank, current in zip(self._banks, currents, strict=True):
            if current is not None:
                bank.note_(current)
        for slot in self._large:
            if slot.was_written_to():
                slot.note_()
        return {k: s.saved.clone() for k, s in self._slots.items() if s.saved.device != self._device}

    def peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names of the watched tensors that may have changed, and vectors of their largest absolute values now."""
        return self._peaks() if self._slots else ((), [])

    @torch.no_grad()
    def _peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        names: list[str] = []
        peaks: list[Tensor] = []
        for bank in self._banks:
            if bank.slots[0].watched and (current := bank.current()):
                names += [slot.name for slot in bank.slots]
                peaks.append(bank.peaks(current))
        written = [slot for slot in self._large if slot.watched and slot.was_written_to()]
        if written:
            names += [slot.name for slot in written]
            peaks.append(
                torch.stack([n.to(self._device) for n in tensor_norms([s.current for s in written], math.inf)])
            )
        return tuple(names), peaks

    @torch.no_grad()
    def undo_(self) -> None:
        """Puts everything back, on any device."""
        for slot in self._slots.values():
            slot.undo_()

    def undo_where_(self, flag: Tensor) -> None:
        """Puts everything on the guard's device back where the 0-dim ``flag`` is 1, decided on the device."""
        if self._slots:
            self._undo_where_(flag != 0)

    @torch.no_grad()
    def _undo_where_(self, bad: Tensor) -> None:
        for bank in self._banks:
            if bank.slots[0].saved.device != self._device:
                continue
            if current := bank.current():
                bank.undo_where_(current, bad)
            else:
                for slot in bank.slots:
                    slot.undo_where_(bad)
        for slot in self._large:
            if slot.saved.device == self._device and slot.was_written_to():
                slot.undo_where_(bad)

    @torch.no_grad()
    def put_back(self, elsewhere: Copies) -> None:
        """Puts back what ``note_`` returned."""
        for key, saved in elsewhere.items():
            self._slots[key].current.copy_(saved)

    def _add(self, path: str, tensors: dict[str, Any], *, watch: bool) -> None:
        for key, tensor in tensors.items():
            identity = (id(tensors), key)
            if identity in self._slots or tensor is None or tensor.layout is not torch.strided:
                continue
            finite = watch and tensor.is_floating_point() and not bool(nonfinite([tensor], tensor.device))
            saved = tensor.detach().clone()
            self._slots[identity] = _Slot(f"{path}.{key}".lstrip("."), tensors, key, saved, watched=finite)

    def _sort(self) -> None:
        """Puts the slots into banks by kind; what no longer fits gets a new copy."""
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[_Slot]] = {}
        self._large = []
        for slot in self._slots.values():
            now = slot.current
            slot.saved = now.detach().clone()
            if now.numel() >= _LARGE:
                slot.note_()
                self._large.append(slot)
            elif now.numel():
                kinds.setdefault((now.device, now.dtype, slot.watched), []).append(slot)
        self._banks = [_Bank(slots) for slots in kinds.values()]
