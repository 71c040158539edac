"""Trains under ``accelerate launch``; the data of one rank have a NaN. Each rank prints what came of it."""

import json
import sys

import torch
from accelerate import Accelerator

from nanguard.integrations.accelerate import attach

STEPS, BAD = 6, 3


def fit(accelerator: Accelerator, steps: list[int], *, guarded: bool) -> tuple[dict[str, object], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    guard = attach(accelerator, model, optimizer, schedule) if guarded else None
    rank, skipped = accelerator.process_index, []
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        if guarded and step == BAD and rank == 1:
            x[2, 0] = float("nan")
        loss = model(x).square().mean()  # guilty
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        schedule.step()
        optimizer.zero_grad()
    result = {"rank": rank, "skipped": skipped, "rate": optimizer.param_groups[0]["lr"]}
    if guard is not None:
        diagnosis = guard.incidents[0].outcome.diagnosis
        result |= {"cause": diagnosis.cause, "culprit": diagnosis.rank, "unsound": guard.unsound()}
        guard.detach()
    state = [t.detach().clone() for t in accelerator.unwrap_model(model).state_dict().values()]
    accelerator.free_memory()
    return result, state


def main() -> None:
    accelerator = Accelerator(cpu=True)
    result, state = fit(accelerator, list(range(STEPS)), guarded=True)
    never, expected = fit(accelerator, [step for step in range(STEPS) if step != BAD], guarded=False)
    same = all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    print("RESULT", json.dumps({**result, "same": same, "same_rate": result["rate"] == never["rate"]}), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
