"""Programs that take turns, so that a slow or busy machine is slow for all of them alike.

The programs are processes of their own. Each runs until it is warm and then waits. From then on exactly one of them
runs at any moment, for a block of a few steps: plain, guarded, plain, guarded. A block that is a tenth of a second long
and stands between two blocks of the other program can be compared with them, however much the speed of the machine
changes over minutes.

A program calls `Timer.step` after each of its steps, and nothing else. It gets the two ends of its pipes with
`--turns`; without them it times its blocks and waits for nobody.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from overhead import Block

# ── In the program ───────────────────────────────────────────────────────────────────────────────────────


class Timer:
    """Seconds per step of each block: on a GPU until the device has done it, on a CPU of the processor's time."""

    def __init__(self, device: torch.device, *, warm_up: int, block: int, turns: str | None = None) -> None:
        self._is_gpu, self._warm_up, self._block = device.type == "cuda", warm_up, block
        self._pipes = None if turns is None else tuple(int(end) for end in turns.split(","))
        self._num_steps = 0
        self._first = self._began = 0.0
        self.times: list[float] = []

    def step(self) -> None:
        self._num_steps += 1
        timed = self._num_steps - self._warm_up
        if timed < 0 or timed % self._block:
            return
        if timed:
            self.times.append((self._now() - self._began) / self._block)
            self._hand_over(f"{self.times[-1]!r}\n")
        else:
            self._hand_over("warm\n")
            self._first = self._now()
        self._began = self._now()

    def total(self) -> float:
        """Seconds since the warm-up, which mean something only if nobody else had a turn."""
        return self._now() - self._first

    def _hand_over(self, line: str) -> None:
        """Says how the block went, and waits until it is this program's turn again."""
        if self._pipes is not None:
            reads, writes = self._pipes
            if self._is_gpu:
                torch.cuda.synchronize()
            os.write(writes, line.encode())
            os.read(reads, 1)

    def _now(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


# ── In the benchmark ─────────────────────────────────────────────────────────────────────────────────────


class Player:
    """A program that waits for its turns."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        reads, tell = os.pipe()
        hear, writes = os.pipe()
        self._command = [*command, "--turns", f"{reads},{writes}"]
        self._process = subprocess.Popen(self._command, pass_fds=(reads, writes), **options)
        os.close(reads)
        os.close(writes)
        self._tell, self._hear = tell, os.fdopen(hear)

    def wait_until_warm(self) -> None:
        self._line()

    def run_block(self) -> float:
        """Milliseconds per step of one block."""
        os.write(self._tell, b".")
        return float(self._line()) * 1e3

    def end(self) -> None:
        """The program ends by itself if it had all its turns; it does not wait for more of them."""
        os.close(self._tell)
        self._process.wait()
        self._hear.close()

    def kill(self) -> None:
        self._process.kill()

    def _line(self) -> str:
        line = self._hear.readline()
        if not line:
            raise RuntimeError(f"ended with code {self._process.wait()} before its time: {' '.join(self._command)}")
        return line


def take_turns(plain: Player, guarded: Player, rounds: int) -> tuple[list[float], list[Block]]:
    """Milliseconds per step of all plain blocks, and the guarded blocks with their ratios to the plain ones around."""
    players = (plain, guarded)
    try:
        for player in players:
            player.wait_until_warm()
        for player in players:
            player.run_block()  # not counted: the device may have idled
        of_plain, blocks = [plain.run_block()], []
        for _ in range(rounds):
            ms = guarded.run_block()
            of_plain.append(plain.run_block())
            blocks.append((ms, 2 * ms / (of_plain[-2] + of_plain[-1])))
        for player in players:
            player.end()
    except BaseException:
        for player in players:
            player.kill()
        raise
    return of_plain, blocks


def steps_needed(warm_up: int, block: int, rounds: int) -> int:
    """How many steps a program must have for so many rounds."""
    return warm_up + block * (rounds + 2)
