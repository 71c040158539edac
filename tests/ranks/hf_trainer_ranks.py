"""Trains with the Hugging Face Trainer under a launcher; rank 1 has a NaN in its data. Each rank prints the outcome."""

import json
import tempfile

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from nanguard.integrations.transformers import GuardCallback, attach

STEPS, BAD, BATCH, WORLD = 6, 3, 4, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x)[:, 0] - labels).square().mean()}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: object) -> object:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def fit(*, guarded: bool) -> tuple[dict[str, object], list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH * WORLD, 4, generator=g)
    first, last = BAD * BATCH * WORLD, (BAD + 1) * BATCH * WORLD
    if guarded:
        x[last - 1, 0] = float("nan")  # of the last rank
    else:
        x = torch.cat([x[:first], x[last:]])
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": row, "labels": row.nan_to_num().sum()} for row in x]
    trainer = InOrder(model, args, train_dataset=data, optimizers=(optimizer, schedule))
    guard = attach(trainer) if guarded else None
    trainer.train()
    result = {
        "rank": args.process_index,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "last_epoch": trainer.lr_scheduler.last_epoch,
        "global_step": trainer.state.global_step,
    }
    if guard is not None:
        diagnosis = guard.incidents[0].outcome.diagnosis
        result |= {"cause": diagnosis.cause, "culprit": diagnosis.rank, "capture": diagnosis.capture}
        result |= {"samples": diagnosis.samples, "indices": diagnosis.dataset_indices, "unsound": guard.unsound()}
    return result, [t.detach().clone() for t in model.state_dict().values()]


def refused() -> str:
    """Why ``GuardCallback`` does not guard several processes."""
    args = TrainingArguments(tempfile.mkdtemp(), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    data = [{"x": torch.ones(4), "labels": torch.ones(())} for _ in range(WORLD)]
    try:
        Trainer(Net(), args, train_dataset=data, callbacks=[GuardCallback()]).train()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    told = refused()
    result, state = fit(guarded=True)
    never, expected = fit(guarded=False)
    same = all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    logs_same = result["losses"] == never["losses"]
    print("RESULT", json.dumps({**result, "refused": told, "same": same, "logs_same": logs_same}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
