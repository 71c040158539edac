"""Learning rates and their schedule: advanced only by steps that were applied, put back after one that was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nanguard import _compat

Options = dict[str, Any]


_SCHEDULED = ("lr", "momentum", "betas")

_BASES = ("base_lrs", "max_lrs", "eta_min", _compat.LAST_RATES, "min_lrs")
_GROUP_BASES = ("initial_lr", "max_lr", "min_lr", "swa_lr")


@dataclass(frozen=True, slots=True)
class ScheduleNote:
    """Options of the parameter groups of each optimizer, and states of all schedulers, as they were.

    ``factor`` is what the learning rate had been lowered by then.
    """

    options: list[list[Options]]
    schedulers: list[Options]
    factor: float


class Schedule:
    """The schedulers the guard steps, and the options of the parameter groups they write to. Nothing here syncs."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler], per: str = "step") -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._per = per
        self.is_ours = bool(schedulers)
        """Whether the guard advances the learning rate. If not, it is the user's and is never put back."""
        self._written: list[Any] = []
        self.factor = 1.0
        """What the learning rate has been multiplied by, against what the schedule would say."""

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group now. Syncs if they are tensors on the device."""
        return [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def known_rates(self) -> tuple[float | None, ...]:
        """The same, None for what only the device knows. Does not sync."""
        rates = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rate = group.get("lr")
                rates.append(rate if type(rate) is float else _on_host(rate))
        return tuple(rates)

    def multiply(self, factor: float) -> None:
        """Multiplies the learning rate from here on: the schedule's base too, or its next tick would undo it."""
        self.factor *= factor
        done: set[int] = set()  # groups may share one tensor
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                _multiply(group, ("lr", *_GROUP_BASES), factor, done)
        for scheduler in _all_of(self._schedulers):
            _multiply(vars(scheduler), _BASES, factor, done)
        self._written = self._numbers()

    def give_back(self, factor: float) -> bool:
        """Undoes ``multiply(factor)``. False, and nothing changes, if the program has set rates itself since."""
        if not self.is_ours and self._numbers() != self._written:
            self.factor /= factor
            return False
        self.multiply(1 / factor)
        return True

    def _numbers(self) -> list[Any]:
        rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return [id(rate) if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def tick(self) -> None:
        """Advances by one applied step."""
        self._advance("step")

    def tick_epoch(self) -> None:
        """Advances by one epoch."""
        self._advance("epoch")

    def _advance(self, per: str) -> None:
        if per == self._per:
            for scheduler in self._schedulers:
                scheduler.step()

    def note(self, *, everything: bool = False) -> ScheduleNote:
        """What schedulers change; all options if the user changes them, or with ``everything``."""
        keys = _SCHEDULED if self._schedulers and not everything else None
        return ScheduleNote(
            [[_copied_options(group, keys) for group in optimizer.param_groups] for optimizer in self._optimizers],
            [_copied_options(scheduler.state_dict()) for scheduler in self._schedulers],
            self.factor,
        )

    def restore(self, note: ScheduleNote) -> None:
        """Puts everything back, but a learning rate that was lowered since stays lowered."""
        factor, self.factor = self.factor, note.factor
        for optimizer, groups in zip(self._optimizers, note.options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=False):  # one may have been added since
                for key, value in options.items():
                    if isinstance(value, torch.Tensor):
                        group[key].copy_(value)  # a tensor learning rate may be part of a compiled or captured step
                    else:
                        group[key] = _copied(value)
        for scheduler, state in zip(self._schedulers, note.schedulers, strict=True):
            scheduler.load_state_dict(_copied_options(state))
        if factor != note.factor:
            self.multiply(factor / note.factor)


def moves(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    """Whether the scheduler sets the learning rates of this optimizer: it may know it by a wrapper of a framework."""
    return scheduler.optimizer.param_groups is optimizer.param_groups


def check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    """Raises ``ValueError`` for schedulers the guard cannot step."""
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric that the guard does not have: step it yourself after validation, and "
                "do not pass it as scheduler"
            )
        if not isinstance(scheduler, LRScheduler):
            raise ValueError(f"scheduler must be a torch LRScheduler or several of them, got {scheduler!r}")
        if not any(moves(scheduler, optimizer) for optimizer in optimizers):
            raise ValueError(
                f"{name} was made for another {type(scheduler.optimizer).__name__} than the one to guard: it would "
                "move learning rates that nothing uses. Make the scheduler from the optimizer you pass"
            )


def _copied_options(options: Options, keys: Sequence[str] | None = None) -> Options:
    """A copy that later steps do not change, without the parameters."""
    copied = {**options} if keys is None else {key: options[key] for key in keys if key in options}
    copied.pop("params", None)
    for key, value in copied.items():
        if isinstance(value, (torch.Tensor, list, dict)):
            copied[key] = _copied(value)
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is list:
        return [_copied(v) for v in value]
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value.copy() if isinstance(value, (list, dict)) else value


def _on_host(rate: Any) -> float | None:
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, Real) else None


def _all_of(schedulers: Sequence[Any]) -> Iterator[Any]:
    """The schedulers and those inside them (``SequentialLR``, ``ChainedScheduler``)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all_of(_compat.schedulers_inside(scheduler))


def _multiply(place: dict[str, Any], keys: Sequence[str], factor: float, done: set[int]) -> None:
    """Multiplies the numbers under ``keys``; tensors in place and once, since a captured step reads their memory."""
    for key in keys:
        value = place.get(key)
        if isinstance(value, torch.Tensor):
            if id(value) not in done:
                value.mul_(factor)
            done.add(id(value))
        elif isinstance(value, (list, tuple)):
            place[key] = type(value)(each * factor for each in value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            place[key] = value * factor
