"""Runs to report on: a real one, a long one, one of many incidents, and one in which every name is hostile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanguard
from nanguard.incidents.bundle import Bundles
from nanguard.records.diagnosis import Diagnosis, Fix, Link, Operand, Source, Stretch, Trial
from nanguard.records.plain import plain
from nanguard.records.steps import Action, Flags, Outcome, Reading, Verdict
from nanguard.state.rng import RngReader
from nanguard.step.pending import Microbatch, PendingStep


class Attention(nn.Module):
    """Scores that are too large for fp16 where the input is loud."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return scores.softmax(-1) @ self.value(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x)).mean(-2)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["sound"]), batch["label"])


def real_run(folder: Path, *, steps: int = 90, seed: int = 0, until: int = 44) -> nanguard.Guard:
    """A guarded run in fp16: loud batches 40 to ``until`` overflow the attention, batch 60 holds NaN."""
    torch.manual_seed(seed)
    batches = [{"sound": torch.randn(6, 4, 8), "label": torch.randint(0, 2, (6,))} for _ in range(steps)]
    for place in range(40, until):
        batches[place]["sound"][2] *= 900.0
    batches[60]["sound"][1, 0, 0] = math.nan
    model = Net()
    groups = [{"params": model.attention.parameters()}, {"params": model.out.parameters(), "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    guard = nanguard.Guard(
        model, optimizer, precision="fp16", loss_scale=nanguard.LossScale(initial=1.0), run_dir=folder
    )
    with guard:
        for batch in guard.epoch(batches):
            guard.step(loss_fn, batch)
    return guard


def header(**fields: Any) -> dict[str, Any]:
    ladder = [{"rung": "Skip", "times": 3, "per": 100, "when": "any"}, {"rung": "Halt"}]
    usual = {
        "schema": 2,
        "nanguard": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu",
        "precision": "fp16",
        "sync": "eager",
        "ranks": 1,
        "optimizers": ["AdamW"],
        "groups": ["all"],
        "policy": {"ladder": ladder, "divergence": None, "max_norm": 5.0},
        "parameters": 1234,
    }
    return {"event": "run", "time": 1000.0, **usual, **fields}


def step_line(step: int, **fields: Any) -> dict[str, Any]:
    loss = 2.0 / (1 + step / 500) + 0.1 * math.sin(step)
    usual = {
        "epoch": 1,
        "batch": step,
        "loss": loss,
        "norms": [1 + 0.5 * math.cos(step)],
        "lrs": [1e-3],
        "scale": 65536.0,
    }
    return {"event": "step", "time": 1000.0 + step / 100, "step": step, **usual, **fields}


def outcome(
    step: int, *, response: Any = "skip", rung: int = 0, diagnosis: Diagnosis | None = None, **fields: Any
) -> Outcome:
    reading = Reading(step=step, epoch=1, batch=step, loss=math.nan, norms=(math.nan,), found=("loss", "gradients"))
    action = Action(response=response, rung=rung, count=1, times=3, per=100, passed=fields.pop("passed", ()))
    verdict = Verdict(kind="nonfinite", reading=fields.pop("reading", reading))
    return Outcome(verdict=verdict, action=action, applied=False, diagnosis=diagnosis, **fields)


def incident_line(number: int, told: Outcome, event: str = "incident") -> dict[str, Any]:
    return {"event": event, "time": 1000.0 + told.verdict.reading.step / 100, "number": number, **told.as_dict()}


def write_log(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines)
    (folder / "run.jsonl").write_text(text, encoding="utf-8")
    return folder


def refused_run(folder: Path, *, steps: int = 400, good: int = 2) -> Path:
    """A run by hand that learns for a few steps, and refuses all the others: three of them answered by more."""
    lines = [header(), *(step_line(step, loss=1200.0 / (step + 1)) for step in range(good))]
    for number, step in enumerate(range(good, steps), start=1):
        response = {3: "raise_precision", 5: "lower_lr", 7: "raise_precision"}.get(number, "skip")
        told = outcome(step, response=response, diagnosis=hostile_diagnosis("layers.1", step))
        lines += [step_line(step, loss=math.nan, norms=[math.nan], skipped=True), incident_line(number, told)]
    counts = {"applied": good, "skipped": steps - good}
    return write_log(folder, *lines, {"event": "end", "time": 1000.0 + steps / 100, "steps": steps, "counts": counts})


def long_run(folder: Path, *, steps: int = 100_000, every: int = 9973) -> Path:
    """A long log by hand: a skip now and then, and one step with a loss of its own in the middle."""
    bad = {step: place for place, step in enumerate(range(every, steps, every), start=1)}
    lines = [header()]
    for step in range(steps):
        if step in bad:
            lines += [step_line(step, loss=math.nan, skipped=True), incident_line(bad[step], outcome(step))]
        else:
            lines.append(step_line(step, loss=7.25) if step == steps // 2 + 1 else step_line(step))
    counts = {"applied": steps - len(bad), "skipped": len(bad)}
    return write_log(folder, *lines, {"event": "end", "time": 1000.0 + steps / 100, "steps": steps, "counts": counts})


def hostile_diagnosis(text: str, step: int = 3) -> Diagnosis:
    source = Source(file=text, line=7, function=text, text=text)
    link = Link(op=text, phase=text, module=text, source=source, dtype=text, became=text)
    ends = {"low": -3.0, "high": 70000.0}
    return Diagnosis(
        phase="forward",
        cause="overflow_fp16",
        title=text,
        op=text,
        module=text,
        source=source,
        dtype=text,
        shape=(3, 4),
        because=text,
        evidence=(text,),
        operands=(Operand(name=text, dtype=text, shape=(3,), **ends),),
        element=(1, 2),
        samples=(1,),
        chain=(link, link),
        harmless=(link,),
        trail=tuple(
            Stretch(module=text, kind=text, op=text, dtype="float16", is_finite=fine, **ends) for fine in (True, False)
        ),
        tried=(Trial(what=text, result="finite"), Trial(what=text, result=None, detail=text)),
        fix=Fix(words=text, code=text, worked=True),
        step=step,
        device=text,
        notes=(text,),
    )


def hostile_run(folder: Path, text: str) -> Path:
    """A run in which everything that anybody can name is ``text``, and an incident on disk with it in its batch."""
    diagnosis = hostile_diagnosis(text)
    reading = Reading(
        step=3,
        epoch=1,
        batch=3,
        loss=math.nan,
        norms=(1.0,),
        found=("gradients", "buffers"),
        gradients=(text, text),
        buffers=(text,),
        ranks=(Flags(rank=1, loss=True, gradients=True, buffers=False),),
        dropped_gradients=(text,),
    )
    told = outcome(3, diagnosis=diagnosis, reading=reading, did=text, passed=(f"skip: {text}", text))
    window = PendingStep(3, 1, 3, True, 1)
    window.microbatches = [Microbatch(loss_fn, {text: torch.ones(2)}, RngReader(torch.device("cpu")).now(), True)]
    bundles = Bundles(folder, "batch", precision=text)
    path = bundles.keep(1, outcome=told, pending=window, history=(), model=nn.Linear(1, 1), kept_fp32=(text,))
    assert path is not None
    again = outcome(4, diagnosis=hostile_diagnosis(text, 4), did=text, bundle=text)
    rung = {"rung": text, text: text}
    about = {
        "device": text,
        "optimizers": [text],
        "groups": [text],
        "script": text,
        "argv": [text, text],
        "torch": text,
    }
    policy = {"ladder": [{"rung": "Skip"}, rung], "divergence": {text: text}, "max_norm": text}
    return write_log(
        folder,
        header(policy=policy, **about, precision=text, python=text, nanguard=text, sync=text),
        *(step_line(step, skipped=step in (3, 4)) for step in range(9)),
        incident_line(1, Outcome.from_dict({**told.as_dict(), "bundle": str(path)})),
        incident_line(2, again),
        incident_line(3, outcome(6, response="drop_gradients", did=text), "drop"),
        {"event": "alert", "time": 1000.2, "step": 5, "message": text, "module": text},
        {"event": "eased", "time": 1000.3, "step": 6, "what": text},
        {"event": text, "time": 1000.4, "step": 7, "what": text},
    )
