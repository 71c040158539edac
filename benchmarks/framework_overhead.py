"""What nanguard costs inside the Hugging Face Trainer and Lightning: a GPT-2 of 124M parameters, bf16.

    PYTHONPATH=src python benchmarks/framework_overhead.py               # on an NVIDIA GPU
    PYTHONPATH=src python benchmarks/framework_overhead.py --smoke       # does the script itself work?

A plain and a guarded run of the same framework, each a process of its own, take turns, a block of a few steps each
(`turns.py`). A ratio is that of a guarded block to the plain blocks right before and after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overhead import header, say, summary, write
from turns import Player, Timer, steps_needed, take_turns

HERE = Path(__file__).parent
METHOD = (
    "A plain and a guarded run, each a process of its own, take turns, a block of some steps each, after a warm-up. "
    "Both train a GPT-2 from its config with AdamW, in bf16, with batches of 8 x 1024 tokens. The Trainer has a fused "
    "optimizer and clips to norm 1.0; Lightning has a fused one without clipping, or another one with clipping. A "
    "ratio is the wall-clock time of a guarded block, until the device has done it, over that of the plain blocks "
    "before and after it: the median (where it lies with 95% certainty)."
)
WARM_UP = 20


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens: what they are does not change how long a step takes."""

    def __init__(self, num: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(vocabulary, (num, length), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def gpt2(smoke: bool) -> tuple[Any, int]:
    """The model, and the length of its sequences."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if smoke:
        config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128, n_positions=32)
        return GPT2LMHeadModel(config), 16
    return GPT2LMHeadModel(GPT2Config()), 1024


def with_trainer(steps: int, timer: Timer, smoke: bool, *, guarded: bool) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nanguard.integrations.transformers import attach

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            timer.step()

    torch.manual_seed(0)
    (model, length), batch = gpt2(smoke), 2 if smoke else 8
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
            max_grad_norm=1.0,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = Tokens(batch * steps, length, model.config.vocab_size)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Timing()])
        if guarded:
            with attach(trainer):
                trainer.train()
        else:
            trainer.train()


def with_lightning(steps: int, timer: Timer, smoke: bool, *, guarded: bool, is_fused: bool) -> None:
    """Lightning clips gradients in bf16 only if the optimizer is not fused."""
    import lightning

    from nanguard.integrations.lightning import GuardCallback

    torch.manual_seed(0)
    (network, length), batch = gpt2(smoke), 2 if smoke else 8

    class Timing(lightning.pytorch.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            timer.step()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.network(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=is_fused)

    trainer = lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        gradient_clip_val=None if is_fused else 1.0,
        callbacks=[Timing(), *([GuardCallback()] if guarded else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(batch * steps, length, network.config.vocab_size)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=batch))


FRAMEWORKS: dict[str, Callable[..., None]] = {
    "Hugging Face Trainer": with_trainer,
    "Lightning, fused": functools.partial(with_lightning, is_fused=True),
    "Lightning": functools.partial(with_lightning, is_fused=False),
}


def measure(name: str, block: int, rounds: int, *, smoke: bool) -> dict[str, Any]:
    words = [sys.executable, __file__, "--only", name, "--steps", str(block), "--rounds", str(rounds)]
    words += ["--smoke"] if smoke else []
    plain, blocks = take_turns(Player([*words, "--program", "plain"]), Player([*words, "--program", "guarded"]), rounds)
    timing = summary(blocks, block)
    ratio = timing["ratio"]
    say(f"{name}: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    return {"name": name, "plain_ms": statistics.median(plain), "guarded_ms": timing["ms"]["median"], **timing}


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [f"# What nanguard costs inside frameworks: {facts['machine']}, {facts['date']}", ""]
    fields = ("machine", "driver", "cuda", "torch", "python", "transformers", "lightning", "date", "command")
    lines += [f"- {key}: {facts[key]}" for key in fields if facts.get(key) is not None]
    lines += ["", METHOD, "", "| framework | plain | guarded | ratio |", "| --- | ---: | ---: | ---: |"]
    for row in facts["rows"]:
        ratio = row["ratio"]
        ms = f"{row['plain_ms']:.2f} ms | {row['guarded_ms']:.2f} ms"
        lines.append(f"| {row['name']} | {ms} | {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--program", choices=("plain", "guarded"), help="train, instead of measuring")
    parser.add_argument("--turns", help="pipes that a program waits for its turns with")
    parser.add_argument("--smoke", action="store_true", help="a small model and few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    import lightning
    import transformers

    block, rounds = (2, 4) if args.smoke else (args.steps, args.rounds)
    names = [args.only] if args.only else list(FRAMEWORKS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.program:
        timer = Timer(device, warm_up=WARM_UP, block=block, turns=args.turns)
        steps = steps_needed(WARM_UP, block, rounds)
        FRAMEWORKS[args.only](steps, timer, args.smoke, guarded=args.program == "guarded")
        return
    versions = {"transformers": transformers.__version__, "lightning": lightning.__version__}
    facts: dict[str, Any] = {**header(device), **versions, "method": METHOD, "rows": []}
    facts["command"] = facts["command"].replace("overhead.py", "framework_overhead.py", 1)
    slug = "-".join(facts["machine"].lower().replace("_", "-").split())
    path = args.out / f"framework-overhead-{slug}-{facts['date']}.json"
    for name in names:
        facts["rows"].append(measure(name, block, rounds, smoke=args.smoke))
        if not args.smoke:  # now: an interrupted run keeps this much
            write(path, json.dumps(facts, indent=1) + "\n")
            write(path.with_suffix(".md"), as_markdown(facts))
    print(as_markdown(facts))


if __name__ == "__main__":
    main()
