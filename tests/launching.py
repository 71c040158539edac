"""Launches scenarios of ``ranks/`` in real processes: all cases of one test module and world size together.

A scenario may end its process hard (``os._exit``), once in a launch: all ranks are then started anew, as after a crash
on a cluster, and it is called again.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WORKER = Path(__file__).parent / "ranks" / "worker.py"
LAUNCH_LIMIT = 600
"""Seconds after which all ranks are ended and what they printed is shown. They give up by themselves long before."""

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

Result = dict[str, Any]
Ranks = Callable[["Case"], list[Result]]


@dataclass(frozen=True)
class Case:
    """A scenario with its options. All cases of one world size share a launch, since starting takes seconds.

    Those ``of_campaign`` are launched by ``--campaign`` only.
    """

    world: int
    place: int
    scenario: str
    options: dict[str, Any] = field(hash=False)
    of_campaign: bool = False

    def __str__(self) -> str:
        return ", ".join([f"{self.world} ranks", *(f"{k} {v}" for k, v in self.options.items())])


class Cases:
    """Those of one test module; ``scenarios`` is the module under ``ranks/`` that has them."""

    def __init__(self, scenarios: str) -> None:
        self._scenarios = scenarios
        self._cases: dict[int, list[Case]] = {}

    def __call__(self, scenario: str, *, world: int = 2, of_campaign: bool = False, **options: Any) -> Case:
        there = self._cases.setdefault(world, [])
        there.append(Case(world, len(there), scenario, options, of_campaign))
        return there[-1]

    def launcher(self, request: pytest.FixtureRequest) -> Ranks:
        """What each rank has to say of a case. Fails, with the words of all ranks, where one has nothing to say."""
        root, is_campaign = request.getfixturevalue("tmp_path_factory").getbasetemp(), request.config.option.campaign
        root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # all workers share a launch

        def look_up(one: Case) -> list[Result]:
            folder = root / f"{self._scenarios}-world{one.world}"
            folder.mkdir(exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (folder / "done").exists():
                    self._launch(one.world, folder, is_campaign=is_campaign)
                    (folder / "done").touch()
            paths = [folder / f"{one.place}.rank{rank}.json" for rank in range(one.world)]
            answers = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
            if not all("result" in answer for answer in answers):
                words = [answer.get("error", "finished" if answer else "never finished") for answer in answers]
                said = "\n".join(f"---- rank {rank}:\n{text}" for rank, text in enumerate(words))
                printed = (folder / "output.txt").read_text(errors="replace")
                pytest.fail(f"{one.scenario} ({one}):\n{said}\n---- printed:\n{printed}", pytrace=False)
            return [answer["result"] for answer in answers]

        return look_up

    def _launch(self, world: int, folder: Path, *, is_campaign: bool) -> None:
        """Runs the cases of one world size."""
        wanted = [one for one in self._cases[world] if is_campaign or not one.of_campaign]
        (folder / "cases.json").write_text(json.dumps([(one.place, one.scenario, one.options) for one in wanted]))
        # The launcher takes a free port by itself, and only the loopback interface is used.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(world), "--max-restarts", "1", str(WORKER), str(folder), self._scenarios]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(LAUNCH_LIMIT)
            except subprocess.TimeoutExpired:
                output.write(f"\nstopped after {LAUNCH_LIMIT} s\n".encode())
            finally:
                if process.poll() is None:
                    _end(process, folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """The launcher first, which would start nothing new; then the ranks, each in a process group of its own."""
    pids = [process.pid, *(int(path.read_text()) for path in folder.glob("pid.rank*"))]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()


def cases(*made: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", [pytest.param(one, marks=marks_of(one), id=str(one)) for one in made])


def marks_of(one: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.campaign] if one.of_campaign else []


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    assert before
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def without_statistics(state: dict[str, str]) -> dict[str, str]:
    """BatchNorm's statistics are each rank's own until DDP sends those of rank 0 in the next forward pass."""
    return {key: value for key, value in state.items() if ".running_" not in key}
