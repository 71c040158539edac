"""A copy of what an optimizer's step writes to, so that the step can be taken back: on the bad day only."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Backup:
    """Of parameters, optimizer state and options as they are now. Does not sync; takes as much memory as they do."""

    @torch.no_grad()
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        params = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        self._params = [(p, p.detach().clone()) for p in params.values()]
        self._optimizers = [(o, _copied_state(o), _options(o)) for o in optimizers]
        before = self._tensors()
        self._known = {id(t) for t in before}
        self._bad_before = {id(t) for t in before if not _is_finite(t)}

    def is_spoiled(self) -> bool:
        """Whether anything is non-finite now that was not before. Syncs.

        State that the step has made may begin with Inf, a best loss, say; nothing begins with NaN.
        """
        now = [t for t in self._tensors() if id(t) not in self._bad_before]
        return any(not _is_finite(t) if id(t) in self._known else bool(torch.isnan(t).any()) for t in now)

    def _tensors(self) -> list[Tensor]:
        """What the step may have changed, as it is now."""
        states = [v for o, _, _ in self._optimizers for s in o.state.values() for v in _values(s)]
        return [p for p, _ in self._params] + [v for v in states if isinstance(v, Tensor)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Into the same tensors where they are still there; state that the step has made is removed."""
        for param, saved in self._params:
            param.copy_(saved)
        for optimizer, states, options in self._optimizers:
            for param in [p for p in optimizer.state if p not in states]:
                del optimizer.state[param]
            for param, saved in states.items():
                if isinstance(saved, dict) and isinstance(optimizer.state.get(param), dict):
                    _put_back_state(optimizer.state[param], saved)
                else:
                    optimizer.state[param] = copy.deepcopy(saved)
            for group, kept in zip(optimizer.param_groups, options, strict=True):
                for key in group.keys() - kept.keys() - {"params"}:
                    del group[key]
                group.update(kept)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _values(state: Any) -> Iterable[Any]:
    """What an optimizer keeps under one key: by torch's custom a dict, but nothing says it must be."""
    return state.values() if isinstance(state, dict) else (state,)


def _copied_state(optimizer: Optimizer) -> dict[Any, Any]:
    return {
        param: {key: _copied(value) for key, value in s.items()} if isinstance(s, dict) else _copied(s)
        for param, s in optimizer.state.items()
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _put_back_state(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        now = live.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
            now.copy_(value)
        else:
            live[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
