"""Kills a process that writes snapshots, many times, at random moments, and looks at what it left each time.

    python tests/kill9.py FOLDER KILLS SEED

Children are forked from here, where torch is imported already, and write, confirm and prune in a loop; now and then one
goes back and writes its last step anew. They tell through a pipe what was confirmed. What was found is printed as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanguard.state.snapshots.disk import DiskStore

KEEP = 2


def contents(step: int, turn: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Some megabytes that are a function of the step and of how often it was written."""
    base = torch.arange(250_000, dtype=torch.int64) * (step + 1) + turn
    tied = base.to(torch.float32)
    tensors = {"wide": base, "tied": tied, "tied too": tied, "low": tied[:1000].to(torch.bfloat16), "count": base[1]}
    return tensors, {"step": step, "turn": turn, "rng": (base[:624] % 251).to(torch.uint8), "lr": [0.1 / (step + 1)]}


def write_for_ever(folder: Path, pipe: int) -> None:
    store = DiskStore(folder)
    step, turn = -1, 0
    if store.steps():
        stored = store.load()
        step, turn = stored.step, stored.facts["turn"]
    rng_reader = random.Random(1000 * step + turn)
    os.write(pipe, b"ready\n")
    while True:
        step, turn = (step, turn + 1) if step >= 0 and rng_reader.random() < 0.3 else (step + 1, 0)
        began = time.monotonic()
        store.write(step, *contents(step, turn))
        store.confirm(step)
        os.write(pipe, f"{step} {turn} {time.monotonic() - began}\n".encode())
        store.prune(KEEP)


def differs(stored: Any) -> str:
    """What is not as its step says, to the bit."""
    tensors, facts = contents(stored.step, stored.facts["turn"])
    wrong = [name for name in tensors.keys() | stored.tensors.keys() if not same(tensors, stored.tensors, name)]
    wrong += [name for name in facts.keys() | stored.facts.keys() if not same(facts, stored.facts, name)]
    return ", ".join(wrong)


def same(a: dict[str, Any], b: dict[str, Any], name: str) -> bool:
    x, y = a.get(name), b.get(name)
    return torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y


def phase(folder: Path) -> str:
    """What the child was at, from the names it left."""
    kinds = {part for name in os.listdir(folder) for part in ("writing", "unconfirmed", "trash") if part in name}
    return " and ".join(sorted(kinds)) or "nothing unfinished"


class Warned(logging.Handler):
    """All that nanguard warns of: a snapshot that had to be passed over is a torn one under a good one's name."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("nanguard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    rng_reader = random.Random(seed)
    phases: Counter[str] = Counter()
    troubles: list[str] = []
    warned = Warned()
    cycle_s = 0.05
    confirmed = (-1, 0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                write_for_ever(folder, writer)
            finally:
                os._exit(1)
        os.close(writer)
        pipe = os.fdopen(reader)
        if not select.select([pipe], [], [], 120)[0]:  # a forked process may wait for a lock for ever
            troubles.append(f"kill {number}: the child never began")
        time.sleep(rng_reader.uniform(0, 3 * cycle_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            troubles.append(f"kill {number}: the child ended by itself")
        with pipe:
            reports = [line.split() for line in pipe.read().splitlines() if line != "ready"]
        if reports:
            confirmed = (int(reports[-1][0]), int(reports[-1][1]))
            cycle_s = 0.8 * cycle_s + 0.2 * float(reports[-1][2])
        phases[phase(folder)] += 1
        store = DiskStore(folder)
        left = phase(folder)
        if left != "nothing unfinished":
            troubles.append(f"kill {number}: after opening there is still {left}")
        if confirmed == (-1, 0) and not store.steps():
            continue
        stored = store.load()
        if (stored.step, stored.facts["turn"]) < confirmed:
            troubles.append(f"kill {number}: {confirmed} was confirmed, step {stored.step} was loaded")
        for step in store.steps():  # the older ones are whole too
            stored = store.load(step)
            if wrong := differs(stored):
                troubles.append(f"kill {number}: step {stored.step} differs in {wrong}")
        del store
    troubles += warned.messages
    return {"kills": kills, "phases": phases, "last": confirmed, "cycle_s": cycle_s, "troubles": troubles}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
