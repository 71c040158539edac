"""Two optimizers in a loop of one's own: both step, or neither does.

python examples/gan.py
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard


def main() -> None:
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    nets = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
            "d": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
        }
    )
    g_optimizer = torch.optim.Adam(nets["g"].parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
    d_optimizer = torch.optim.Adam(nets["d"].parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
    guard = nanguard.Guard(nets, [g_optimizer, d_optimizer], max_norm=1.0)

    def judged(points: Tensor, *, as_real: bool) -> Tensor:
        logits = nets["d"](points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))

    for step in range(200):
        angle = torch.rand(64) * 2 * torch.pi
        real = torch.stack([angle.cos(), angle.sin()], dim=1)
        if step == 100:
            real[3] /= 0.0  # a broken sample
        with guard.autocast():
            fake = nets["g"](torch.randn(64, 8))
            d_loss = judged(real, as_real=True) + judged(fake.detach(), as_real=False)
        guard.backward(d_loss)
        nets["d"].requires_grad_(False)  # the generator's loss is not the critic's to learn from
        with guard.autocast():
            g_loss = judged(fake, as_real=True)
        nets["d"].requires_grad_(True)
        guard.backward(g_loss)
        guard.update()
    guard.settle()
    print(guard)


if __name__ == "__main__":
    main()
