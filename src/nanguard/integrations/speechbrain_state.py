"""What a batch changes in a SpeechBrain recipe besides weights and buffers: statistics that are plain attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

_STATISTICS = ("speechbrain.utils.metric_stats", "speechbrain.utils.Accuracy", "speechbrain.utils.bleu")
_NUMBERS = (bool, int, float, str, type(None))


class SideState:
    """Notes the means of ``InputNormalization``, and the lengths and counters of statistics that the recipe collects.

    The former are replaced with each batch, never written to, so that a reference is enough. Nothing is copied.
    """

    def __init__(self, brain: Any) -> None:
        self._brain = brain
        self._means = [
            (module, {name: _held(value) for name, value in vars(module).items() if _is_mean(name)})
            for module in brain.modules.modules()
            if type(module).__name__ == "InputNormalization"
        ]
        own = vars(brain)
        kept = [own, *(vars(each) for each in own.values() if type(each).__module__ in _STATISTICS)]
        self._counters = [(place, {k: v for k, v in place.items() if isinstance(v, _NUMBERS)}) for place in kept[1:]]
        self._lists = [(each, len(each)) for place in kept for each in place.values() if isinstance(each, list)]
        self._of_brain = {k: v for k, v in own.items() if isinstance(v, (*_NUMBERS, Tensor))}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For a pass of the noted batch that must have no effect. Afterwards everything is as it is now."""
        now = SideState(self._brain)
        self._put_back_means()
        is_with_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        modes = [(module, module.training) for module, _ in self._means if is_with_others]
        for module, _ in modes:
            module.training = False  # in training it sums over all ranks, and the others do not run this pass
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            now.forget_batch()
            vars(self._brain).update(now._of_brain)

    def _put_back_means(self) -> None:
        for module, means in self._means:
            vars(module).update({name: _held(value) for name, value in means.items()})

    def forget_batch(self) -> None:
        """The batch, and those after it, never came."""
        self._put_back_means()
        for place, counters in self._counters:
            place.update(counters)
        for each, length in self._lists:
            del each[length:]


def _is_mean(name: str) -> bool:
    return name == "count" or any(map(name.startswith, ("glob_", "spk_dict_")))


def _held(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
