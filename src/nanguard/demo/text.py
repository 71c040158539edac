"""The training text of the demo, as batches of documents."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.resources import files

import torch

from nanguard.demo.gpt import Batch

CHARACTERS = " abcdefghijklmnopqrstuvwxyz'`,.;:!?()-\""
CONTEXT, BATCH_SIZE, HELD_OUT = 64, 8, 64
VOCABULARY = len(CHARACTERS) + 1
"""Number 0 is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """The batches of each epoch, and the held-out batch."""

    epochs: tuple[tuple[Batch, ...], ...]
    held_out: Batch


def documents() -> list[str]:
    """The paragraphs, in pieces that fit into the context.

    Everything but letters, spaces and punctuation is removed, as is common. This turns the row of asterisks in chapter
    V into an empty document.
    """
    text = files("nanguard.demo").joinpath("alice.txt").read_text(encoding="utf-8")
    pieces: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        spaced = "".join(c for c in paragraph.lower() if c in CHARACTERS or c == "\n")
        clean = " ".join(spaced.split())
        pieces += [clean[start : start + CONTEXT + 1] for start in range(0, max(len(clean) - 1, 1), CONTEXT)]
    return pieces


def prepare(steps: int, generator: torch.Generator) -> TextData:
    """One batch for each step, in epochs that shuffle the documents again."""
    pieces = _shuffled(documents(), generator)
    held_out = [piece for piece in pieces if len(piece) > CONTEXT // 2][:HELD_OUT]
    kept_back = set(held_out)
    pieces = [piece for piece in pieces if piece not in kept_back]
    a_pass = math.ceil(len(pieces) / BATCH_SIZE)
    epochs = [_epoch(pieces, generator)[: steps - start] for start in range(0, steps, a_pass)]
    return TextData(epochs=tuple(tuple(map(as_batch, epoch)) for epoch in epochs), held_out=as_batch(held_out))


def as_batch(pieces: list[str]) -> Batch:
    longest = max(map(len, pieces))
    numbers = [[1 + CHARACTERS.index(c) for c in piece] + [0] * (longest - len(piece)) for piece in pieces]
    return torch.tensor(numbers), torch.tensor([len(piece) for piece in pieces])


def _epoch(pieces: list[str], generator: torch.Generator) -> list[list[str]]:
    """Batches of documents of similar length, so that there is little padding."""
    pieces, pool = _shuffled(pieces, generator), 8 * BATCH_SIZE
    batches: list[list[str]] = []
    for start in range(0, len(pieces), pool):
        by_length = sorted(pieces[start : start + pool], key=len)
        batches += [by_length[i : i + BATCH_SIZE] for i in range(0, len(by_length), BATCH_SIZE)]
    return [batches[int(i)] for i in torch.randperm(len(batches), generator=generator)]


def _shuffled(pieces: list[str], generator: torch.Generator) -> list[str]:
    return [pieces[int(i)] for i in torch.randperm(len(pieces), generator=generator)]
