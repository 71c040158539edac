"""What the CPU that the tests run on can do."""

from __future__ import annotations

import functools

import torch
from torch import nn


@functools.cache
def has_bf16_lstm() -> bool:
    """Whether this CPU can run an LSTM in bf16: oneDNN has no kernel for it without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 16, batch_first=True)(torch.zeros(4, 6, 4))
    except RuntimeError:
        return False
    return True


NO_BF16_LSTM = "this CPU has no bf16 LSTM kernel"
