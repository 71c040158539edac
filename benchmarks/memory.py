"""That a run which fits into memory fits into it under the guard: small batches, then one that needs nearly all memory.

    PYTHONPATH=src python benchmarks/memory.py                        # a minute and a half on an H200
    PYTHONPATH=src python benchmarks/memory.py --device cpu --smoke   # does the script itself work?

A GPT of 124M parameters trains in bf16 with fused AdamW on small batches, long enough for the ring of snapshots to be
full. Right after one more snapshot has begun there is a single large batch, and then small ones again. A plain loop
without a limit tells the peak; every other run may use 1.05 times as much (`set_per_process_memory_fraction`). The
plain loop lives with that, and so must the guarded ones with default options. With snapshots on the device `guard.step`
must live too, by giving them back; the loop that cannot do so dies, which shows that the limit is tight. Each run has a
process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import nanguard
from models import _SMOKE, GPTConfig, Workload, loss_fn
from overhead import driver_version, say, write

GIB = 1 << 30
SMALL = Workload(name="small", config=GPTConfig(), batch_size=2)
LARGE = Workload(name="large", config=GPTConfig(), batch_size=24)
SMOKE_SMALL = Workload(name="small", config=_SMOKE, batch_size=2)
SMOKE_LARGE = Workload(name="large", config=_SMOKE, batch_size=16)
EVERY = 100
"""Steps between two snapshots by default on a GPU. The ring is full after the third, at step 2 * EVERY + 1."""

HEADROOM = 1.05
RUNS = {
    "plain": "lives",
    "guard.step": "lives",
    "own loop": "lives",
    "install()": "lives",
    "guard.step, snapshots on the device": "lives",
    "own loop, snapshots on the device": "dies",
}
"""What is expected of each run under the limit."""

Step = Callable[[Any], Any]


# ── One run, in a process of its own ─────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def stepping(how: str, device: torch.device, workload: Workload) -> Iterator[tuple[Step, Callable[[], Any]]]:
    """What trains on one batch; and what is to be told of the snapshots at the end."""
    model = workload.build(device)
    with nanguard.install() if how == "install()" else contextlib.nullcontext() as autopilot:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def plain(batch: Any) -> Any:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_fn(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        if how in ("plain", "install()"):
            yield plain, lambda: None if autopilot is None else autopilot.counts
            return
        on_device = nanguard.Snapshots(every=EVERY, where="device")
        ring: Any = on_device if how.endswith("on the device") else "auto"
        guard = nanguard.Guard(model, optimizer, precision="bf16", max_norm=None, snapshots=ring)

        def in_own_loop(batch: Any) -> Any:
            with guard.autocast():
                loss = loss_fn(model, batch)
            guard.backward(loss)
            guard.update()
            return loss.detach()

        by_guard: Step = lambda batch: guard.step(loss_fn, batch)  # noqa: E731
        yield in_own_loop if how.startswith("own loop") else by_guard, lambda: {**guard.counts, "ring": guard.snapshots}


def train(how: str, device: torch.device, limit: int, *, smoke: bool) -> dict[str, Any]:
    """Small batches, the large one, and some small ones."""
    small, large = (SMOKE_SMALL, SMOKE_LARGE) if smoke else (SMALL, LARGE)
    if limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total, 0)
    begin, end = (5, 3) if smoke else (2 * EVERY + 1, 20)
    cycle = small.batches(device, num=8)
    batches = [cycle[place % 8] for place in range(begin)] + large.batches(device, num=1) + cycle[:8] * (end // 8 + 1)
    result: dict[str, Any] = {"lived": True, "died_at": None, "loss": None}
    with stepping(how, device, small) as (step, told):
        for place, batch in enumerate(batches[: begin + 1 + end]):
            try:
                loss = step(batch)
            except torch.OutOfMemoryError as error:
                result |= {"lived": False, "died_at": place, "error": str(error).splitlines()[0][:200]}
                break
            result["loss"] = loss
        result["guard"] = told()
    result["loss"] = None if result["loss"] is None else float(result["loss"])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        result |= {
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
        }
    return result


def apart(how: str, args: argparse.Namespace, limit: int = 0) -> dict[str, Any]:
    """The same in another process."""
    command = [sys.executable, __file__, "--run", how, "--device", args.device, "--limit", str(limit)]
    command += ["--smoke"] if args.smoke else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{how} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["log"] = [line for line in done.stderr.splitlines() if "memory" in line]
    return result


# ── All of them ──────────────────────────────────────────────────────────────────────────────────────────


def limited_plain(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], int, str]:
    """The plain run without a limit and with the tightest that it lives with; that limit, and what it is made of."""
    free = apart("plain", args)
    if "peak" not in free:
        return free, apart("plain", args), 0, "nothing"
    for what in (
        "peak",
        "reserved",
    ):  # of memory in use; where that is too tight for the plain loop, of memory reserved
        limit = int(HEADROOM * free[what])
        plain = apart("plain", args, limit)
        say(f"plain, {limit / GIB:.2f} GiB ({HEADROOM} x {what}): {'lives' if plain['lived'] else 'dies'}")
        if plain["lived"]:
            break
    return free, plain, limit, what


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# Memory of a guarded run, {result['machine']}, {result['date']}", ""]
    fields = ("machine", "driver", "cuda", "torch", "python", "date")
    lines += [f"- {key}: {result[key]}" for key in fields if result[key] is not None]
    lines += [f"- command: `{result['command']}`", f"- model: {result['workload']}; one batch of {result['large']}"]
    if result["limit"]:
        of = {"peak": "peak", "reserved": "most reserved memory"}[result["limit_of"]]
        lines += [f"- limit: {result['limit'] / GIB:.2f} GiB, {HEADROOM} times the plain run's {of}"]
    if result["smoke"]:
        lines += ["", "Minute sizes, to try the script: these numbers mean nothing."]
    lines += ["", " ".join((__doc__ or "").split("\n\n")[2].split()), ""]
    lines += ["| run | under the limit | expected | peak, GiB | over plain | retried allocations |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: |"]
    for how, run in result["runs"].items():
        fate = "lives" if run["lived"] else f"dies at step {run['died_at']}"
        peak = f"{run['peak'] / GIB:.3f}" if "peak" in run else ""
        over = f"{run['peak'] / result['runs']['plain']['peak']:.4f}" if "peak" in run else ""
        lines.append(f"| {how} | {fate} | {RUNS[how]} | {peak} | {over} | {run.get('retries', '')} |")
    return "\n".join(lines) + "\n"


def as_expected(result: dict[str, Any]) -> bool:
    """Whether every run ends as it should. Without a limit all of them live."""
    wanted = {how: fate == "lives" or not result["limit"] for how, fate in RUNS.items()}
    return all(run["lived"] == wanted[how] for how, run in result["runs"].items())


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--only", help="some of the runs, separated by semicolons")
    p.add_argument("--smoke", action="store_true", help="minute sizes, to try the script itself")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    p.add_argument("--run", choices=RUNS, help="one run in this process; prints JSON")
    p.add_argument("--limit", type=int, default=0, help="bytes of device memory for that run, 0: no limit")
    return p.parse_args()


def main() -> int:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = torch.device(args.device)
    if args.run:
        print(json.dumps(train(args.run, device, args.limit, smoke=args.smoke)))
        return 0
    on_cuda = device.type == "cuda"
    small, large = (SMOKE_SMALL, SMOKE_LARGE) if args.smoke else (SMALL, LARGE)
    free, plain, limit, what = limited_plain(args)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(device) if on_cuda else f"CPU {platform.machine()}",
        "driver": driver_version() if on_cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "PYTHONPATH=src python benchmarks/memory.py" + " --smoke" * args.smoke,
        "workload": str(small),
        "large": f"{large.batch_size}x{large.config.context}",
        "smoke": args.smoke,
        "limit": limit,
        "limit_of": what,
        "without_limit": free,
        "runs": {"plain": plain},
    }
    chosen = [how for how in RUNS if how != "plain" and (args.only is None or how in args.only.split(";"))]
    for how in chosen:
        run = result["runs"][how] = apart(how, args, limit)
        say(f"{how}: {'lives' if run['lived'] else 'dies'}, {RUNS[how] if limit else 'lives'} is expected")
    slug = "-".join(result["machine"].lower().replace("_", "-").split()) + ("-smoke" if args.smoke else "")
    path = args.out / f"memory-{slug}-{result['date']}.json"
    write(path, json.dumps(result, indent=1) + "\n")
    write(path.with_suffix(".md"), markdown(result))
    print(f"\n{markdown(result)}")
    say(f"written: {path} and {path.with_suffix('.md').name}")
    return 0 if as_expected(result) else 1


if __name__ == "__main__":
    sys.exit(main())
