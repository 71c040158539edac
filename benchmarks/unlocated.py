"""What one incident that is not located costs: time of the steps, and of the evaluations, before it and after it.

    PYTHONPATH=src python benchmarks/unlocated.py            # less than a minute; on the GPU too if there is one
    PYTHONPATH=src python benchmarks/unlocated.py --smoke    # does the script itself work?

A small net trains, with an evaluation under ``no_grad`` every few steps. Once the loss, which is outside any module,
has a derivative that is not finite. Nothing can be replayed that would show where, so the guard traces some of the next
steps; the fault does not come again. Three loops do this: the plain one (which leaves the bad step out), the same under
``nanguard.install()``, which is what ``nanguard run`` does, and a loop of one's own with ``Guard``.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanguard
from nanguard.diagnosis import live
from nanguard.diagnosis.search import BURST, SHARE
from nanguard.diagnosis.trace import Trace

METHOD = (
    "A net of 18 layers, fp32, AdamW (fused on the GPU), one thread. On the CPU the time is the processor's, on the "
    "GPU the host's, which waits for the device after each step and each evaluation. Medians; ratios are to the same "
    "loop before the incident. The step of the incident, in which it is examined, is given apart."
)
EVALUATE_EVERY = 10


class Counted(Trace):  # type: ignore[no-untyped-call]
    """A trace that counts the ops it follows."""

    num_ops = 0

    def _remember_node(self, *args: Any) -> None:
        Counted.num_ops += 1
        super()._remember_node(*args)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.expand, self.project = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.project(nn.functional.gelu(self.expand(self.norm(x))))
        return out


class Loop:
    """A training program. ``guarded`` may make a guard of model and optimizer, which the loop then uses."""

    def __init__(self, device: str, guarded: Callable[[nn.Module, Any], nanguard.Guard] | None = None) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(*(Block(64) for _ in range(6))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda" or None)
        self.x = torch.randn(32, 64, device=device)
        self.guard = None if guarded is None else guarded(self.model, self.optimizer)

    def loss(self, *, is_bad: bool) -> Tensor:
        out: Tensor = self.model(self.x)
        return (out * 0).sqrt().sum() if is_bad else (out - self.x.roll(1, 0)).square().mean()

    def step(self, *, is_bad: bool = False) -> None:
        if self.guard is None:
            self.optimizer.zero_grad()
            self.loss(is_bad=is_bad).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return
        with self.guard.autocast():
            loss = self.loss(is_bad=is_bad)
        self.guard.backward(loss)
        self.guard.update()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        for _ in range(4):
            (self.model(self.x) - self.x).square().mean()
        self.model.train()

    def time_of(self, work: Callable[..., None], **arguments: Any) -> tuple[float, int]:
        """In seconds, until the device has done it; and how many ops of it were traced."""
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        began, num_ops = clock(), Counted.num_ops
        work(**arguments)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return clock() - began, Counted.num_ops - num_ops

    def times_of(self, number: int) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Of so many steps, and of the evaluations between them."""
        steps, evaluations = [], []
        for place in range(number):
            steps.append(self.time_of(self.step))
            if place % EVALUATE_EVERY == 0:
                evaluations.append(self.time_of(self.evaluate))
        return steps, evaluations


def measure(loop: Loop, before: int, after: int, *, skips_bad: bool) -> dict[str, Any]:
    loop.times_of(before // 4)  # to warm up
    steps_before, evaluations_before = loop.times_of(before)
    examined = 0.0 if skips_bad else loop.time_of(loop.step, is_bad=True)[0]
    steps_after, evaluations_after = loop.times_of(after)
    first, later = steps_after[: 2 * BURST], steps_after[2 * BURST :]
    traced = [seconds for seconds, num_ops in steps_after if num_ops]
    usual = statistics.median(seconds for seconds, _ in steps_before)
    return {
        "step_before_us": usual * 1e6,
        "step_after": statistics.median(seconds for seconds, num_ops in later if not num_ops) / usual,
        "mean_step_after": statistics.fmean(seconds for seconds, _ in later)
        / statistics.fmean(seconds for seconds, _ in steps_before),
        "traced_step": statistics.median(traced) / usual if traced else None,
        "num_traced_first": sum(num_ops > 0 for _, num_ops in first),
        "num_traced_later": sum(num_ops > 0 for _, num_ops in later),
        "num_later": len(later),
        "share_of_traced_later": sum(seconds for seconds, num_ops in later if num_ops)
        / sum(seconds for seconds, _ in (*later, *evaluations_after)),
        "evaluation_before_us": statistics.median(seconds for seconds, _ in evaluations_before) * 1e6,
        "evaluation_after_us": statistics.median(seconds for seconds, _ in evaluations_after) * 1e6,
        "num_ops_traced_in_evaluations": sum(num_ops for _, num_ops in evaluations_after),
        "examined_ms": examined * 1e3,
    }


def measure_all(device: str, before: int, after: int) -> list[dict[str, Any]]:
    rows = [{"device": device, "loop": "plain"} | measure(Loop(device), before, after, skips_bad=True)]
    with nanguard.install() as autopilot:
        rows.append({"device": device, "loop": "install()"} | measure(Loop(device), before, after, skips_bad=False))
        assert [incident.diagnosis.cause for incident in autopilot.incidents if incident.diagnosis] == ["unknown"]
    loop = Loop(device, lambda model, optimizer: nanguard.Guard(model, optimizer, precision="fp32"))
    rows.append({"device": device, "loop": "Guard, own loop"} | measure(loop, before, after, skips_bad=False))
    assert loop.guard is not None
    loop.guard.settle()
    assert [incident.diagnosis.cause for incident in loop.guard.incidents if incident.diagnosis] == ["unknown"]
    return rows


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"# What an incident that is not located costs: {facts['name']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}. {METHOD} At most {BURST} steps are traced at once, then at "
        f"most {SHARE:.0%} of the time.",
        "",
        f"| device | loop | a step before | after, not traced | mean of all after the first {2 * BURST} "
        f"| a traced step | traced of the first {2 * BURST} | of the later ones | share of the time "
        "| evaluation before | after | ops traced in evaluations | examination |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in facts["rows"]:
        traced = "" if row["traced_step"] is None else f"{row['traced_step']:.1f}x"
        lines.append(
            f"| {row['device']} | {row['loop']} | {row['step_before_us']:,.0f} us | {row['step_after']:.2f}x "
            f"| {row['mean_step_after']:.2f}x | {traced} | {row['num_traced_first']} "
            f"| {row['num_traced_later']} of {row['num_later']:,} | {row['share_of_traced_later']:.1%} "
            f"| {row['evaluation_before_us']:,.0f} us | {row['evaluation_after_us']:,.0f} us "
            f"| {row['num_ops_traced_in_evaluations']} | {row['examined_ms']:,.0f} ms |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="What an incident that is not located costs.")
    parser.add_argument("--before", type=int, default=500, help="steps before the incident")
    parser.add_argument("--after", type=int, default=2000, help="steps after it")
    parser.add_argument("--smoke", action="store_true", help="few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("nanguard").setLevel(logging.ERROR)
    live.Trace = Counted  # type: ignore[attr-defined]
    before, after = (20, 60) if args.smoke else (args.before, args.after)
    has_gpu = torch.cuda.is_available()
    devices = ["cpu", "cuda"] if has_gpu else ["cpu"]
    facts = {
        "name": torch.cuda.get_device_name() if has_gpu else f"CPU {platform.machine()}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "method": METHOD,
        "burst": BURST,
        "share": SHARE,
        "rows": [row for device in devices for row in measure_all(device, before, after)],
    }
    text = as_markdown(facts)
    print(text)
    if not args.smoke:
        args.out.mkdir(parents=True, exist_ok=True)
        name = str(facts["name"]).lower().replace(" ", "-").replace("_", "-")
        path = args.out / f"unlocated-{name}-{facts['date']}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
