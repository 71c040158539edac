"""What nanguard costs inside the Hugging Face Trainer and Lightning: a GPT-2 of 124M parameters, bf16.

    PYTHONPATH=src python benchmarks/framework_overhead.py               # on an NVIDIA GPU
    PYTHONPATH=src python benchmarks/framework_overhead.py --smoke       # does the script itself work?

Each framework trains the same model in turns, plain and guarded, in one process. A run of some steps is timed after a
warm-up, on the device's clock. A ratio is that of a guarded run to the plain runs right before and after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overhead import header, say, write

HERE = Path(__file__).parent
METHOD = (
    "Plain and guarded runs of the framework alternate in one process. Each trains a new GPT-2 from its config with "
    "AdamW (fused in the Trainer), clipping to norm 1.0, bf16, batches of 8 x 1024 tokens. The steps after the warm-up "
    "are timed. A ratio is that of a guarded run to the mean of the plain runs before and after it: the median over "
    "rounds (smallest to largest)."
)


class Stopwatch:
    """Called after each step: the mean time of the steps after the warm-up, in milliseconds."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up, self._num_steps = warm_up, 0
        self._began = self._last = 0.0

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps == self._warm_up:
            self._began = _now()

    def ms(self) -> float:
        return 1e3 * (_now() - self._began) / (self._num_steps - self._warm_up)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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


def with_trainer(steps: int, warm_up: int, smoke: bool, *, guarded: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nanguard.integrations.transformers import attach

    watch = Stopwatch(warm_up)

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

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
    return watch.ms()


def with_lightning(steps: int, warm_up: int, smoke: bool, *, guarded: bool) -> float:
    import lightning

    from nanguard.integrations.lightning import GuardCallback

    watch = Stopwatch(warm_up)
    torch.manual_seed(0)
    (network, length), batch = gpt2(smoke), 2 if smoke else 8

    class Timing(lightning.pytorch.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.network(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[Timing(), *([GuardCallback()] if guarded else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(batch * steps, length, network.config.vocab_size)
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=batch))
    return watch.ms()


FRAMEWORKS: dict[str, Callable[..., float]] = {"Hugging Face Trainer": with_trainer, "Lightning": with_lightning}


def measure(name: str, rounds: int, steps: int, warm_up: int, smoke: bool) -> dict[str, Any]:
    train = FRAMEWORKS[name]
    plain, guarded = [train(steps, warm_up, smoke, guarded=False)], []
    for _ in range(rounds):
        guarded.append(train(steps, warm_up, smoke, guarded=True))
        plain.append(train(steps, warm_up, smoke, guarded=False))
    ratios = [2 * g / (before + after) for g, before, after in zip(guarded, plain[:-1], plain[1:], strict=True)]
    say(f"{name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    ms = {"plain_ms": statistics.median(plain), "guarded_ms": statistics.median(guarded)}
    return {"name": name, "ratio": statistics.median(ratios), "ratios": ratios, **ms}


def as_markdown(facts: dict[str, Any]) -> str:
    lines = [f"# What nanguard costs inside frameworks: {facts['machine']}, {facts['date']}", ""]
    fields = ("machine", "driver", "cuda", "torch", "python", "transformers", "lightning", "date", "command")
    lines += [f"- {key}: {facts[key]}" for key in fields if facts.get(key) is not None]
    lines += ["", METHOD, "", "| framework | plain | guarded | ratio |", "| --- | ---: | ---: | ---: |"]
    for row in facts["rows"]:
        spread = f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}"
        ms = f"{row['plain_ms']:.2f} ms | {row['guarded_ms']:.2f} ms"
        lines.append(f"| {row['name']} | {ms} | {row['ratio']:.3f} ({spread}) |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--smoke", action="store_true", help="a small model and few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    import lightning
    import transformers

    steps, rounds = (12, 1) if args.smoke else (args.steps, args.rounds)
    names = [args.only] if args.only else list(FRAMEWORKS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(name, rounds, steps, 4 if args.smoke else 20, args.smoke) for name in names]
    versions = {"transformers": transformers.__version__, "lightning": lightning.__version__}
    facts = {**header(device), **versions, "method": METHOD, "rows": rows}
    facts["command"] = facts["command"].replace("overhead.py", "framework_overhead.py", 1)
    text = as_markdown(facts)
    print(text)
    if not args.smoke:
        slug = "-".join(facts["machine"].lower().replace("_", "-").split())
        path = args.out / f"framework-overhead-{slug}-{facts['date']}.json"
        write(path, json.dumps(facts, indent=1) + "\n")
        write(path.with_suffix(".md"), text)


if __name__ == "__main__":
    main()
