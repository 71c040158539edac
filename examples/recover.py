"""A run in fp16 that would die three times over, and ends as if nothing had happened.

Attention scores outgrow fp16 from the start, a shard of the data was never filled in, and half-way a bit flips in a
weight. The guard runs the attention in fp32, skips the shard, and goes back to the last good state.

python examples/recover.py
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from nanguard.testing import Fault, inject

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Without the usual division by the square root of the width, and with large queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        scores = (400 * self.query(x)) @ (400 * self.key(x)).mT
        mixed: Tensor = (scores / 400**2).softmax(-1) @ self.value(x)
        return mixed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.attention(x)).mean(-2)
        return logits


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_data(num_batches: int) -> list[Batch]:
    data = []
    for number in range(num_batches):
        targets = torch.randint(0, 2, (32,))
        inputs = torch.randn(32, 8, 16) + targets[:, None, None]
        if 120 <= number < 140:
            inputs[0] = float("nan")
        data.append((inputs, targets))
    return data


def main() -> None:
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = nanguard.Guard(model, optimizer, precision="fp16", snapshots=nanguard.Snapshots(every=25))
    bit_flip = Fault(into="weight", name="out.weight", value="bitflip", steps=(200,), times=1)

    with guard, inject(guard, bit_flip):
        for batch in guard.epoch(make_data(300)):
            loss = guard.step(loss_fn, batch)
    print(f"loss {loss:.4f}, in fp32: {', '.join(guard.kept_fp32)}")
    print(guard)


if __name__ == "__main__":
    main()
