"""What the runs of ``divergences.py`` learn, and the tiny models that learn it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Batch(NamedTuple):
    """What a loader yields. ``id`` is its place in the run; ``late`` says that a later stage of training has begun."""

    id: int
    x: Tensor
    y: Tensor
    late: bool = False


Draw = Callable[[int], tuple[Tensor, Tensor]]
"""The next so many samples of a task."""


# ---- tasks -----------------------------------------------------------------------------------------------------------


def regression(seed: int, *, units: int = 4, noise: float = 0.5, scale: float = 1.0) -> Draw:
    """A small random network to imitate, from noisy answers."""
    g = torch.Generator().manual_seed(seed)
    inner, outer = torch.randn(16, units, generator=g) * 0.25, torch.randn(units, 1, generator=g)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 16, generator=g)
        return x, scale * ((x @ inner).tanh() @ outer + noise * torch.randn(n, 1, generator=g))

    return draw


def classes(seed: int) -> Draw:
    """Five classes whose borders a random network draws, and noise blurs."""
    g = torch.Generator().manual_seed(seed)
    inner, outer = torch.randn(16, 12, generator=g) * 0.375, torch.randn(12, 5, generator=g)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 16, generator=g)
        return x, ((x @ inner).tanh() @ outer + 0.5 * torch.randn(n, 5, generator=g)).argmax(1)

    return draw


def waves(seed: int) -> Draw:
    """Six pitches in noise, two channels."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(32.0)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        pitch = torch.randint(6, (n,), generator=g)
        speed = (0.2 + 0.12 * pitch).view(n, 1, 1) * (1 + 0.15 * torch.randn(n, 1, 1, generator=g))
        phase = 2 * math.pi * torch.rand(n, 2, 1, generator=g)
        return (speed * t + phase).sin() + 0.5 * torch.randn(n, 2, 32, generator=g), pitch

    return draw


def recall(seed: int) -> Draw:
    """Eight keys with a value each, and a blurred key whose value is asked for (the last row)."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        keys, values = torch.randn(2, n, 8, 16, generator=g)
        asked, rows = torch.randint(8, (n,), generator=g), torch.arange(n)
        question = keys[rows, asked] + 0.3 * torch.randn(n, 16, generator=g)
        last = torch.cat([question, torch.zeros(n, 16)], dim=1).unsqueeze(1)
        answer = values[rows, asked] + 0.5 * torch.randn(n, 16, generator=g)
        return torch.cat([torch.cat([keys, values], dim=2), last], dim=1), answer

    return draw


def adding(seed: int, *, length: int = 12) -> Draw:
    """The sum of the marked numbers of a sequence."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        numbers = torch.rand(n, length, generator=g)
        marks = (torch.rand(n, length, generator=g) < 3 / length).float()
        answer = (numbers * marks).sum(1, keepdim=True) + 0.8 * torch.randn(n, 1, generator=g)
        return torch.stack([numbers, marks], dim=2), answer

    return draw


def pictures(seed: int) -> Draw:
    """A condition with some randomness beside it, and the noisy picture that belongs to the condition."""
    g = torch.Generator().manual_seed(seed)
    inner, outer = torch.randn(8, 16, generator=g) * 0.6, torch.randn(16, 4, generator=g) * 0.4

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 12, generator=g)
        return x, (x[:, :8] @ inner).tanh() @ outer + 0.5 * torch.randn(n, 4, generator=g)

    return draw


def distances(seed: int) -> Draw:
    """Pairs of points, and how far apart they are once a hidden map has bent the space."""
    g = torch.Generator().manual_seed(seed)
    bend = torch.randn(8, 8, generator=g) * 0.5

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 2, 8, generator=g)
        a, b = (x @ bend).tanh().unbind(1)
        return x, (a - b).norm(dim=1) + 0.5 * torch.randn(n, generator=g)

    return draw


def heavy(draw: Draw, seed: int) -> Draw:
    """The same samples with heavy tails: now and then one is ten times the usual."""
    g = torch.Generator().manual_seed(seed + 1000)

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        x, y = draw(n)
        chi = torch.randn(n, 3, generator=g).square().mean(1, keepdim=True)
        return x / chi.sqrt().clamp_min(0.05), y / chi.flip(0).sqrt().clamp_min(0.05)

    return drawn


# ---- models ----------------------------------------------------------------------------------------------------------


def mlp(inputs: int = 16, outputs: int = 1, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), act(), nn.Linear(64, 64), act(), nn.Linear(64, outputs))


class Recall(nn.Module):
    """Attention that divides by its scale only after the product, as much code does: fp16 ends at 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.value = nn.Linear(16, 16)
        with torch.no_grad():
            self.query.weight.mul_(22.0)
            self.key.weight.mul_(22.0)

    def forward(self, x: Tensor) -> Tensor:
        keys, values, question = x[:, :-1, :16], x[:, :-1, 16:], x[:, -1:, :16]
        attention = self.query(question) @ self.key(keys).mT
        weights = (attention.float() / 16384).softmax(dim=-1)
        picked: Tensor = weights @ self.value(values)
        return picked.squeeze(1)


class Listener(nn.Module):
    """A first layer and a LayerNorm: how loud the input is makes no difference, as long as it is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.ear, self.norm = nn.Linear(16, 64, bias=False), nn.LayerNorm(64)
        self.rest = nn.Sequential(nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(self.norm(self.ear(x)))
        return out


class Pitch(nn.Sequential):
    def __init__(self) -> None:
        first = nn.Conv1d(2, 16, 5, stride=2), nn.BatchNorm1d(16), nn.ReLU()
        second = nn.Conv1d(16, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU()
        super().__init__(*first, *second, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 6))


class Adder(nn.Module):
    """A ReLU network whose recurrence grows a little, which twelve steps forgive and two thousand do not."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)
        with torch.no_grad():
            self.rnn.get_parameter("weight_hh_l0").copy_(1.1 * torch.eye(32))
            self.rnn.get_parameter("bias_hh_l0").zero_()
            self.rnn.get_parameter("bias_ih_l0").zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


class Painter(nn.Module):
    """A conditional GAN. Both players learn in one backward pass, each from its own part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(12, 4)
        self.critic = nn.Sequential(nn.Linear(12, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        condition, fake = x[:, :8], self.generator(x)
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        judged: Tensor = torch.func.functional_call(self.critic, frozen, torch.cat([condition, fake], 1))
        real, told = (self.critic(torch.cat([condition, each], 1)) for each in (y, fake.detach()))
        return fake, judged, real, told


class TwoHeads(nn.Module):
    """A second head, used from some step on, that came out of a half-precision checkpoint and stayed so."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.first, self.second = nn.Linear(64, 1), nn.Linear(64, 1)
        if half:
            self.second.half()

    def forward(self, x: Tensor, late: bool) -> Tensor:
        h = self.trunk(x)
        out: Tensor = self.first(h)
        return out + 0.1 * self.second(h.to(self.second.weight.dtype)).to(out.dtype) if late else out


class Ruler(nn.Module):
    """How far apart two points are after an embedding: the square root has no slope at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = mlp(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        distance: Tensor = (self.embed(a) - self.embed(b)).square().sum(1).sqrt()
        return distance


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.x).float(), batch.y)


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x).float(), batch.y)


def staged(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.x, batch.late), batch.y)


def contest(model: nn.Module, batch: Batch) -> Tensor:
    fake, judged, real, told = model(batch.x, batch.y)
    generator = F.mse_loss(fake, batch.y) + 0.05 * F.softplus(-judged).mean()
    return generator + F.softplus(-real).mean() + F.softplus(told).mean()


def likeness(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model.generator(batch.x), batch.y)  # type: ignore[operator]
