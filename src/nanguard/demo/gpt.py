"""A small character-level GPT and its loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Characters as numbers of shape (documents, places), padded with zeros, and the length of each document."""


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        documents, places, width = x.shape
        q, k, v = (self._split(project(x)) for project in (self.query, self.key, self.value))
        scores = q @ k.mT / math.sqrt(width // self.heads)
        later = torch.ones(places, places, dtype=torch.bool, device=x.device).triu(1)
        seen: Tensor = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ v
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(documents, places, width))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        """(documents, places, width) as (documents, heads, places, width of a head)."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, each with a norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        wider: Tensor = x + self.mlp(self.norm2(x))
        return wider


class GPT(nn.Module):
    """Predicts the next character at each place of a document."""

    def __init__(self, *, vocabulary: int, context: int, width: int = 48, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, documents: Tensor) -> Tensor:
        x = self.characters(documents) + self.places(torch.arange(documents.shape[1], device=documents.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next character: the mean over each document, then over the documents.

    It has a common bug: the mean of an empty document is 0/0.
    """
    documents, lengths = batch
    logits, targets = model(documents[:, :-1]).float(), documents[:, 1:]
    is_text = torch.arange(1, documents.shape[1]) < lengths[:, None]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * is_text
    return (losses.sum(dim=1) / is_text.sum(dim=1)).mean()
