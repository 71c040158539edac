"""Sentence classification with one block of self-attention, warmup and cosine decay."""

import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, is_padding):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(x.shape[-1])
        scores = scores.masked_fill(is_padding[:, None, :], float("-inf"))
        weights = F.softmax(scores, dim=-1)  # guilty
        return x + self.project(weights @ v)


class Classifier(nn.Module):
    def __init__(self, vocabulary=100, width=32, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        is_padding = tokens == 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, is_padding)
        return self.head(x.mean(1))


def main(out):
    torch.manual_seed(15)
    torch.set_num_threads(1)
    tokens = torch.randint(1, 100, (160, 10))
    lengths = torch.randint(2, 11, (160,))
    lengths[101] = 0  # only an emoji, which the tokenizer drops
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 0
    target = tokens[:, 0] % 3

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total, warmup = 30, 5
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warmup if s < warmup else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup))),
    )
    for epoch in range(3):
        for rows in torch.randperm(160).split(16):
            loss = F.cross_entropy(model(tokens[rows]), target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.2e}")
    torch.save(model.state_dict(), out)


main(sys.argv[1])
