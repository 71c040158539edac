"""Which ranks are guarded: asked through the store of the process group, before any collective of our own is made.

A launcher may start some ranks as plain Python. They would not take part in our reductions, and the run would hang or
abort. So each guarded process leaves a key in the store when a DDP model is made in it, before DDP's own collectives:
by the time DDP is ready, all keys are there. The first rank that looks writes down the answer, and all ranks go by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from nanguard import _compat

log = logging.getLogger("nanguard")

_PREFIX = "nanguard/guarded"
_WAIT = 5.0
"""Seconds that a rank waits for the keys of others. They are late only if a program installs the guard after DDP."""


def announce() -> None:
    """Lets other ranks know that this process is guarded. Makes no collective, and never raises."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    try:
        _compat.default_store().set(_key(dist.get_rank()), "1")
    except Exception as error:
        log.info("other ranks could not be told that this one is guarded: %s", error)


def are_all_guarded(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of ``group`` are guarded: the same answer on all that are. Logs a warning if not."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return True
    announce()
    try:
        store = _compat.default_store()
        answer = agree(store, ranks, wait=_WAIT)
        if not answer:
            _warn_once(store, ranks)
    except Exception as error:
        log.warning("whether other ranks are guarded could not be found out (%s): no step is decided together", error)
        return False
    return answer


def agree(store: Any, ranks: Sequence[int], *, wait: float) -> bool:
    """True if all ``ranks`` have announced themselves. The rank that looks first decides for all."""
    keys = [_key(rank) for rank in ranks]
    decision = f"{_PREFIX}/all-of/{','.join(map(str, ranks))}"
    until = time.monotonic() + wait
    while not store.check(keys) and not store.check([decision]) and time.monotonic() < until:
        time.sleep(0.02)
    answer: bytes = store.compare_set(decision, "", "yes" if store.check(keys) else "no")
    return answer == b"yes"


def _warn_once(store: Any, ranks: Sequence[int]) -> None:
    here = dist.get_rank()
    told = f"{_PREFIX}/told/{here}"
    if store.check([told]):
        return
    store.set(told, "1")
    others = [str(rank) for rank in ranks if rank != here and not store.check([_key(rank)])]
    who = f"rank {others[0]} runs" if len(others) == 1 else f"ranks {', '.join(others[:8]) or 'of this group'} run"
    log.warning(
        "rank %d is guarded, but %s without nanguard, so ranks cannot decide together. Only steps with non-finite "
        "gradients are skipped, and only here: the other ranks apply them. Clipping and recovery are off. To guard all "
        "ranks: torchrun --nproc-per-node N -m nanguard run SCRIPT",
        here,
        who,
    )


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"
