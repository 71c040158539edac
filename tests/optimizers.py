"""Every optimizer the guard is tested on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Maker = Callable[[Any], Optimizer]


class Lion(Optimizer):
    """As third parties write them: state made on first use, a step counter of its own, no fused or foreach path."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, beta: float = 0.9, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * momentum.lerp(p.grad, 1 - group["beta"]).sign())
                momentum.lerp_(p.grad, 0.05)
        return loss


class SkippableSGD(Optimizer):
    """Third-party, and says that it supports AMP scaling: it reads ``found_inf`` on the device."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found_inf = getattr(self, "found_inf", torch.zeros(()))
                    p.copy_(torch.where(found_inf != 0, p, p - group["lr"] * p.grad))


def _of(name: str, **options: Any) -> Maker:
    return lambda params: getattr(torch.optim, name)(params, **options)


NOT_FUSED: dict[str, Maker] = {
    "Adadelta": _of("Adadelta"),
    "Adafactor": _of("Adafactor", lr=1e-2),
    "Adagrad": _of("Adagrad"),
    "Adam amsgrad": _of("Adam", amsgrad=True),
    "AdamW foreach": _of("AdamW", foreach=True),
    "AdamW loop": _of("AdamW", foreach=False),
    "Adamax": _of("Adamax"),
    "ASGD": _of("ASGD"),
    "NAdam": _of("NAdam"),
    "RAdam": _of("RAdam"),
    "RMSprop": _of("RMSprop", momentum=0.9, centered=True),
    "Rprop": _of("Rprop"),
    "SGD momentum": _of("SGD", lr=1e-2, momentum=0.9, nesterov=True),
    "Lion": Lion,
}
FUSED: dict[str, Maker] = {
    "fused Adam": _of("Adam", fused=True, amsgrad=True),
    "fused AdamW": _of("AdamW", fused=True),
    "fused SGD momentum": _of("SGD", lr=1e-2, momentum=0.9, dampening=0.1, fused=True),
    "fused SGD": _of("SGD", lr=1e-2, fused=True),
    "fused Adagrad": _of("Adagrad", fused=True),
    "SkippableSGD": SkippableSGD,
}
ALL = {**NOT_FUSED, **FUSED}
