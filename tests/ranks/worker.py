"""One rank of a launch: runs the cases it is given and writes what became of each, as JSON.

Every case gets a process group of its own, met through a file, so that no port has to be free and a case that breaks
its group does not break the next one. A rank that fails leaves at once: the others then lose their connection and say
so, instead of waiting for it. Started anew after a case has ended its process on purpose, it goes on with that one.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import json
import logging
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)
CASE_LIMIT = 150
"""Seconds after which a rank that hangs outside any collective prints where it is, and ends."""


def main(folder: Path, scenarios: Any) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid.rank{rank}").write_text(str(os.getpid()))
    logging.getLogger("nanguard").addHandler(logging.NullHandler())  # its panels would bury what a failing rank says
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first = killed(folder) if restart else 0
    for number, scenario, options in cases:
        if number < first:
            continue
        faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
        os.environ["CASE_FOLDER"] = str(folder / f"{number}.files")  # the same for all ranks, and after a restart
        store = f"file://{folder}/{number}.{restart}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT)
        try:
            answer = {"result": getattr(scenarios, scenario)(**options)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        write(folder / f"{number}.rank{rank}.json", answer)
        if "result" in answer:
            # Leaving closes the connections, and another rank may still be reading from them.
            await_files([folder / f"{number}.rank{other}.json" for other in range(world)])
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def killed(folder: Path) -> float:
    """The number of the case that has ended its process on purpose, and left a mark in its folder; Inf if none has."""
    return next((int(mark.parent.stem) for mark in folder.glob("*.files/killed")), math.inf)


def write(path: Path, answer: dict[str, Any]) -> None:
    """In one piece: who sees the file may read it."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(answer))
    unfinished.rename(path)


def await_files(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]), importlib.import_module(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads now and then abort a process that takes them down in order
