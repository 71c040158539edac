"""What the early warning costs: guarded steps with a Monitor against guarded steps without one.

    PYTHONPATH=src python benchmarks/monitor_cost.py                         # about four minutes on an H200
    PYTHONPATH=src python benchmarks/monitor_cost.py --device cpu --smoke    # does the script itself work?

All variants train their own copy of the 124M GPT in one process, in bf16, eager and compiled, interleaved as in
overhead.py: each block stands between two blocks of the guard without a monitor, and a number is the median over rounds
of the ratio to these two.

- `without, again`: the noise
- `ordinary steps`: a monitor that does not probe in these blocks
- `one probe a block`: a monitor that probes exactly one step of each block
- `one probe a block, uncompiled` (compiled models only): the same with `probe_compiled=True`, which sees every op
- `at the default`: `Monitor()`, which chooses how often to probe. It runs until it has chosen; its average cost is that
  of ordinary steps, and what a probe costs divided by the number of steps between two probes.

On a GPU, 50 steps of the monitor, probed ones among them, also run under `set_sync_debug_mode("error")`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nanguard
from models import SMOKE_WORKLOADS, WORKLOADS, loss_fn
from overhead import NUM_BATCHES, header, interleave, say, synchronize, write
from variants import MAX_NORM, Plain, Rig

MODES = ("eager", "compile")
NEVER = 10**9
FIELDS = ("machine", "cpu_cores", "driver", "cuda", "torch", "python", "date")


class Monitored(Plain):
    """A guarded step, with a monitor or without."""

    def __init__(self, rig: Rig, monitor: nanguard.Monitor | None) -> None:
        super().__init__(rig)
        observers = [] if monitor is None else [monitor]
        self.guard = nanguard.Guard(
            self.model, self.optimizer, precision="bf16", max_norm=MAX_NORM, observers=observers
        )

    def step(self, batch: Any) -> Tensor:
        loss: Tensor = self.guard.step(loss_fn, batch)
        return loss

    def finish(self) -> None:
        self.guard.settle()


def settle_pace(variant: Monitored, monitor: nanguard.Monitor, most: int) -> None:
    """Runs until the monitor knows what a probe costs, and two probes more, but at most so many steps."""
    while monitor.probe_cost is None:
        variant.run(10)
    variant.run(min(2 * monitor.probe_every, most))


def is_free_of_syncs(rig: Rig, steps: int = 50) -> bool | None:
    """Whether no step makes the host wait, probed or not. None if there is no GPU."""
    if rig.device.type != "cuda":
        return None
    variant = Monitored(rig, nanguard.Monitor(probe_every=7))
    variant.run(10)
    synchronize(rig)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            variant.step(next(variant.batches))
    except RuntimeError as error:
        say(f"  SYNC: {error}")
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    variant.finish()
    return True


def peak_memory(rig: Rig, variant: Monitored, steps: int) -> int | None:
    if rig.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(rig.device)
    before = torch.cuda.memory_allocated(rig.device)
    variant.run(steps)
    return torch.cuda.max_memory_allocated(rig.device) - before


def measure(rig: Rig, rounds: int, steps: int) -> dict[str, Any]:
    say(f"{rig.mode}: {rig.workload}")
    torch.compiler.reset()
    monitor = nanguard.Monitor()
    plain, variants = (
        Monitored(rig, None),
        {
            "without, again": Monitored(rig, None),
            "ordinary steps": Monitored(rig, nanguard.Monitor(probe_every=NEVER)),
            "one probe a block": Monitored(rig, nanguard.Monitor(probe_every=steps)),
        },
    )
    if rig.mode == "compile":
        uncompiled = nanguard.Monitor(probe_every=steps, probe_compiled=True)
        variants["one probe a block, uncompiled"] = Monitored(rig, uncompiled)
    by_default = Monitored(rig, monitor)
    for each in (plain, *variants.values(), by_default):
        each.run(2 * steps)
    settle_pace(by_default, monitor, 60 * steps)
    say(f"  the default probes one step in {monitor.probe_every}; a probe costs {monitor.probe_cost:.2f} steps")
    timings = interleave(rig, plain, dict(variants), rounds, steps)
    ratio = {name: timings[name]["ratio"]["median"] for name in timings}
    probe = (ratio["one probe a block"] - ratio["ordinary steps"]) * steps
    memory = {name: peak_memory(rig, each, steps) for name, each in variants.items()}
    whole = ratio.get("one probe a block, uncompiled")
    return {
        "mode": rig.mode,
        "workload": str(rig.workload),
        "variants": timings,
        "probe_costs_steps": probe,
        "uncompiled_probe_costs_steps": None if whole is None else (whole - ratio["ordinary steps"]) * steps,
        "probe_costs_by_its_own_clock": monitor.probe_cost,
        "probe_every": monitor.probe_every,
        "cost_at_the_default": ratio["ordinary steps"] - 1 + probe / monitor.probe_every,
        "cost_of_probes_at_the_default": probe / monitor.probe_every,
        "peak_memory_bytes": memory,
        "free_of_syncs": is_free_of_syncs(rig),
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# Cost of the early warning, {result['machine']}, {result['date']}", ""]
    lines += [f"- {key.replace('_', ' ')}: {result[key]}" for key in FIELDS if result[key] is not None]
    lines += [f"- workload: {result['sections'][0]['workload']}", f"- command: `{result['command']}`", ""]
    lines += [
        "Ratios of the time of a guarded step with a monitor to one without, in interleaved blocks of "
        f"{result['steps']} steps: the median over {result['rounds']} rounds (where it lies with 95% certainty).",
        "",
        "| | " + " | ".join(section["mode"] for section in result["sections"]) + " |",
        "| --- |" + " ---: |" * len(result["sections"]),
    ]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    sections = result["sections"]
    for name in ("without, again", "ordinary steps", "one probe a block"):
        ratios = [section["variants"][name]["ratio"] for section in sections]
        row(name, [f"{r['median']:.4f} ({r['low']:.4f} to {r['high']:.4f})" for r in ratios])
    uncompiled = [s["uncompiled_probe_costs_steps"] for s in sections]
    if any(uncompiled):
        row("a probe without compilation costs", ["" if c is None else f"{c:.2f} steps" for c in uncompiled])
    row("a probe costs", [f"{s['probe_costs_steps']:.2f} steps" for s in sections])
    row("by the monitor's own clock", [f"{s['probe_costs_by_its_own_clock']:.2f} steps" for s in sections])
    row("the default probes one step in", [f"{s['probe_every']:,}" for s in sections])
    row("cost of probes at the default", [f"{100 * s['cost_of_probes_at_the_default']:.2f}%" for s in sections])
    row("all in all at the default", [f"{100 * s['cost_at_the_default']:.2f}%" for s in sections])
    if all(s["free_of_syncs"] is not None for s in sections):
        row("50 steps without a sync", ["yes" if s["free_of_syncs"] else "NO" for s in sections])
        for name in ("ordinary steps", "one probe a block"):
            sizes = [f"{s['peak_memory_bytes'][name] / 2**20:,.0f} MiB" for s in sections]
            row(f"peak memory above weights, {name}", sizes)
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--smoke", action="store_true", help="a minute model and few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every variant compiles a model of its own,
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # and none may quietly go back to eager
    workload = (SMOKE_WORKLOADS if args.smoke else WORKLOADS)["large"]
    rounds, steps = (2, 6) if args.smoke else (args.rounds, args.steps)
    result: dict[str, Any] = {**header(device), "rounds": rounds, "steps": steps, "sections": []}
    result["command"] = "PYTHONPATH=src python benchmarks/monitor_cost.py"
    modes = ["eager"] if args.smoke else args.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes accepts {', '.join(MODES)}, got {', '.join(unknown)}")
    for mode in modes:
        batches = workload.batches(device, num=NUM_BATCHES)
        result["sections"].append(
            measure(Rig(workload=workload, mode=mode, device=device, batches=batches), rounds, steps)
        )
    text = markdown(result)
    print(f"\n{text}")
    slug = "-".join(result["machine"].lower().replace("_", "-").split()) + ("-smoke" if args.smoke else "")
    path = args.out / f"monitor-{slug}-{result['date']}.json"
    write(path, json.dumps(result) + "\n")
    write(path.with_suffix(".md"), text)
    say(f"written: {path} and {path.with_suffix('.md').name}")
    return 1 if any(section["free_of_syncs"] is False for section in result["sections"]) else 0


if __name__ == "__main__":
    sys.exit(main())
