"""Tensors that change outside the optimizer and must not show a bad step: module buffers and averaged models.

BatchNorm writes its running statistics in the forward pass, before any gradient can be checked. So what may change is
copied when a step begins and put back when the step is skipped: by the host if it knows, else on the device.

Small tensors are copied at every step, all of one kind by one kernel: torch does not count what ``batch_norm`` writes.
Large ones are copied only after torch has counted a write, so that masks and position tables cost nothing. On a CPU,
the first steps show which of them a program writes to without that torch counts it (``buffer.data``): these are copied
at every step too. What the device cannot put back (a buffer that is not there yet, empty, overlapping itself or on
another device) the host does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard._compat_modes import NoGrad
from nanguard.state.names import plain_name
from nanguard.state.noted import Bank, Slot, is_fixed

Key = tuple[int, str]
Copies = dict[Key, Tensor | None]

_LARGE = 1 << 14
_LOOKS = 8
"""So often a large tensor is noted before torch is trusted to count what is written to it, on a CPU."""


class Undo:
    """Notes tensors and puts them back. Does not sync, unless tensors have changed their shape or kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_used = False
        """Whether there is anything to note."""
        self.has_statistics = False
        """Whether there are running statistics, as of BatchNorm, which change at nearly every step."""
        self._slots: dict[Key, Slot] = {}
        self._banks: list[Bank] = []
        self._large: list[Slot] = []
        self._loose: dict[Key, Slot] = {}

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
        if not self._slots:
            return {}
        with NoGrad():  # at every step: torch's own takes as long as a copy
            return self._note_()

    def is_noted(self) -> bool:
        """Whether torch has counted no write since ``note_``, so that it need not be called again.

        Torch does not count what ``batch_norm`` writes, but it counts what the module BatchNorm writes besides.
        """
        if self._loose or self._written():
            return False
        return all(bank.is_noted() for bank in self._banks)

    def is_up_to_date(self) -> bool:
        """Whether ``note_`` need not be called again, as far as that is known without a sync: on a CPU values count."""
        return self.are_as_noted() if self._device.type == "cpu" else self.is_noted()

    @torch.no_grad()
    def differ(self) -> Tensor:
        """1 if a small tensor is not what it was when it was noted, counted by torch or not, else 0. Does not sync."""
        flags = [bank.differs() for bank in self._banks]
        flag = torch.stack(flags).any() if flags else torch.zeros((), device=self._device)
        return flag.double().reshape(1)

    def peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names of floating-point tensors that may have changed, and vectors of their largest absolute values now.

        Elements that were non-finite before the step were meant to be (a mask, a running minimum) and do not count.
        """
        return self._peaks() if self._slots else ((), [])

    def are_sound(self) -> bool:
        """Whether each floating-point tensor is finite, or what it was when it was noted, such as a mask with -Inf.

        False if that is not certain. Syncs. Quicker than ``peaks`` on a CPU, which has to follow if this is False.
        """
        if self._loose or self._written():
            return False
        return all(bank.is_finite() or bank.is_as_noted() for bank in self._banks if bank.is_watched)

    def are_as_noted(self) -> bool:
        """Whether no value is another one than when it was noted. Of large tensors torch has to know. Syncs."""
        if self._loose or self._written():
            return False
        return all(map(Bank.is_as_noted, self._banks))

    def spoiled_statistics(self) -> list[str]:
        """Names of running statistics that were NaN or Inf already when they were noted. Syncs."""
        if all(bank.was_finite() for bank in self._banks if bank.is_watched):
            return []
        statistics = [slot for slot in self._slots.values() if slot.key.startswith("running_")]
        return [s.name for s in statistics if s.saved is not None and not bool(torch.isfinite(s.saved).all())]

    def undo_where_(self, flag: Tensor) -> None:
        """Puts back what can be put back on the device, if the 0-dim ``flag`` is 1."""
        if self._slots:
            self._undo_where_(flag != 0)

    @torch.no_grad()
    def undo_(self) -> None:
        """Puts everything back; of the large tensors those that torch counted a write to, since no other was noted."""
        small = [slot for bank in self._banks for slot in bank.slots]
        for slot in (*small, *self._loose.values(), *self._written()):
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

    def _note_(self) -> Copies:
        if not self._loose and not self._large and all(map(Bank.unchanged, self._banks)):
            for bank in self._banks:
                bank.note_(are_unchanged=True)
            return {}
        if self._is_out_of_order():
            self._sort()
        for bank in self._banks:
            bank.note_()
        for slot in self._written():
            slot.note_()
        for slot in self._loose.values():
            slot.note_()
        return {key: None if s.saved is None else s.saved.clone() for key, s in self._loose.items()}

    def _written(self) -> list[Slot]:
        """The large tensors that may have been written to since they were noted."""
        return [slot for slot in self._large if slot.was_written_to()]

    def _is_out_of_order(self) -> bool:
        """Whether a tensor is in the wrong group now: it has another shape or kind, or cannot be written to."""
        replaced = [slot for bank in self._banks if not bank.unchanged() for slot in bank.slots]
        replaced += [slot for slot in self._large if slot.current is not slot.origin]
        if not all(slot.fits for slot in (*replaced, *self._loose.values())):
            return True
        return any(slot.current is not None and is_fixed(slot.current) for slot in replaced)

    @torch.no_grad()
    def _peaks(self) -> tuple[tuple[str, ...], list[Tensor]]:
        names: list[str] = []
        peaks: list[Tensor] = []
        single = self._written()
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
        for slot in self._written():
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
        large = [slot for slot in self._written() if slot.current is slot.origin]
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
        slots: dict[Key, Slot] = {}
        for path, tensors in places:
            for key, tensor in tensors.items():
                if only_small and tensor is not None and tensor.numel() >= _LARGE:
                    continue
                identity = (id(tensors), key)
                slots[identity] = self._slots.get(identity) or Slot(plain_name(f"{path}.{key}"), tensors, key)
        # A CUDA graph may hold on to the copies: they stay as long as they fit.
        if slots.keys() != self._slots.keys() or not all(slot.fits for slot in slots.values()):
            self._slots, self.is_used = slots, bool(slots)
            self.has_statistics = any(slot.key.startswith("running_") for slot in slots.values())
            self._sort()

    @torch.no_grad()
    def _sort(self) -> None:
        """Sorts the slots into groups, each slot with a copy of its current tensor."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Slot], list[Tensor]]] = {}
        self._large, self._loose = [], {}
        modules: dict[int, int] = {}
        for key, slot in self._slots.items():
            slot.module = modules.setdefault(id(slot.owner), len(modules))
            now = slot.current
            if now is None or now.layout is not torch.strided or now.device != self._device or is_fixed(now):
                slot.saved = None if now is None else now.detach().clone()
                slot.note_()
                self._loose[key] = slot
            elif now.numel() >= _LARGE:
                if slot.saved is None and now.device.type == "cpu":
                    slot.looks_left = _LOOKS
                slot.saved = now.detach().clone()
                slot.note_()
                self._large.append(slot)
            else:
                members, tensors = kinds.setdefault((now.device, now.dtype), ([], []))
                members.append(slot)
                tensors.append(now)
        self._banks = [Bank(slots, tensors) for slots, tensors in kinds.values()]
