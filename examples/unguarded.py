"""An ordinary training script that knows nothing of nanguard. Run it by `nanguard run examples/unguarded.py`.

A small attention model learns which of several tones is the loudest, in fp16 autocast. A few recordings are not
normalised as the others are, and the products of their queries and keys leave fp16. `python examples/unguarded.py`
ends with NaN in every weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TONES, LENGTH, WIDTH = 6, 24, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return scores.softmax(-1) @ self.value(x)


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(TONES, WIDTH), Attention(), nn.Linear(WIDTH, TONES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        return self.head((hidden + self.attention(hidden)).mean(1))


def recordings(number: int) -> TensorDataset:
    loudness = torch.rand(number, 1, TONES)
    sounds = loudness * torch.randn(number, LENGTH, TONES).abs()
    sounds[7 :: number // 4] *= 2000  # these were not normalised
    return TensorDataset(sounds, loudness.squeeze(1).argmax(-1))


def main() -> None:
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(recordings(1600), batch_size=32, shuffle=True)
    for epoch in range(4):
        total = 0.0
        for sounds, loudest in loader:
            with torch.autocast("cpu", torch.float16):
                logits = model(sounds)
            loss = F.cross_entropy(logits.float(), loudest)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(loader):.3f}")
    print("weights finite:", all(bool(p.isfinite().all()) for p in model.parameters()))


if __name__ == "__main__":
    main()
