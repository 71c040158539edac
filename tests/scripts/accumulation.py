"""A tagger with gradient accumulation; the loss is averaged over the tokens that are no padding."""

import sys

import torch
from torch import nn

PAD = 0
ACCUMULATE = 4

torch.manual_seed(11)
torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self, vocabulary, tags, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(2 * width, tags)

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens))
        return self.classify(hidden)


def masked_loss(logits, tags, tokens):
    mask = (tokens != PAD).float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    return (losses * mask).sum() / mask.sum()  # guilty


tokens = torch.randint(1, 50, (64, 12))
for row, length in zip(tokens, torch.randint(3, 13, (64,)), strict=True):
    row[length:] = PAD
tokens[36:40] = PAD  # four empty lines in a row
tags = tokens % 5

model = Tagger(50, 5)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    total = 0.0
    for i, (xb, yb) in enumerate(zip(tokens.split(4), tags.split(4), strict=True)):
        loss = masked_loss(model(xb), yb, xb) / ACCUMULATE
        loss.backward()
        total += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch} loss {total / len(tokens) * ACCUMULATE:.4f}")
torch.save(model.state_dict(), sys.argv[1])
