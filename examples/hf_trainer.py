"""Hugging Face Trainer: one line guards it. Four samples have no label, so the loss of their batch is NaN.

python examples/hf_trainer.py
"""

from __future__ import annotations

import logging
import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from nanguard.integrations.transformers import attach


def make_data() -> list[dict[str, Tensor]]:
    """Prompts and answers. The prompt is not learned: its labels are -100."""
    torch.manual_seed(0)
    data = []
    for place in range(160):
        tokens = torch.randint(1, 32, (16,)).sort().values
        length = 16 if 80 <= place < 84 else 6  # some prompts fill the whole window
        labels = tokens.clone()
        labels[:length] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return data


def main() -> None:
    logging.basicConfig(format="%(message)s")
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=make_data())
        with attach(trainer) as guard:
            trainer.train()
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    print(f"step {incident.reading.step}: {incident.diagnosis.cause}, samples {incident.diagnosis.samples}")
    print(f"applied={guard.counts['applied']}, skipped={guard.counts['skipped']}")
    print(f"global step {trainer.state.global_step}, schedule at {trainer.lr_scheduler.last_epoch}")


if __name__ == "__main__":
    main()
