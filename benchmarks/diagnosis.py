"""What a diagnosis costs, in time and memory, against one plain step of the same model.

    PYTHONPATH=src python benchmarks/diagnosis.py                        # a GPT of 124M parameters, on a GPU
    PYTHONPATH=src python benchmarks/diagnosis.py --device cpu --smoke   # does the script itself work?

A GPT trains under the guard; then comes a batch that breaks it, twice: the first incident of a kind is examined fully,
experiments included, the second briefly. Two faults: one sample whose temperature is 0 (x / 0 in the loss, bf16: no
precision helps) and one layer whose weights have outgrown fp16 (the fewest modules that help are looked for). The time
is that of the whole guarded step that fails, the memory the peak of it, both over those of a plain step.
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
from typing import Any, Literal

import torch
from torch import Tensor, nn

import nanguard
from models import SMOKE_WORKLOADS, WORKLOADS, Workload

METHOD = (
    "Time of the guarded step that fails over the median of a plain step; peak memory of it over that of a plain step. "
    "Fused AdamW, no clipping, no snapshots. A full diagnosis includes all experiments, a brief one none."
)


def loss_with_temperature(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, targets, temperature = batch
    losses: Tensor = model(tokens, targets) / temperature
    return losses.mean()


def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(batch[0], batch[1])
    return loss


def measure(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds, and the peak of memory in GiB."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return time.perf_counter() - began, peak


def examine(workload: Workload, device: torch.device, fault: str) -> dict[str, Any]:
    model = workload.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    precision: Literal["bf16", "fp16"] = "bf16" if fault == "temperature" else "fp16"
    guard = nanguard.Guard(
        model, optimizer, precision=precision, loss_scale=None, max_norm=None, snapshots=None, sync="eager"
    )
    loss_fn = loss_with_temperature if fault == "temperature" else plain_loss
    ones = torch.ones(workload.batch_size, device=device)
    good = [(*batch, ones) for batch in workload.batches(device, num=8)]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def plain() -> None:
        with torch.autocast(device.type, dtype=dtype):
            loss = loss_fn(model, good[0])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def guarded(batch: Any) -> Callable[[], Any]:
        return lambda: guard.step(loss_fn, batch)

    for _ in range(3):
        plain()
    steps = [measure(plain, device) for _ in range(12)]
    for batch in good[:3]:
        guard.step(loss_fn, batch)
    step, peak = statistics.median(s for s, _ in steps), max(p for _, p in steps)
    bad = good[4]
    if fault == "temperature":
        bad = (bad[0], bad[1], ones.clone())
        bad[2][workload.batch_size // 2] = 0.0
    else:
        middle: Any = model.blocks[len(model.blocks) // 2]
        with torch.no_grad():
            middle.mlp.expand.weight.mul_(3e3)
            middle.mlp.project.weight.mul_(3e3)
    results: dict[str, Any] = {"fault": fault, "precision": precision, "step_ms": step * 1e3, "step_peak_gib": peak}
    for depth in ("full", "brief"):
        seconds, memory = measure(guarded(bad), device)
        diagnosis = guard.incidents[-1].diagnosis
        assert diagnosis is not None
        assert diagnosis.depth == depth, diagnosis.depth
        results[depth] = {
            "steps": seconds / step,
            "memory": memory / peak if peak else None,
            "replays": diagnosis.num_replays,
            "cause": diagnosis.cause,
            "op": diagnosis.op,
            "module": diagnosis.module,
            "line": str(diagnosis.source),
            "keep": diagnosis.modules_to_keep,
            "samples": diagnosis.samples,
            "tried": [f"{trial.what}: {trial.result or trial.detail}" for trial in diagnosis.tried],
        }
    return results


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"# Cost of a diagnosis: {facts['device']}, {facts['date']}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}, {facts['workload']}. {METHOD}",
        "",
        "| fault | depth | time, in plain steps | peak memory, of a plain step's | replays | said |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in facts["faults"]:
        for depth in ("full", "brief"):
            each = row[depth]
            memory = "" if each["memory"] is None else f"{each['memory']:.2f}"
            said = f"{each['cause']}, {each['op']}, {each['module'] or 'outside any module'}"
            kind = f"{row['fault']} ({row['precision']})"
            lines.append(f"| {kind} | {depth} | {each['steps']:.1f} | {memory} | {each['replays']} | {said} |")
    plain = ", ".join(f"{r['precision']} {r['step_ms']:.1f} ms, {r['step_peak_gib']:.1f} GiB" for r in facts["faults"])
    return "\n".join([*lines, "", f"A plain step: {plain}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="What a diagnosis costs against one plain step.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a minute model, to try the script itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    logging.getLogger("nanguard").setLevel(logging.CRITICAL)
    device = torch.device(args.device)
    workload = (SMOKE_WORKLOADS if args.smoke else WORKLOADS)["large"]
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    facts = {
        "device": name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "workload": str(workload),
        "method": METHOD,
        "faults": [examine(workload, device, fault) for fault in ("temperature", "overflow")],
    }
    text = as_markdown(facts)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"diagnosis-{name.lower().replace(' ', '-').replace('_', '-')}-{facts['date']}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
