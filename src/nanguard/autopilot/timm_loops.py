"""Copies of timm's train.py under ``nanguard run``: schedule, averages and means leave skipped steps out.

There is no trainer class to guard, so the classes that such a script uses are patched. They go by what the host has
heard: nothing here syncs. On a fused optimizer on a GPU that is two steps late.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from nanguard.autopilot.launch import WhenImported
from nanguard.autopilot.registry import hosted_step_of
from nanguard.hosted.step import HostedStep
from nanguard.integrations.timm_means import StepMeans, Where

Save = Callable[[Any, str, Any], None]
Patch = Callable[..., Any]


class TimmLoops:
    """``hosted_steps`` returns those of the program; ``save`` is told what each patch has replaced."""

    def __init__(self, hosted_steps: Callable[[], Iterable[HostedStep]], save: Save) -> None:
        self._hosted_steps, self._save = hosted_steps, save
        self._means = StepMeans(self._where)
        self._seen: WeakKeyDictionary[HostedStep, tuple[int, bool]] = WeakKeyDictionary()
        self._active: WeakSet[HostedStep] = WeakSet()
        """Those that have done something since they were looked at last."""
        self._optimizers: WeakKeyDictionary[nn.Module, Optimizer] = WeakKeyDictionary()

    def waits(self) -> list[WhenImported]:
        """For timm to be imported, which may never happen."""
        rows: dict[str, list[tuple[str, str, Patch]]] = {
            "timm.scheduler.scheduler": [("Scheduler", "step_update", self._step_update)],
            "timm.utils.model_ema": [(kind, "update", self._update_average) for kind in ("ModelEmaV2", "ModelEmaV3")],
            "timm.utils.metrics": [("AverageMeter", "update", self._update_mean)],
        }
        return [WhenImported(module, functools.partial(self._patch_all, module, rows[module])) for module in rows]

    def _patch_all(self, module: str, rows: list[tuple[str, str, Patch]]) -> None:
        for row in rows:
            self._patch(module, *row)

    def _patch(self, module: str, owner: str, method: str, instead: Patch) -> None:
        kind = getattr(sys.modules[module], owner, None)
        original = getattr(kind, method, None)
        if kind is None or original is None:
            return

        @functools.wraps(original)
        def patched(itself: Any, *args: Any, **kwargs: Any) -> Any:
            return instead(functools.partial(original, itself), itself, *args, **kwargs)

        self._save(kind, method, original)
        setattr(kind, method, patched)

    def _step_update(self, original: Patch, scheduler: Any, num_updates: int, *args: Any, **kwargs: Any) -> None:
        self._means.look()
        hosted = hosted_step_of(scheduler.optimizer)
        original(num_updates - _num_skipped(hosted), *args, **kwargs)

    def _update_average(self, original: Patch, average: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """``step``, if it is given, is for the warm-up of the decay."""
        self._means.look()
        optimizer = self._optimizer_of(model)
        hosted = None if optimizer is None else hosted_step_of(optimizer)
        if hosted is not None and not hosted.was_applied:
            return
        if isinstance(kwargs.get("step"), int):
            kwargs["step"] -= _num_skipped(hosted)
        original(model, *args, **kwargs)

    def _update_mean(self, original: Patch, meter: Any, val: Any, *args: Any, **kwargs: Any) -> None:
        self._means.update(original, meter, val, *args, **kwargs)

    def _where(self) -> Where | None:
        """None if several optimizers are at work: whose step a value belongs to is not known."""
        now = {hosted: (hosted.num_calls, hosted.has_called) for hosted in self._hosted_steps()}
        active = [hosted for hosted, state in now.items() if self._seen.get(hosted) != state] or self._active
        self._seen, self._active = WeakKeyDictionary(now), WeakSet(active)
        if len(active) != 1:
            return None
        (hosted,) = active
        return Where(sum(num_calls for num_calls, _ in now.values()), hosted.was_refused(), hosted.has_called)

    def _optimizer_of(self, model: nn.Module) -> Optimizer | None:
        """That trains this model, as far as it is guarded."""
        if model not in self._optimizers:
            own = {id(param) for param in model.parameters()}
            for hosted in self._hosted_steps():
                groups = hosted.optimizer.param_groups
                if any(id(param) in own for group in groups for param in group["params"]):
                    self._optimizers[model] = hosted.optimizer
        return self._optimizers.get(model)


def _num_skipped(hosted: HostedStep | None) -> int:
    if hosted is None:
        return 0
    counts = hosted.parts.journal.counts
    return counts["skipped"] + counts["backed_off"] + counts["lost"]
