"""Where did it come from? Two bugs that cost people days, each explained as it happens.

A spectral loss takes the root of a silent frame, whose derivative is infinite: the loss is finite and the gradient is
not. And queries are not scaled, so that attention scores leave fp16 on a batch that is louder than others.

python examples/explain.py
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

import nanguard


class Spectrum(nn.Module):
    """Magnitudes of short frames."""

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.fft.rfft(x.unfold(-1, 16, 8))
        magnitude: Tensor = (frames.real**2 + frames.imag**2).sqrt()
        return magnitude


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 64), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        mixed: Tensor = scores.softmax(-1) @ x
        return mixed


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gain, self.spectrum = Attention(), nn.Linear(16, 16), Spectrum()

    def forward(self, x: Tensor) -> Tensor:
        frames = x.reshape(-1, 4, 16)
        gains = torch.sigmoid(self.gain(self.attention(frames)))
        denoised: Tensor = (frames * gains).flatten(-2)
        return denoised


def loss_fn(model: Denoiser, batch: tuple[Tensor, Tensor]) -> Tensor:
    noisy, clean = batch
    error: Tensor = model.spectrum(model(noisy).float()) - model.spectrum(clean)
    return error.abs().mean()


def main() -> None:
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    batches = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(12)]
    batches[4][0][3, 16:48] = 0.0  # one clip is silent for a while
    batches[8][0][5] *= 300.0  # and one is loud

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanguard.Guard(model, optimizer, precision="fp16", loss_scale=None) as guard:
        for batch in guard.epoch(batches):
            guard.step(loss_fn, batch)
    print()
    for incident in guard.incidents:
        diagnosis = incident.diagnosis
        assert diagnosis is not None
        print(f"step {diagnosis.step}: {diagnosis.cause} in {diagnosis.module}, sample {diagnosis.samples}")

    # The same without a guard, for a step that you have at hand; and all that is known, not the panel alone.
    print()
    print(nanguard.diagnose(model, loss_fn, batches[8], precision="fp16").report())


if __name__ == "__main__":
    main()
