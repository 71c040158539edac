"""What the benchmarks train.

Workloads: a GPT of GPT-2 small's shape, and one so small that only launches cost time. They stand at the ends
of what a guarded step can cost. `large` keeps the GPU busy: extra kernels and passes over the gradients show,
host work hides. `tiny` waits for the host all the time: every microsecond of Python shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Token ids and, as targets, the same ids moved on by one; both of shape (batch, context)."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; the defaults are GPT-2 small with its vocabulary rounded up to a multiple of 64."""

    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    context: int = 1024


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(y.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """The position-wise feed-forward layer, four times as wide as the model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(F.gelu(self.expand(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer with a tied head; its forward returns the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialize(config)

    def _initialize(self, config: GPTConfig) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):  # these write to the residual stream, twice a layer
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch, in the shape `guard.step` calls it."""
    tokens, targets = batch
    loss: Tensor = model(tokens, targets)
    return loss


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the batches it trains on."""

    name: str
    config: GPTConfig
    batch_size: int

    def build(self, device: torch.device, *, seed: int = 0) -> GPT:
        """A fresh model on `device`; the same seed gives the same weights."""
        torch.manual_seed(seed)
        with device:
            return GPT(self.config)

    def batches(self, device: torch.device, *, num: int, seed: int = 1) -> list[Batch]:
        """`num` different batches of random tokens, already on `device`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num, self.batch_size, self.config.context + 1)
        tokens = torch.randint(self.config.vocabulary, shape, generator=generator).to(device)
        return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]

    def __str__(self) -> str:
        c = self.config
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in GPT(c).parameters())
        size = f"{num_parameters / 1e6:.0f}M" if num_parameters >= 1e6 else f"{num_parameters / 1e3:.0f}k"
        shape = f"{c.num_layers} layers of width {c.width}, batch {self.batch_size}x{c.context}"
        return f"GPT, {size} parameters, {shape}"


_TINY = GPTConfig(num_layers=4, num_heads=4, width=64, vocabulary=512, context=32)
_SMOKE = GPTConfig(num_layers=1, num_heads=2, width=16, vocabulary=64, context=8)

WORKLOADS = {
    "large": Workload(name="large", config=GPTConfig(), batch_size=8),
    "tiny": Workload(name="tiny", config=_TINY, batch_size=4),
}
SMOKE_WORKLOADS = {
    "large": Workload(name="large", config=_TINY, batch_size=4),
    "tiny": Workload(name="tiny", config=_SMOKE, batch_size=2),
}
