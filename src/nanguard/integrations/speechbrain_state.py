"""What a batch changes in a SpeechBrain recipe besides weights and buffers: statistics that are plain attributes."""

from __future__ import annotations

from typing import Any

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

    def put_back_means(self) -> None:
        """For the pass of the noted batch, to be run again."""
        for module, means in self._means:
            vars(module).update({name: _held(value) for name, value in means.items()})

    def forget_batch(self) -> None:
        """The batch, and those after it, never came."""
        self.put_back_means()
        for place, counters in self._counters:
            place.update(counters)
        for each, length in self._lists:
            del each[length:]

    def put_back(self) -> None:
        """Everything, after a pass that must have no effect."""
        self.forget_batch()
        vars(self._brain).update(self._of_brain)


def _is_mean(name: str) -> bool:
    return name == "count" or any(map(name.startswith, ("glob_", "spk_dict_")))


def _held(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
