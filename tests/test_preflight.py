"""Preflight finds latent bugs before they happen, names their op and line, and is silent on sound programs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import nanguard
from nanguard.cli import app
from nanguard.preflight_checks.ranges import ranges_of, relations_of
from nanguard.preflight_checks.record import PreflightReport
from nanguard.preflight_checks.stresses import LegalBatches

Batch = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.head = nn.Linear(24, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def batches(num: int = 4) -> list[Batch]:
    """Inputs, labels of three classes, and a mask of padding."""
    drawn = torch.Generator().manual_seed(7)
    inputs = [torch.randn(12, 8, generator=drawn) for _ in range(num)]
    labels = [torch.randint(0, 3, (12,), generator=drawn) for _ in range(num)]
    lengths = [torch.randint(1, 4, (12, 1), generator=drawn) for _ in range(num)]
    masks = [torch.arange(3)[None] < length for length in lengths]
    return list(zip(inputs, labels, masks, strict=True))


def flown(
    loss_fn: Callable[[Any, Any], Tensor], data: list[Any] | None = None, precision: Any = "fp32", **options: Any
) -> PreflightReport:
    torch.manual_seed(0)
    model = Net()
    given = batches() if data is None else data
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    report = nanguard.preflight(
        model, loss_fn, given[0], optimizer, more_batches=given[1:], precision=precision, **options
    )
    assert not optimizer.state, "state that was made in a preflight is gone"
    return report


# ---- classic bugs, each with its sound form --------------------------------------------------------------------------


def log_of_sigmoid(model: Net, batch: Batch) -> Tensor:
    p, y = torch.sigmoid(model(batch[0])), F.one_hot(batch[1], 3)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # BUG


def with_logits(model: Net, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), F.one_hot(batch[1], 3).float())


def log_with_eps(model: Net, batch: Batch) -> Tensor:
    p, y = torch.sigmoid(model(batch[0])), F.one_hot(batch[1], 3)
    return -(y * torch.log(p + 1e-6) + (1 - y) * torch.log(1 - p + 1e-6)).mean()


def log_of_softmax(model: Net, batch: Batch) -> Tensor:
    p = torch.softmax(model(batch[0]), -1)
    return -torch.log(p).gather(1, batch[1][:, None]).mean()  # BUG


def log_softmax(model: Net, batch: Batch) -> Tensor:
    return -F.log_softmax(model(batch[0]), -1).gather(1, batch[1][:, None]).mean()


def exp_without_shift(model: Net, batch: Batch) -> Tensor:
    z = model(batch[0])
    e = torch.exp(z)  # BUG
    return -(z.gather(1, batch[1][:, None]) - torch.log(e.sum(-1, keepdim=True))).mean()  # BUG


def exp_with_shift(model: Net, batch: Batch) -> Tensor:
    z = model(batch[0])
    z = z - z.amax(-1, keepdim=True)
    return -(z.gather(1, batch[1][:, None]) - torch.log(torch.exp(z).sum(-1, keepdim=True))).mean()


def division_by_count(model: Net, batch: Batch) -> Tensor:
    right = batch[2][:, 1]
    return (model(batch[0]).square().mean(-1) * right).sum() / right.sum()  # BUG


def division_by_count_or_one(model: Net, batch: Batch) -> Tensor:
    right = batch[2][:, 1]
    return (model(batch[0]).square().mean(-1) * right).sum() / right.sum().clamp(min=1)


def root_at_zero(model: Net, batch: Batch) -> Tensor:
    h = model(batch[0])
    return torch.sqrt((h - h.roll(1, 0)).square().sum(-1)).mean()  # BUG


def root_with_eps(model: Net, batch: Batch) -> Tensor:
    h = model(batch[0])
    return torch.sqrt((h - h.roll(1, 0)).square().sum(-1) + 1e-8).mean()


def norm_at_zero(model: Net, batch: Batch) -> Tensor:
    x = batch[0]
    unit = x / x.norm(dim=-1, keepdim=True)  # BUG
    return F.cross_entropy(model(unit), batch[1])


def norm_with_eps(model: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(model(F.normalize(batch[0], dim=-1)), batch[1])


def masked_softmax(model: Net, batch: Batch) -> Tensor:
    scores = model(batch[0]).masked_fill(~batch[2], -math.inf)
    return (torch.softmax(scores, -1) * torch.arange(3)).sum(-1).mean()  # BUG


def masked_softmax_finite(model: Net, batch: Batch) -> Tensor:
    scores = model(batch[0]).masked_fill(~batch[2], torch.finfo(torch.float32).min)
    return (torch.softmax(scores, -1) * torch.arange(3)).sum(-1).mean()


def deviation_of_batch(model: Net, batch: Batch) -> Tensor:
    h = model(batch[0])
    return (h.std(0) - 1).square().mean() + h.square().mean()  # BUG


def deviation_with_eps(model: Net, batch: Batch) -> Tensor:
    h = model(batch[0])
    return ((h.var(0, unbiased=False) + 1e-4).sqrt() - 1).square().mean() + h.square().mean()


def angle(model: Net, batch: Batch) -> Tensor:
    cosine = F.cosine_similarity(model(batch[0]), model(batch[0].roll(1, 0)), dim=-1)
    return torch.acos(cosine).mean()  # BUG


def angle_clamped(model: Net, batch: Batch) -> Tensor:
    cosine = F.cosine_similarity(model(batch[0]), model(batch[0].roll(1, 0)), dim=-1)
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).mean()


CLASSIC = [
    (log_of_sigmoid, "log", "weights"),
    (log_of_softmax, "log", "weights"),
    (exp_without_shift, "exp", "weights"),
    (division_by_count, "div", "input"),
    (root_at_zero, "sqrt", "input"),
    (norm_at_zero, "div", "input"),
    (masked_softmax, "softmax", "input"),
    (deviation_of_batch, "std", "input"),
    (angle, "acos", "input"),
]
SOUND = [
    with_logits,
    log_with_eps,
    log_softmax,
    exp_with_shift,
    division_by_count_or_one,
    root_with_eps,
    norm_with_eps,
    masked_softmax_finite,
    deviation_with_eps,
    angle_clamped,
]


@pytest.mark.parametrize(("loss_fn", "op", "reach"), CLASSIC, ids=lambda value: getattr(value, "__name__", ""))
def test_a_latent_bug_is_found_with_its_op_and_line(loss_fn: Any, op: str, reach: str) -> None:
    finding, *others = flown(loss_fn).findings
    assert finding.severity == ("nearly" if reach == "weights" else "broke")
    assert finding.diagnosis.op == op
    assert finding.reach == reach
    assert finding.diagnosis.fix.words in str(finding)
    for each in (finding, *others):
        assert each.diagnosis.source is not None
        assert each.diagnosis.source.text.endswith("# BUG")


@pytest.mark.parametrize("loss_fn", SOUND, ids=lambda value: value.__name__)
def test_a_sound_program_is_silent(loss_fn: Any) -> None:
    report = flown(loss_fn)
    assert report.findings == (), str(report)
    assert report.status == 0
    assert report.refused == ()
    assert report.cut_short == ()


def test_ignored_labels_are_tried_only_if_the_data_have_some() -> None:
    def loss_fn(model: Net, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert flown(loss_fn).findings == ()
    some = [(x, y.masked_fill(torch.arange(12) < 3, -100), mask) for x, y, mask in batches()]
    (finding,) = flown(loss_fn, some).findings
    assert finding.diagnosis.cause == "all_labels_ignored"
    assert "-100" in finding.diagnosis.because


def test_what_only_a_loss_scale_overflows_is_no_finding_and_a_value_without_room_nearly_is() -> None:
    def near_the_end_of_fp16(model: Net, batch: Batch) -> Tensor:
        return (torch.tanh(model(batch[0]) * 20) * 200).square().float().mean() * 1e-4

    def mean(model: Net, batch: Batch) -> Tensor:
        return model(batch[0]).float().square().mean()

    scale = nanguard.LossScale(initial=2.0**40)
    assert flown(mean, precision="fp16", loss_scale=scale).findings == ()
    found = flown(near_the_end_of_fp16, precision="fp16", loss_scale=nanguard.LossScale(initial=1.0)).findings
    assert [(each.severity, each.diagnosis.op) for each in found] == [("nearly", "pow")]
    assert "65504" in str(found[0])


class Bag(nn.Module):
    """Divides an embedding by its length; a bag of nothing but padding has none."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 8, mode="sum", padding_idx=0), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        v = self.bag(ids)
        out: Tensor = self.out(v / v.norm(dim=-1, keepdim=True))  # BUG
        return out


def test_padding_that_the_data_do_not_show_is_known_from_the_embedding() -> None:
    torch.manual_seed(0)
    data = [(torch.randint(1, 20, (6, 4)), torch.randint(0, 3, (6,))) for _ in range(3)]
    report = nanguard.preflight(
        Bag(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), data[0], more_batches=data[1:]
    )
    (finding,) = report.findings
    assert finding.stress == "the first sample of batch[0] is 0"
    assert finding.diagnosis.cause == "division_by_near_zero_norm"


def test_a_weight_that_is_nan_already_is_found_though_no_batch_uses_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[13] = math.nan
    data = (torch.randint(0, 13, (6,)), torch.randint(0, 3, (6,)))
    found = nanguard.preflight(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), data).findings
    assert [(each.diagnosis.cause, each.diagnosis.module) for each in found] == [("parameter_corrupted", "0")]


class Unbounded(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


def test_an_optimizer_that_cannot_take_a_dead_layer_is_found() -> None:
    torch.manual_seed(0)
    model = Net()
    batch = batches()[0]
    finding = nanguard.preflight(model, log_softmax, batch, Unbounded(model.parameters())).findings[0]
    assert finding.diagnosis.phase == "optimizer"
    assert finding.diagnosis.source is not None
    assert "p.grad / p.grad.norm()" in finding.diagnosis.source.text


def test_a_learning_rate_with_little_room_is_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = [torch.randn(12, 8) for _ in range(3)]
    report = nanguard.preflight(
        model, lambda model, x: (model(x) - 1).pow(4).mean(), data[0], optimizer, more_batches=data[1:]
    )
    assert {finding.reach for finding in report.findings} & {"data", "settings"}
    assert optimizer.param_groups[0]["lr"] == 0.5


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def root(self, h: Tensor) -> Tensor:
        return torch.sqrt(torch.softmax(self.mid(h), -1))  # BUG

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(checkpoint(self.root, self.inp(x), use_reentrant=False))
        return out


def test_ops_inside_checkpointing_are_searched_too() -> None:
    torch.manual_seed(0)
    (finding,) = nanguard.preflight(Checkpointed(), log_softmax, batches()[0]).findings
    assert (finding.reach, finding.diagnosis.op) == ("weights", "sqrt")
    assert finding.diagnosis.source is not None
    assert finding.diagnosis.source.text.endswith("# BUG")


@pytest.mark.campaign
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_well_known_models_are_silent(name: str, precision: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tiny = {"vocab_size": 60, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    wide = {"intermediate_size": 32, "max_position_embeddings": 32}
    models = {
        "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**tiny, **wide)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, **wide)),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16
            )
        ),
    }
    lengths = [torch.randint(3, 13, (4, 1)) for _ in range(3)]
    masks = [(torch.arange(12)[None] < length).long() for length in lengths]
    data: list[Any] = [(torch.randint(1, 60, (4, 12)) * mask, mask, torch.randint(0, 2, (4,))) for mask in masks]
    if name == "vit":
        data = [(torch.randn(4, 3, 16, 16), None, torch.randint(0, 2, (4,))) for _ in masks]

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        ids, mask, label = batch
        if name == "vit":
            return model(pixel_values=ids, labels=label).loss
        return model(input_ids=ids, attention_mask=mask, labels=label if name == "bert" else ids).loss

    model = models[name]()
    report = nanguard.preflight(
        model,
        loss_fn,
        data[0],
        torch.optim.AdamW(model.parameters(), 3e-4),
        more_batches=data[1:],
        precision=precision,
        loss_scale=nanguard.LossScale(),
    )
    assert report.findings == (), str(report)


# ---- what is legal ---------------------------------------------------------------------------------------------------


def test_what_holds_in_all_data_is_kept_if_it_is_not_there_by_chance() -> None:
    drawn = torch.Generator().manual_seed(0)
    allowed = torch.rand(64, 5, generator=drawn) > 0.5
    action = torch.randint(0, 5, (64,), generator=drawn)
    allowed[torch.arange(64), action] = True
    lengths = torch.randint(2, 6, (64,), generator=drawn)
    data = [(allowed, action, torch.arange(5)[None] < lengths[:, None], lengths)]
    ranges = ranges_of(data)
    assert [each.kind for each in ranges.values()] == ["flag", "index", "flag", "length"]
    assert [(each.mask, each.index) for each in relations_of(data, ranges)] == [("batch[0]", "batch[1]")]
    made = {stress.words: stress.batch for stress in LegalBatches(data)}
    nothing_allowed = made["all of batch[0] is 0"][0]
    assert torch.equal(nothing_allowed, F.one_hot(action, 5).bool())
    assert not made["the first sample of batch[2] is 0"][2][0].any()
    assert made["the first sample of batch[3] is 1"][3][0] == 1
    assert torch.equal(data[0][0], allowed)


def test_times_that_rise_and_probabilities_stay_what_they_are() -> None:
    torch.manual_seed(0)
    data = [
        (torch.rand(6, 5).cumsum(-1), torch.softmax(torch.randn(6, 4), -1), F.normalize(torch.randn(6, 3), dim=-1))
        for _ in range(3)
    ]
    assert [each.rule for each in ranges_of(data).values()] == ["rises", "sums to 1", "has length 1"]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        times, chances, directions = batch
        speed = model(times[:, 1:]) / times.diff(dim=-1)
        entropy = -torch.xlogy(chances, chances).sum(-1)
        return speed.mean() + entropy.mean() + torch.rsqrt(directions.square().sum(-1)).mean()

    assert nanguard.preflight(nn.Linear(4, 4), loss_fn, data[0], more_batches=data[1:]).findings == ()


# ---- everything is put back ------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.drop, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(self.norm(self.inp(x))))
        return out


def test_everything_is_put_back() -> None:
    torch.manual_seed(1)
    model = Stateful()
    model.drop.eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = batches()

    def loss_fn(model: Stateful, batch: Batch) -> Tensor:
        random.random()
        batch[0].mul_(1.0 + 1e-3)
        return -torch.log(torch.softmax(model(batch[0]), -1)).gather(1, batch[1][:, None]).mean()

    for batch in data:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    before = state_of(model, optimizer, data)
    report = nanguard.preflight(model, loss_fn, data[0], optimizer, more_batches=data[1:], precision="bf16")
    after = state_of(model, optimizer, data)
    assert report.num_steps > 50
    assert report.findings
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> dict[str, Any]:
    """Copies of everything that a step could change."""
    found: dict[str, Any] = {f"model.{name}": t.clone() for name, t in model.state_dict().items()}
    found |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"training.{name}": module.training for name, module in model.named_modules()}
    for place, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{place}.{key}": value.clone() for key, value in state.items()}
    found["options"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    found |= {f"data.{i}.{j}": tensor.clone() for i, batch in enumerate(data) for j, tensor in enumerate(batch)}
    found |= {"torch": torch.get_rng_state(), "python": random.getstate()}
    return found


# ---- time, errors and the command ------------------------------------------------------------------------------------


def test_it_stops_when_the_time_is_over_and_says_what_was_cut_short() -> None:
    told: list[tuple[str, float]] = []
    report = flown(with_logits, minutes=1e-5, progress=lambda words, share: told.append((words, share)))
    assert "a search for weights" in report.cut_short
    assert "More minutes would help" in str(report)
    assert told[-1][1] == 1.0


def test_an_error_on_the_given_batch_is_the_users_to_see() -> None:
    def loss_fn(model: Net, batch: Batch) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        flown(loss_fn)
    with pytest.raises(ValueError, match="minutes must be above 0"):
        flown(with_logits, minutes=0)
    with pytest.raises(ValueError, match=r"needs a torch\.nn\.Module"):
        nanguard.preflight("model", with_logits, batches()[0])  # type: ignore[arg-type]


PROGRAM = """
import torch
from torch import nn

def loss_fn(model, batch):
    x, weights = batch
    return (model(x).square().mean(-1) * weights).sum() / weights.sum()

def build(seed):
    model = nn.Linear(4, 2)
    batches = [(torch.randn(6, 4), (torch.rand(6) > 0.4).float()) for _ in range(4)]
    return model, torch.optim.SGD(model.parameters(), 0.01), batches, loss_fn

def sound(seed):
    model, optimizer, batches, _ = build(seed)
    return model, optimizer, batches, lambda model, batch: model(batch[0]).square().mean()

def sure(seed):
    model, optimizer, batches, _ = build(seed)
    return model, optimizer, batches, lambda model, batch: -torch.log(torch.softmax(model(batch[0]) * 4, -1)).mean()

def only_a_model():
    return nn.Linear(4, 2)
"""


def test_the_command_saves_what_broke_and_it_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    run = CliRunner()
    cases = {
        "build": ("zero divided by zero, with an input in the range of the data", "div, program.py:7"),
        "sure": ("with weights that training can reach", "log, program.py:20"),
    }
    for name, (headline, again) in cases.items():
        done = run.invoke(app, ["preflight", f"program.py:{name}"])
        assert done.exit_code == 1, done.output
        assert headline in done.stdout
        command = next(line.split() for line in done.stdout.splitlines() if line.strip().startswith("nanguard replay"))
        replayed = run.invoke(app, command[1:])
        assert replayed.exit_code == 0, replayed.output
        assert replayed.stdout.startswith("reproduced: ")
        assert again in replayed.stdout.splitlines()[0]

    told = json.loads(run.invoke(app, ["preflight", "program.py:build", "--json", "--precision", "bf16"]).stdout)
    assert told["status"] == 1
    assert told["findings"][0]["diagnosis"]["op"] == "div"
    sound = run.invoke(app, ["preflight", "program.py:sound"])
    assert (sound.exit_code, "nothing found" in sound.stdout) == (0, True)
    wrong = run.invoke(app, ["preflight", "program.py:only_a_model", "--json"])
    assert wrong.exit_code == 2
    assert "returns no batches" in json.loads(wrong.stdout)["error"]
