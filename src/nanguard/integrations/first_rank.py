"""Under DDP observers are called on every rank, and one of them is enough to write."""

from __future__ import annotations

import torch.distributed as dist


def is_first_rank() -> bool:
    """True on rank 0, and in a program with one process."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
