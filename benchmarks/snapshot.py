"""What a copy of the training state costs: within the device, to the host behind training, and back.

    PYTHONPATH=src python benchmarks/snapshot.py            # three and a half minutes on an H200
    PYTHONPATH=src python benchmarks/snapshot.py --quick    # minute sizes, to try the script itself

Only the copies are measured (`nanguard.state.snapshots.copies`), with `fence()` before every `optimizer.step()`.
Training is timed in blocks of a few steps, with and without one copy in them, interleaved: plain, copy,
plain, copy, ..., plain.
What a copy adds is its block's time less the mean of the plain blocks before and after; numbers are medians over rounds
with the 10th and 90th percentile. A block ends when training has caught up, not when the copy has arrived. A copy is
made from a standstill, where the loop has just waited for the device and the host's time to start the copy shows, and
on the run: after a step that the device still has to do.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from models import _SMOKE, _TINY, GPTConfig, Workload, loss_fn
from nanguard.state.snapshots import bulk, memory
from nanguard.state.snapshots.copies import Copier, Copies
from overhead import driver_version, say, spread, write

MIB = 1 << 20
BILLION = Workload(name="1B", config=GPTConfig(num_layers=18, num_heads=16, width=2048), batch_size=16)
SMALL = Workload(name="124M", config=GPTConfig(), batch_size=8)
QUICK_BILLION = Workload(name="1B", config=_TINY, batch_size=4)
QUICK_SMALL = Workload(name="124M", config=_SMOKE, batch_size=2)
ALONE = {
    "memcpy only": 0,
    "1 MiB": MIB,
    "4 MiB": 4 * MIB,
    "8 MiB": 8 * MIB,
    "32 MiB": 32 * MIB,
    "foreach only": 1 << 60,
}
"""From which size on a tensor is copied alone: the one in `bulk` should be among the quickest."""

START = {"standstill": "from a standstill", "run": "on the run"}

Ways = dict[str, tuple[Copier, Copies]]


# ── What is trained ──────────────────────────────────────────────────────────────────────────────────────


class Run:
    """A GPT in training: bf16 autocast, fp32 parameters, fused AdamW."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.model = workload.build(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batches = itertools.cycle(workload.batches(device, num=8))

    def train(self, steps: int, copier: Copier | None = None) -> Tensor:
        """The last loss, on the device."""
        loss = torch.zeros((), device=self.device)
        for _ in range(steps):
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = loss_fn(self.model, next(self.batches))
            loss.backward()  # type: ignore[no-untyped-call]
            if copier is not None:
                copier.fence()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter
            state |= {f"{name}:{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return state


def many_small(device: torch.device, number: int) -> dict[str, Tensor]:
    """Tensors of 4 bytes to 2 MB, such as a deep convolutional network has."""
    generator = torch.Generator().manual_seed(0)
    sizes = (10 ** (torch.rand(number, generator=generator) * 3.7 + 2)).long().clamp(min=1).tolist()
    return {f"t{i}": torch.randn(1 if i % 10 == 0 else size, device=device) for i, size in enumerate(sizes)}


# ── Measuring ────────────────────────────────────────────────────────────────────────────────────────────


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def catch_up(device: torch.device) -> None:
    """Waits for training alone, not for copies on streams of their own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wall_ms(device: torch.device, work: Callable[[], Any]) -> float:
    """From an idle device to an idle device."""
    sync(device)
    start = time.perf_counter()
    work()
    sync(device)
    return (time.perf_counter() - start) * 1e3


def device_ms(device: torch.device, work: Callable[[], Any], reps: int) -> dict[str, float]:
    """Median time of ``work`` on the current stream, and on the host.

    The device is kept busy until the host has queued all of it, so that the host's part does not count as the device's.
    """
    if device.type != "cuda":
        times = [wall_ms(device, work) for _ in range(reps + 1)][1:]
        return {"ms": median(times), "worst_ms": max(times), "host_ms": median(times)}
    ballast = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    on_device, on_host = [], []
    for _ in range(reps + 1):
        torch.cuda.synchronize(device)
        for _ in range(60):  # some 100 ms
            torch.mm(ballast, ballast)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        begun = time.perf_counter()
        work()
        on_host.append((time.perf_counter() - begun) * 1e3)
        end.record()
        torch.cuda.synchronize(device)
        on_device.append(start.elapsed_time(end))
    return {"ms": median(on_device[1:]), "worst_ms": max(on_device[1:]), "host_ms": median(on_host[1:])}


def copy_bound(device: torch.device, nbytes: int, reps: int) -> float:
    """Milliseconds of one plain memcpy of as many bytes."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return device_ms(device, lambda: to.copy_(source), reps)["ms"]


def device_copy(device: torch.device, what: str, state: dict[str, Tensor], reps: int) -> dict[str, Any]:
    """A copy within the device against one plain memcpy of the same bytes."""
    copier = Copier(device, "device")
    slot = copier.reserve(state)

    def take() -> None:
        copier.take(state, slot)
        copier.fence()

    nbytes = memory.state_bytes(state)
    bound = copy_bound(device, nbytes, reps)
    timing = device_ms(device, take, reps)
    back = device_ms(device, lambda: slot.put_back(state), reps)
    free(device)
    result: dict[str, Any] = {
        "what": what,
        "tensors": len(state),
        "bytes": nbytes,
        "held_bytes": slot.held_bytes,
        "bound_ms": bound,
        "take": timing,
        "ratio": timing["ms"] / bound,
        "put_back": back,
        "put_back_ratio": back["ms"] / bound,
        "alone_from": {},
    }
    chosen = bulk._ALONE
    for name, size in ALONE.items():
        bulk._ALONE = size
        result["alone_from"][name] = device_ms(device, take, max(2, reps // 2))["ms"] / bound
    bulk._ALONE = chosen
    ways = ", ".join(f"{name} {ratio:.2f}" for name, ratio in result["alone_from"].items())
    say(f"  {what}: {len(state)} tensors, {memory.human(nbytes)}: {timing['ms']:.3f} ms of {bound:.3f} ms = "
        f"{result['ratio']:.3f}; host {timing['host_ms']:.2f} ms; back {result['put_back_ratio']:.3f}; "
        f"alone from: {ways}")  # fmt: skip
    return result


def pinned_bound(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s between device and pinned host memory, each way."""
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    out = min(wall_ms(device, lambda: on_host.copy_(on_device, non_blocking=True)) for _ in range(4))
    back = min(wall_ms(device, lambda: on_device.copy_(on_host, non_blocking=True)) for _ in range(4))
    return {"to_host_gbps": nbytes / out / 1e6, "to_device_gbps": nbytes / back / 1e6}


def asking_ms(device: torch.device) -> float | None:
    """Host time of asking for free memory while the device has some 100 ms of work queued: does it wait?"""
    if device.type != "cuda":
        return None
    ballast = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize(device)
    for _ in range(60):
        torch.mm(ballast, ballast)
    begun = time.perf_counter()
    torch.cuda.mem_get_info(device)
    taken = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize(device)
    return taken


def alone_ms(device: torch.device, run: Run, copier: Copier, slot: Copies, reps: int) -> dict[str, float]:
    """A copy that is waited for, nothing else going on; and how soon the state may be written to again."""
    whole, until_writable = [], []
    for _ in range(reps + 1):
        sync(device)
        begun = time.perf_counter()
        copier.take(run.state(), slot)
        copier.fence()
        catch_up(device)
        until_writable.append((time.perf_counter() - begun) * 1e3)
        slot.wait()
        whole.append((time.perf_counter() - begun) * 1e3)
    return {"ms": median(whole[1:]), "until_writable_ms": median(until_writable[1:]), "first_ms": whole[0]}


def block_ms(
    run: Run, steps: int, copier: Copier | None = None, slot: Copies | None = None, *, after: int = 0
) -> tuple[float, float]:
    """Wall time of some steps, with one copy ``after`` so many of them; and the host's time to start that copy."""
    gc.collect()
    gc.disable()
    try:
        sync(run.device)
        begun = time.perf_counter()
        taking = 0.0
        run.train(after, copier)
        if copier is not None:
            asked = time.perf_counter()
            copier.take(run.state(), slot)
            taking = time.perf_counter() - asked
        run.train(steps - after, copier)
        catch_up(run.device)
        return (time.perf_counter() - begun) * 1e3, taking * 1e3
    finally:
        gc.enable()
        if slot is not None:
            slot.wait()


def behind_training(run: Run, ways: Ways, rounds: int, steps: int) -> dict[str, Any]:
    """What one copy adds to a block of steps, for each way of copying, from a standstill and on the run."""
    starts = {"standstill": 0, "run": 1}
    added: dict[str, dict[str, list[float]]] = {start: {name: [] for name in ways} for start in starts}
    taking: dict[str, list[float]] = {name: [] for name in ways}
    plains: list[float] = []
    for index in range(rounds):
        block_ms(run, max(1, steps // 2))  # not counted: the device may have idled
        before, _ = block_ms(run, steps)
        plains.append(before)
        for (start, after), (name, way) in itertools.product(starts.items(), ways.items()):
            with_copy, host = block_ms(run, steps, *way, after=after)
            plain, _ = block_ms(run, steps)
            added[start][name].append(with_copy - (before + plain) / 2)
            if start == "standstill":
                taking[name].append(host)
            plains.append(plain)
            before = plain
        latest = ", ".join(f"{name} {'/'.join(f'{added[s][name][-1]:+.1f}' for s in starts)}" for name in ways)
        say(f"  round {index + 1}/{rounds}: {steps} plain steps {before:.1f} ms; added: {latest} ms")
    return {
        "steps_per_block": steps,
        "step_ms": median(plains) / steps,
        "noise_ms": spread([abs(a - b) for a, b in itertools.pairwise(plains)]),
        "added_ms": {start: {name: spread(values) for name, values in each.items()} for start, each in added.items()},
        "all_added_ms": {s: {n: [round(v, 3) for v in values] for n, values in e.items()} for s, e in added.items()},
        "take_host_ms": {name: spread(values) for name, values in taking.items()},
    }


def steadily(run: Run, copier: Copier, slot: Copies, every: int, blocks: int) -> dict[str, Any]:
    """Step time with a copy every so many steps over that without."""
    ratios = []
    before, _ = block_ms(run, every)
    for _ in range(blocks):
        with_copy, _ = block_ms(run, every, copier, slot)
        after, _ = block_ms(run, every)
        ratios.append(2 * with_copy / (before + after))
        before = after
        say(f"  {every} steps with a copy {with_copy:.1f} ms, without {after:.1f} ms: {ratios[-1]:.4f}")
    return {"every": every, "ratio": median(ratios), "ratios": ratios}


def restoring(run: Run, ways: Ways, reps: int) -> dict[str, Any]:
    """Wall time from an idle device until the state is back."""
    found = {}
    for name, (copier, slot) in ways.items():
        copier.take(run.state(), slot)
        copier.fence()
        slot.wait()
        times = [wall_ms(run.device, lambda slot=slot: slot.put_back(run.state())) for _ in range(reps + 1)]  # type: ignore[misc]
        found[name] = {"ms": median(times[1:]), "first_ms": times[0]}
        say(f"  back from {name}: {found[name]['ms']:.1f} ms (first time {times[0]:.1f} ms)")
    return found


def exact(run: Run, ways: Ways) -> dict[str, Any]:
    """Which tensors are not to the bit what they were: in the copy made behind training, and after its return."""
    wrong: dict[str, list[str]] = {}
    for name, (copier, slot) in ways.items():
        state = run.state()
        reference = {key: tensor.detach().clone() for key, tensor in state.items()}
        copier.take(state, slot)
        run.train(2, copier)
        slot.wait()
        bad = [f"copy of {key}" for key in reference if not same(slot[key].to(run.device), reference[key])]
        unchanged = sum(same(state[key], reference[key]) for key in reference)
        slot.put_back(run.state())
        bad += [key for key, tensor in run.state().items() if not same(tensor, reference[key])]
        wrong[name] = bad
        say(f"  {name}: {len(bad)} of {len(reference)} tensors differ after the return; "
            f"training had left {unchanged} as they were")  # fmt: skip
        del reference
        free(run.device)
    return {"differing": {name: bad[:20] for name, bad in wrong.items()}, "passed": not any(wrong.values())}


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


def check_syncs(run: Run, ways: Ways) -> dict[str, str]:
    """Take, fence and return while any call that makes the host wait for the device raises."""
    if run.device.type != "cuda":
        return {}
    found = {}
    for name, (copier, slot) in ways.items():
        torch.cuda.synchronize(run.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            copier.take(run.state(), slot)
            copier.fence()
            slot.put_back(run.state())
            found[name] = "none"
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(run.device)
        say(f"  syncs, {name}: {found[name]}")
    return found


# ── Reporting ────────────────────────────────────────────────────────────────────────────────────────────


def header(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    rest = iter(sys.argv[1:])
    kept = [a for a in rest if not (a.startswith("--out=") or (a == "--out" and next(rest, "") is not None))]
    return {
        "machine": torch.cuda.get_device_name(device) if on_cuda else f"CPU {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "driver": driver_version() if on_cuda else None,
        "cuda": torch.version.cuda if on_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"PYTHONPATH=src {shlex.join(['python', 'benchmarks/snapshot.py', *kept])}",
    }


def goals(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """What was aimed at: what, value, goal, met."""
    rows = []
    for each in result["device_copy"]:
        rows.append(
            (f"copy within the device over one memcpy, {each['what']}", each["ratio"], "<= 1.3", each["ratio"] <= 1.3)
        )
    for start, shares in result["hidden"].items():
        for name, share in shares.items():
            if name != "the device":
                what = f"share hidden behind training of a copy to {name}, {START[start]}"
                rows.append((what, share, ">= 0.90", share >= 0.9))
    step = result["behind_training"]["step_ms"]
    for name, timing in result["restore"].items():
        steps = timing["ms"] / step
        rows.append((f"return from {name}, in steps", steps, "<= 2", steps <= 2))
    steady = result["steady"]
    rows.append(
        (
            f"step time with a copy to the host every {steady['every']} steps over none",
            steady["ratio"],
            "<= 1.01",
            steady["ratio"] <= 1.01,
        )
    )
    return rows


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# Copies of the training state, {result['machine']}, {result['date']}", ""]
    fields = ("machine", "cpu_cores", "driver", "cuda", "torch", "python", "date")
    lines += [f"- {key.replace('_', ' ')}: {result[key]}" for key in fields if result[key] is not None]
    lines += [f"- command: `{result['command']}`", f"- model: {result['workload']}", ""]
    if result["quick"]:
        lines += ["Minute sizes, to try the script: these numbers mean nothing.", ""]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), ""]
    lines += ["| | measured | goal | |", "| --- | ---: | ---: | --- |"]
    lines += [
        f"| {what} | {value:.3f} | {goal} | {'met' if met else '**missed**'} |"
        for what, value, goal, met in goals(result)
    ]
    lines += [
        f"| state after the return, to the bit | {'equal' if result['exact']['passed'] else 'DIFFERENT'} | equal | |",
        "",
    ]
    lines += ["## Within the device", ""]
    lines += ["| state | tensors | size | memcpy, ms | copy, ms | ratio | host, ms | back, ratio |"]
    lines += ["| --- |" + " ---: |" * 7]
    for each in result["device_copy"]:
        take = each["take"]
        lines.append(
            f"| {each['what']} | {each['tensors']:,} | {memory.human(each['bytes'])} | {each['bound_ms']:.3f} | "
            f"{take['ms']:.3f} | {each['ratio']:.3f} | {take['host_ms']:.2f} | {each['put_back_ratio']:.3f} |"
        )
    lines += ["", "The ratio by the size from which on a tensor is copied alone:", ""]
    lines += ["| state | " + " | ".join(ALONE) + " |", "| --- |" + " ---: |" * len(ALONE)]
    for each in result["device_copy"]:
        lines.append(f"| {each['what']} | " + " | ".join(f"{each['alone_from'][name]:.3f}" for name in ALONE) + " |")
    host, behind = result["host"], result["behind_training"]
    lines += ["", "## Behind training", ""]
    lines += [f"- a step takes {behind['step_ms']:.1f} ms; blocks of {behind['steps_per_block']}"]
    lines += [f"- difference between plain blocks in a row: {_spread(behind['noise_ms'])} ms"]
    lines += [f"- pinned memory: {host['bound']['to_host_gbps']:.1f} GB/s to the host, "
              f"{host['bound']['to_device_gbps']:.1f} GB/s back"]  # fmt: skip
    lines += [
        f"- pinning {memory.human(host['held_bytes'])} for {memory.human(host['bytes'])}: {host['reserve_ms']:.0f} ms"
    ]
    if host["asking_ms"] is not None:
        lines += [f"- asking a busy device for its free memory: {host['asking_ms']:.3f} ms"]
    if result["syncs"]:
        lines += ["- syncs: " + ", ".join(f"{name}: {what}" for name, what in result["syncs"].items())]
    lines += ["", "| | alone, ms | GB/s | until writable, ms | host, ms | added from a standstill, ms | hidden | "
              "added on the run, ms | hidden | back, ms |"]  # fmt: skip
    lines += ["| --- |" + " ---: |" * 9]
    for name, alone in host["alone"].items():
        numbers = [
            f"{alone['ms']:.1f}",
            f"{host['bytes'] / alone['ms'] / 1e6:.1f}",
            f"{alone['until_writable_ms']:.1f}",
            f"{behind['take_host_ms'][name]['median']:.2f}",
            *(
                cell
                for start in START
                for cell in (_spread(behind["added_ms"][start][name]), f"{result['hidden'][start][name]:.3f}")
            ),
            f"{result['restore'][name]['ms']:.1f}",
        ]
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    if result["memory"]:
        lines += ["", "- " + ", ".join(f"{what}: {memory.human(size)}" for what, size in result["memory"].items())]
    return "\n".join(lines) + "\n"


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['p10']:.1f} to {values['p90']:.1f})"


def save(result: dict[str, Any], folder: Path) -> Path:
    slug = "-".join(result["machine"].lower().replace("_", "-").split()) + ("-quick" if result["quick"] else "")
    path = folder / f"snapshot-{slug}-{result['date']}.json"
    write(path, json.dumps(result) + "\n")
    write(path.with_suffix(".md"), markdown(result))
    return path


# ── Command line ─────────────────────────────────────────────────────────────────────────────────────────


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rounds", type=int, help="rounds of interleaved blocks (6)")
    p.add_argument("--steps", type=int, help="steps in a block (4)")
    p.add_argument("--every", type=int, help="steps between copies, in the run of some length (50)")
    p.add_argument("--batch", type=int, help="batch size of the large model (16)")
    p.add_argument("--quick", action="store_true", help="minute sizes, to try the script itself")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    args = p.parse_args()
    rounds, steps, every = (2, 2, 3) if args.quick else (6, 4, 50)
    args.rounds, args.steps, args.every = args.rounds or rounds, args.steps or steps, args.every or every
    return args


def main() -> int:
    args = parse()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(1)
    reps = 2 if args.quick else 8
    large, small, number = (QUICK_BILLION, QUICK_SMALL, 60) if args.quick else (BILLION, SMALL, 3000)
    if args.batch:
        large = Workload(name=large.name, config=large.config, batch_size=args.batch)
    result: dict[str, Any] = {**header(device), "workload": str(large), "quick": args.quick}
    say(f"{result['machine']}, torch {result['torch']}, Python {result['python']}")

    say("within the device")
    result["device_copy"] = [device_copy(device, "3,000 small tensors", many_small(device, number), reps)]
    other = Run(small, device)
    other.train(2)
    result["device_copy"].append(device_copy(device, f"{small.name} GPT", other.state(), reps))
    del other
    free(device)
    run = Run(large, device)
    loss = run.train(3).item()
    if not math.isfinite(loss):
        raise RuntimeError(f"loss {loss} in warm-up; there is nothing to time")
    result["device_copy"].append(device_copy(device, f"{large.name} GPT", run.state(), reps))
    free(device)

    say(f"behind training: {large}, loss {loss:.3f}, state {memory.human(memory.state_bytes(run.state()))}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run.train(2)
    sizes = {"peak of plain training": _peak(device)}
    to_host, within = Copier(device, "host"), Copier(device, "device")
    begun = time.perf_counter()
    slot = to_host.reserve(run.state())
    reserve_ms = (time.perf_counter() - begun) * 1e3
    ways: Ways = {
        "the host": (to_host, slot),
        "the device": (within, within.reserve(run.state())),
    }
    sync(device)
    nbytes = memory.state_bytes(run.state())
    say(f"  pinned {memory.human(slot.held_bytes)} for {memory.human(nbytes)} in {reserve_ms:.0f} ms")
    for copier, _ in ways.values():
        run.train(1, copier)
    result["host"] = {
        "bytes": nbytes,
        "held_bytes": slot.held_bytes,
        "reserve_ms": reserve_ms,
        "parcels": len(slot.parcels(run.state())),
        "bound": pinned_bound(device, MIB if args.quick else 1 << 30),
        "asking_ms": asking_ms(device),
        "alone": {name: alone_ms(device, run, *way, reps=3) for name, way in ways.items()},
    }
    for name, alone in result["host"]["alone"].items():
        say(f"  {name}, alone: {alone['ms']:.1f} ms, {nbytes / alone['ms'] / 1e6:.1f} GB/s; "
            f"writable after {alone['until_writable_ms']:.1f} ms; first {alone['first_ms']:.1f} ms")  # fmt: skip
    say(f"  bound: {result['host']['bound']}; asking for free memory: {result['host']['asking_ms']} ms")
    result["syncs"] = check_syncs(run, ways)
    result["behind_training"] = behind = behind_training(run, ways, args.rounds, args.steps)
    alone_by_way = {name: alone["ms"] for name, alone in result["host"]["alone"].items()}
    result["hidden"] = {
        start: {name: 1 - each[name]["median"] / alone_by_way[name] for name in ways}
        for start, each in behind["added_ms"].items()
    }
    for start, shares in result["hidden"].items():
        say(f"  hidden {START[start]}: {', '.join(f'{name} {share:.3f}' for name, share in shares.items())}")
    if device.type == "cuda":
        sizes["peak with a copy on its way"] = _peak(device)
        sizes["reserved"] = torch.cuda.memory_reserved(device)
    result["memory"] = {what: size for what, size in sizes.items() if size}

    say("back")
    result["restore"] = restoring(run, ways, 3)
    say("every so many steps")
    length = args.every * behind["step_ms"] / 1e3
    result["steady"] = steadily(run, *ways["the host"], args.every, 2 if 5 * length < 90 else 1)
    say("to the bit")
    result["exact"] = exact(run, ways)

    path = save(result, args.out)
    print(f"\n{markdown(result)}")
    say(f"written: {path} and {path.with_suffix('.md').name}")
    return 0 if result["exact"]["passed"] and all(what == "none" for what in result["syncs"].values()) else 1


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())
