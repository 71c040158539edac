"""Tensors that change outside the optimizer and must not show a bad step: module buffers and averaged models.

BatchNorm writes its running statistics in the forward pass, before any gradient can be checked. So what may change is
copied when a step begins and put back when the step is skipped: by the host if it knows, else on the device.

Small tensors are copied at every step, all of one kind by one kernel: torch does not count what ``batch_norm`` writes.
Large ones are copied only after torch has counted a write, so that masks and position tables cost nothing. What the
device cannot put back (a buffer that is not there yet, empty, overlapping itself or on another device) the host does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat, _compat_kernels
from nanguard.state.names import plain_name

Key = tuple[int, str]
Copies = dict[Key, Tensor | None]

_LARGE = 1 << 14
_WATCHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Slot:
    """One tensor by its place in a module, since programs may replace the tensor itself, or have none there."""

    name: str
    owner: dict[str, Any]
    key: str
    saved: Tensor | None = None
    origin: Tensor | None = None
    version: int | None = None
    module: int = 0
    """The number of the module that it belongs to, among those that have tensors here."""

    @property
    def current(self) -> Tensor | None:
        return self.owner.get(self.key)

    @property
    def fits(self) -> bool:
        """Whether the copy has the shape and kind of the current tensor, which the program may have replaced."""
        now, saved = self.current, self.saved
        return now is saved if now is None or saved is None else _alike(now, saved)

    def was_written_to(self) -> bool:
        now = self.current
        return now is not self.origin or (now is not None and _compat.version(now) != self.version)

    def note_(self) -> None:
        now = self.current
        if now is None or self.saved is None:
            self.saved = None
        else:
            self.saved.copy_(now)
        self.origin, self.version = now, None if now is None else _compat.version(now)

    def put_(self, saved: Tensor | None) -> None:
        """Puts ``saved`` back: into the module's tensor if that is still there, else as a new tensor.

        What a program has put there instead may be its own (a batch that the module remembers) and is not written to.
        """
        now = self.current
        if saved is None:
            if self.key in self.owner:
                self.owner[self.key] = None
        elif now is not None and now is self.origin and _alike(now, saved) and not _is_fixed(now):
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


class _Bank:
    """Small tensors of one kind: their copies lie in one flat tensor, and one kernel copies them all."""

    def __init__(self, slots: list[_Slot], tensors: list[Tensor]) -> None:
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
        self._versions: list[int | None] = []
        for slot, view, tensor in zip(slots, self._saved_views, tensors, strict=True):
            slot.saved, slot.origin = view, tensor

    @property
    def is_watched(self) -> bool:
        return self._saved.dtype in _WATCHED

    def unchanged(self) -> bool:
        """Whether the module still has the very tensors it had when they were noted."""
        return all(slot.owner.get(slot.key) is known for slot, known in zip(self.slots, self._known, strict=True))

    def is_noted(self) -> bool:
        """Whether torch has counted no write since the last note."""
        return self.unchanged() and self._versions == _compat.versions(self._known)

    def note_(self) -> None:
        if not self.unchanged():
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
        self._copy_to_(self._now, self._now_views)
        torch.where(bad, self._saved, self._now, out=self._now)
        _compat_kernels.foreach_copy_(self._known, self._now_views)

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

    def is_finite(self) -> bool:
        """Whether they are the same tensors as when they were noted, and hold no NaN or Inf. Syncs."""
        return self.unchanged() and math.isfinite(torch.linalg.vector_norm(_compat_kernels.flatten(self._known)).item())


class Undo:
    """Notes tensors and puts them back. Does not sync, unless tensors have changed their shape or kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_used = False
        """Whether there is anything to note."""
        self._slots: dict[Key, _Slot] = {}
        self._banks: list[_Bank] = []
        self._large: list[_Slot] = []
        self._loose: dict[Key, _Slot] = {}

    def watch_buffers(self, module: nn.Module, *, only_small: bool = False) -> None:
        """Every buffer that ``module`` has now, and no other; with ``only_small`` those that take little memory."""
        self._take([(path, _compat.buffers_of(owner)) for path, owner in module.named_modules()], only_small=only_small)

    def watch_all(self, module: nn.Module) -> None:
        """Every parameter and buffer of ``module``, such as an averaged model."""
        modules = list(module.named_modules())
        self._take(
            [(path, tensors) for path, m in modules for tensors in (_compat.parameters_of(m), _compat.buffers_of(m))]
        )

    def note_(self) -> Copies:
        """Copies what may have changed. Returns copies of what only the host can put back."""
        return self._note_() if self._slots else {}

    def is_noted(self) -> bool:
        """Whether torch has counted no write since ``note_``, so that it need not be called again.

        Torch does not count what ``batch_norm`` writes, but it counts what the module BatchNorm writes besides.
        """
        if self._loose or any(slot.was_written_to() for slot in self._large):
            return False
        return all(bank.is_noted() for bank in self._banks)

    def peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names of floating-point tensors that may have changed, and vectors of their largest absolute values now.

        Elements that were non-finite before the step were meant to be (a mask, a running minimum) and do not count.
        """
        return self._peaks() if self._slots else ((), [])

    def are_finite(self) -> bool:
        """Whether all floating-point tensors that may have changed are finite now; False if that is not certain. Syncs.

        Quicker than ``peaks`` on a CPU, which has to follow if this is False.
        """
        if self._loose or any(slot.was_written_to() for slot in self._large):
            return False
        return all(bank.is_finite() for bank in self._banks if bank.is_watched)

    def undo_where_(self, flag: Tensor) -> None:
        """Puts back what can be put back on the device, if the 0-dim ``flag`` is 1."""
        if self._slots:
            self._undo_where_(flag != 0)

    @torch.no_grad()
    def undo_(self) -> None:
        """Puts everything back; of the large tensors those that torch counted a write to, since no other was noted."""
        small = [slot for bank in self._banks for slot in bank.slots]
        for slot in (*small, *self._loose.values(), *(slot for slot in self._large if slot.was_written_to())):
            slot.put_(slot.saved)

    @torch.no_grad()
    def mend_(self, only_if: Tensor | None = None) -> None:
        """Puts back the buffers of each module that has one that has become non-finite since ``note_``.

        Buffers of other modules stay as they are. With a 0-dim flag ``only_if``, only if that is 1. On a GPU this does
        not sync; there, tensors that the program has replaced and those that only the host can put back stay too.
        """
        if not self._slots:
            return
        if self._device.type != "cpu":
            self._mend_by_device_(only_if)
        elif only_if is None or bool(only_if):
            self._mend_by_host_()

    @torch.no_grad()
    def put_back(self, copies: Copies) -> None:
        """Puts back what ``note_`` returned."""
        for key, saved in copies.items():
            if key in self._slots:
                self._slots[key].put_(saved)

    @property
    def needs_host(self) -> bool:
        """Whether something here can only be put back by the host."""
        return bool(self._loose) or not all(slot.fits for slot in self._slots.values())

    @torch.no_grad()
    def _note_(self) -> Copies:
        if self._is_out_of_order():
            self._sort()
        for bank in self._banks:
            bank.note_()
        for slot in self._large:
            if slot.was_written_to():
                slot.note_()
        for slot in self._loose.values():
            slot.note_()
        return {key: None if s.saved is None else s.saved.clone() for key, s in self._loose.items()}

    def _is_out_of_order(self) -> bool:
        """Whether a tensor is in the wrong group now: it has another shape or kind, or cannot be written to."""
        replaced = [slot for bank in self._banks if not bank.unchanged() for slot in bank.slots]
        replaced += [slot for slot in self._large if slot.current is not slot.origin]
        if not all(slot.fits for slot in (*replaced, *self._loose.values())):
            return True
        return any(slot.current is not None and _is_fixed(slot.current) for slot in replaced)

    @torch.no_grad()
    def _peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        names: list[str] = []
        peaks: list[Tensor] = []
        single = [slot for slot in self._large if slot.was_written_to()]
        single += [
            slot for slot in self._loose.values() if slot.saved is not None and slot.saved.device == self._device
        ]
        for bank in self._banks:
            if not bank.is_watched:
                continue
            if bank.unchanged():
                names += [slot.name for slot in bank.slots]
                peaks.append(bank.peaks())
            else:
                single += bank.slots
        for slot in single:
            peak = slot.peak()
            if peak is not None:
                names.append(slot.name)
                peaks.append(peak)
        return tuple(names), peaks

    @torch.no_grad()
    def _undo_where_(self, bad: Tensor) -> None:
        for bank in self._banks:
            bank.undo_where_(bad)
        for slot in self._large:
            if slot.was_written_to():
                slot.undo_where_(bad)

    def _mend_by_host_(self) -> None:
        names, peaks = self._peaks()
        flags = torch.isfinite(torch.cat(peaks)).tolist() if peaks else []
        bad = {name for name, is_finite in zip(names, flags, strict=True) if not is_finite}
        modules = {slot.module for slot in self._slots.values() if slot.name in bad}
        for slot in self._slots.values():
            if slot.module in modules:
                slot.put_(slot.saved)

    def _mend_by_device_(self, only_if: Tensor | None) -> None:
        banks = [bank for bank in self._banks if bank.unchanged()]
        large = [slot for slot in self._large if slot.current is slot.origin and slot.was_written_to()]
        number = 1 + max(slot.module for slot in self._slots.values())
        modules = torch.zeros(number, dtype=torch.float32, device=self._device)
        for bank in banks:
            if bank.is_watched:
                bank.find_spoiled_(modules)
        for slot in large:
            peak = slot.peak()
            if peak is not None:
                modules[slot.module].copy_(torch.maximum(modules[slot.module], (~torch.isfinite(peak[0])).float()))
        if only_if is not None:
            modules *= only_if
        for bank in banks:
            bank.mend_(modules)
        for slot in large:
            if slot.current is not None and slot.saved is not None:
                slot.current.data.copy_(torch.where(modules[slot.module] != 0, slot.saved, slot.current))

    def _take(self, places: list[tuple[str, dict[str, Any]]], *, only_small: bool = False) -> None:
        slots: dict[Key, _Slot] = {}
        for path, tensors in places:
            for key, tensor in tensors.items():
                if only_small and tensor is not None and tensor.numel() >= _LARGE:
                    continue
                identity = (id(tensors), key)
                slots[identity] = self._slots.get(identity) or _Slot(plain_name(f"{path}.{key}"), tensors, key)
        # A CUDA graph may hold on to the copies: they stay as long as they fit.
        if slots.keys() != self._slots.keys() or not all(slot.fits for slot in slots.values()):
            self._slots, self.is_used = slots, bool(slots)
            self._sort()

    @torch.no_grad()
    def _sort(self) -> None:
        """Sorts the slots into groups, each slot with a copy of its current tensor."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[_Slot], list[Tensor]]] = {}
        self._large, self._loose = [], {}
        modules: dict[int, int] = {}
        for key, slot in self._slots.items():
            slot.module = modules.setdefault(id(slot.owner), len(modules))
            now = slot.current
            if now is None or now.layout is not torch.strided or now.device != self._device or _is_fixed(now):
                slot.saved = None if now is None else now.detach().clone()
                slot.note_()
                self._loose[key] = slot
            elif now.numel() >= _LARGE:
                slot.saved = now.detach().clone()
                slot.note_()
                self._large.append(slot)
            else:
                members, tensors = kinds.setdefault((now.device, now.dtype), ([], []))
                members.append(slot)
                tensors.append(now)
        self._banks = [_Bank(slots, tensors) for slots, tensors in kinds.values()]


def _where_finite(before: Tensor, now: Tensor) -> Tensor:
    """Absolute values of ``now``, and 0 where ``before`` was NaN or Inf, or ``now`` is -Inf: a mask that has moved."""
    counts = (before.abs() < math.inf) & (now != -math.inf)
    return torch.where(counts, now.abs(), torch.zeros_like(now))


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device


def _is_fixed(tensor: Tensor) -> bool:
    """Whether it cannot be written to in place: empty, made in inference mode, or with elements that share memory."""
    if tensor.numel() == 0 or tensor.is_inference():
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
