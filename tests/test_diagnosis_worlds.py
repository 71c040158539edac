"""Programs of many shapes, one fault each: the diagnosis names its op, its module and its line."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanguard
from cpu import NO_BF16_LSTM, has_bf16_lstm
from helpers import NAN, differences, everything, line, own_step, poisoned
from helpers import loss_fn as cross_entropy
from nanguard import Guard
from nanguard.diagnosis.authorship import line_that_makes_data
from nanguard.diagnosis.causes import titled
from nanguard.diagnosis.slicing import ProgramSource
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.panel import panel
from nanguard.records.steps import Action, Flags, Incident, Outcome, Reading, Verdict
from nanguard.records.summary import closing_line

LINES = Path(__file__).read_text().splitlines()


def samples() -> Tensor:
    """Positive numbers, but for one zero in sample 2."""
    x = torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    x[2, 0] = 0.0
    return x


def total(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).sum()


def diagnosed(model: nn.Module, loss_fn: Any = total, batch: Any = None, **options: Any) -> Diagnosis:
    options = {"depth": "brief", "precision": "fp32", **options}
    return nanguard.diagnose(model, loss_fn, samples() if batch is None else batch, **options)


def assert_says(diagnosis: Diagnosis | None, *, op: str, module: str, mark: str, phase: str = "forward") -> None:
    assert diagnosis is not None
    assert diagnosis.source is not None
    said = diagnosis.phase, diagnosis.op, diagnosis.module, Path(diagnosis.source.file).name, diagnosis.source.line
    assert said == (phase, op, module, Path(__file__).name, line(mark))
    assert diagnosis.cause != "unknown"


# ---- ways to write a model -----------------------------------------------------------------------------------------


class Applies(nn.Module):
    """A layer that does nothing, then a function of the input itself."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.function = function

    def through(self, x: Tensor) -> Tensor:
        return self.lin(x) * 0 + x

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.through(x))  # applies


class Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log()  # custom forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / x  # custom backward


def helper(x: Tensor) -> Tensor:
    return x.log()  # helper


class OverLines(Applies):
    def forward(self, x: Tensor) -> Tensor:
        h = self.through(x)
        return (
            h.exp()
            + h.sqrt()
            .log()  # over lines
            .mul(2)
            - 1
        )  # fmt: skip


class InPlace(Applies):
    def forward(self, x: Tensor) -> Tensor:
        h = self.through(x)
        h.log_()  # in place
        return h * 2


class ThroughAView(Applies):
    def forward(self, x: Tensor) -> Tensor:
        h = self.through(x)
        h.view(-1)[::2][6:9].log_()  # through a view
        return h.t().contiguous() * 2


class Halved(Applies):
    def forward(self, x: Tensor) -> Tensor:
        h = self.through(x * 1e6)
        return h.half().float()  # halved


class WithoutAutocast(Applies):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.through(x).log()  # without autocast


class WithoutGradient(Applies):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = x.log()  # without gradient
        return self.lin(x) * weights


class Checkpointed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *, reentrant: bool) -> None:
        super().__init__()
        self.pre, self.inner, self.reentrant = Applies(torch.relu), Applies(function), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.pre(x), use_reentrant=self.reentrant)


class UsedTwice(nn.Module):
    """The same module under two names; it is the second call that breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Applies(torch.log)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x + 1) * 0 + x)


class InContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Applies(torch.relu), Applies(torch.log)])
        self.ways = nn.ModuleDict({"up": Applies(torch.relu), "down": Applies(torch.sqrt)})

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.ways[way](x) if way else self.steps[1](self.steps[0](x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(self.table((x * 5).long()).mean(1))
        return (hidden * 0 + x).log()  # tied


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Applies(torch.log)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))


ON_ONE_LINE = lambda x: x.log()  # noqa: E731  # lambda
SQRT = {"op": "sqrt", "phase": "backward"}
LOG = {"op": "log"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Applies(Logarithm.apply), {**LOG, "module": "", "mark": "custom forward"}),
        (lambda: Applies(helper), {**LOG, "module": "", "mark": "helper"}),
        (lambda: Applies(ON_ONE_LINE), {**LOG, "module": "", "mark": "noqa: E731  # lambda"}),
        (lambda: OverLines(torch.relu), {**LOG, "module": "", "mark": "over lines"}),
        (lambda: InPlace(torch.relu), {**LOG, "module": "", "mark": "in place"}),
        (lambda: ThroughAView(torch.relu), {**LOG, "module": "", "mark": "through a view"}),
        (lambda: WithoutAutocast(torch.relu), {**LOG, "module": "", "mark": "without autocast"}),
        (lambda: WithoutGradient(torch.relu), {**LOG, "module": "", "mark": "without gradient"}),
        (lambda: Checkpointed(torch.log, reentrant=False), {**LOG, "module": "inner", "mark": "applies"}),
        (lambda: Checkpointed(torch.log, reentrant=True), {**LOG, "module": "inner", "mark": "applies"}),
        (lambda: Checkpointed(torch.sqrt, reentrant=False), {**SQRT, "module": "inner", "mark": "applies"}),
        (lambda: Checkpointed(torch.sqrt, reentrant=True), {**SQRT, "module": "inner", "mark": "applies"}),
        (UsedTwice, {**LOG, "module": "first", "mark": "applies"}),
        (Tied, {**LOG, "module": "", "mark": "tied"}),
        (Functional, {**LOG, "module": "inner", "mark": "applies"}),
    ],
)
def test_the_line_and_module_of_an_op(make: Callable[[], nn.Module], says: dict[str, str]) -> None:
    precision = "bf16" if says["mark"] == "without autocast" else "fp32"
    diagnosis = diagnosed(make(), precision=precision, depth="full")
    assert_says(diagnosis, **says)
    assert diagnosis.samples == (() if says["mark"] == "through a view" else (2,))
    assert diagnosis.cause == ("log_of_zero" if says["op"] == "log" else "sqrt_grad_at_zero")


def test_a_hand_written_backward() -> None:
    diagnosis = diagnosed(Applies(Twice.apply))
    assert_says(diagnosis, op="div", module="", mark="custom backward", phase="backward")
    assert diagnosis.cause == "custom_backward_bug"


def test_an_explicit_cast() -> None:
    diagnosis = diagnosed(Halved(torch.relu))
    assert_says(diagnosis, op="to_copy", module="", mark="halved")
    assert diagnosis.cause == "overflow_fp16"


@pytest.mark.parametrize("way", ["", "down"])
def test_modules_in_lists_and_dicts(way: str) -> None:
    diagnosis = diagnosed(InContainers(), lambda model, x: model(x, way).sum())
    where = {**SQRT, "module": "ways.down"} if way else {**LOG, "module": "steps.1"}
    assert_says(diagnosis, mark="applies", **where)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = (model.lin(x) * 0 + x).sqrt().sum()  # penalised
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return (slope * slope).sum()


def norm_of_slopes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model.lin(x).relu().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    lengths = slope.square().sum(1).sqrt()  # lengths
    return (lengths - 1).square().mean()


def test_double_backward() -> None:
    assert_says(diagnosed(Applies(torch.relu), penalty), **SQRT, module="", mark="penalised")
    model = Applies(torch.relu)
    nn.init.zeros_(model.lin.weight)
    nn.init.ones_(model.lin.bias)
    assert_says(diagnosed(model, norm_of_slopes), **SQRT, module="", mark="lengths")


def test_function_transforms() -> None:
    per_sample = diagnosed(Applies(torch.log), lambda model, x: torch.vmap(model)(x).sum())
    assert_says(per_sample, op="log", module="", mark="applies")

    def slopes(model: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x).sum()

    assert_says(diagnosed(Applies(torch.sqrt), slopes), **SQRT, module="", mark="applies")


def test_a_method_that_is_called_directly() -> None:
    diagnosis = diagnosed(Applies(torch.relu), lambda model, x: model.through(x).log().sum())  # method
    assert_says(diagnosis, op="log", module="", mark="method")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_replayed_as_written(backend: str) -> None:
    model = torch.compile(Checkpointed(torch.sqrt, reentrant=False), backend=backend)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    guard.step(total, samples() + 1)
    guard.step(total, samples())
    guard.step(total, samples() + 1)
    assert_says(guard.incidents[0].diagnosis, **SQRT, module="inner", mark="applies")
    assert guard.counts["applied"] == 2
    torch.compiler.reset()


def test_deterministic_algorithms_fill_memory_with_nan_and_nobody_is_blamed_for_it() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_says(diagnosed(Applies(torch.log)), op="log", module="", mark="applies")
    finally:
        torch.use_deterministic_algorithms(False)


# ---- torch's own layers --------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, padding = x[:, None].expand(-1, 3, -1), (x[:, :1] == 0).expand(-1, 3)
        out, _ = self.attention(x, x, x, key_padding_mask=padding)  # attends
        return out


class Recurs(nn.Module):
    def __init__(self, kind: Any, *, steps: int = 1, **options: Any) -> None:
        super().__init__()
        self.layer, self.steps = kind(6, 6, batch_first=True, **options), steps

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x[:, None].expand(-1, self.steps, -1))  # recurs
        return out


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.top = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for layer in self.layers:
            x = layer(x)  # encodes
        return self.top(x)  # encodes at the top


def test_attention_that_is_masked_entirely() -> None:
    diagnosis = diagnosed(Attends())
    assert_says(diagnosis, op="softmax", module="attention", mark="attends")
    assert diagnosis.cause == "masked_softmax_all_neg_inf"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: Any) -> None:
    model = Recurs(kind)
    bad = samples()
    bad[5, 3] = NAN
    diagnosis = diagnosed(model, batch=bad)
    assert (diagnosis.phase, diagnosis.module, diagnosis.samples) == ("data", "layer", (5,))
    assert diagnosis.because == "batch holds NaN at [5, 3]"
    model.layer.weight_ih_l0.register_hook(lambda gradient: gradient / 0)  # hook of a recurrent layer
    diagnosis = diagnosed(model)
    assert_says(diagnosis, op="div", module="", mark="hook of a recurrent layer", phase="backward")


def test_a_recurrent_layer_that_grows_without_bound() -> None:
    model = Recurs(nn.RNN, steps=30, nonlinearity="relu")
    nn.init.constant_(model.layer.weight_hh_l0, 100.0)
    diagnosis = diagnosed(model)
    assert diagnosis.cause == "overflow_any_precision"
    assert_says(diagnosis, op=diagnosis.op, module="layer", mark="recurs")


@pytest.mark.parametrize(("name", "mark"), [("layers.1", "encodes"), ("top.layers.0", "encodes at the top")])
def test_transformer_layers(name: str, mark: str) -> None:
    model = Encodes()
    for layer in ("linear1", "linear2"):
        nn.init.constant_(model.get_submodule(f"{name}.{layer}").weight, 3e4)
    diagnosis = diagnosed(model, precision="fp16", depth="full")
    assert diagnosis.cause == "overflow_fp16"
    assert_says(diagnosis, op=diagnosis.op, module=diagnosis.module, mark=mark)
    assert diagnosis.module.startswith(name)
    assert diagnosis.modules_to_keep
    assert all(kept.startswith(name) for kept in diagnosis.modules_to_keep)


# ---- data ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("make", "get", "name"),
    [
        (lambda good, bad: (good, bad), lambda b: b, "batch[1]"),
        (lambda good, bad: {"y": bad, "x": good}, lambda b: (b["x"], b["y"]), "batch['y']"),
        (Sample, lambda b: (b.x, b.y), "batch.y"),
        (Pair, lambda b: (b.x, b.y), "batch.y"),
        (lambda good, bad: {"a": [good, {"z": bad}]}, lambda b: (b["a"][0], b["a"][1]["z"]), "batch['a'][1]['z']"),
    ],
)
def test_bad_data_are_named(make: Any, get: Any, name: str) -> None:
    bad = samples()
    bad[5, 1] = bad[6, 2] = NAN

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = get(batch)
        return F.mse_loss(model(x), y)

    diagnosis = diagnosed(nn.Linear(6, 6), loss_fn, make(samples(), bad), depth="full")
    assert (diagnosis.phase, diagnosis.cause, diagnosis.samples) == ("data", "input_nonfinite", (5, 6))
    assert diagnosis.because == f"{name} holds NaN at [5, 1] and 1 more"
    assert {trial.what: trial.result for trial in diagnosis.tried} == {
        "samples 5, 6 alone": "non-finite",
        "the batch without samples 5, 6": "finite",
    }


@pytest.mark.parametrize("style", ["accumulate", "microbatches", "own loop"])
@pytest.mark.parametrize("sync", ["eager", "late"])
def test_the_microbatch_is_named(style: str, sync: str) -> None:
    model = Applies(torch.log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    accumulate = 1 if style == "microbatches" else 4
    guard = Guard(model, optimizer, precision="fp32", sync=sync, accumulate=accumulate)
    parts = [samples() if place == 2 else samples() + 1 for place in range(4)]
    if style == "microbatches":
        guard.step(total, microbatches=parts)
    for part in parts if style == "accumulate" else ():
        guard.step(total, part)
    for place, part in enumerate(parts if style == "own loop" else ()):
        with guard.autocast():
            loss = total(model, part)
        guard.backward(loss)
        if place == 3:
            guard.update()
    guard.settle()
    diagnosis = guard.incidents[0].diagnosis
    assert_says(diagnosis, op="log", module="", mark="applies")
    assert diagnosis is not None
    assert diagnosis.microbatch == 2
    assert diagnosis.capture == ("tape" if style == "own loop" else "step")


def test_calls_that_are_no_microbatches_are_not_counted_as_such() -> None:
    model = Applies(torch.log)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    with guard.autocast():
        loss = total(model, samples() + 1) + total(model, samples())
    guard.backward(loss)
    guard.update()
    diagnosis = guard.incidents[0].diagnosis
    assert_says(diagnosis, op="log", module="", mark="applies")
    assert diagnosis is not None
    assert diagnosis.microbatch is None


@pytest.mark.parametrize("diagnose", ["full", "off"])
def test_several_optimizers(diagnose: Any) -> None:
    """A GAN in one guard: the fault is in what the discriminator makes of the generator's output."""
    model = nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": Applies(torch.log)})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in model.values()]

    def loss_fn(model: nn.ModuleDict, x: Tensor) -> Tensor:
        return model["discriminator"](model["generator"](x) * 0 + x).sum()

    guard = Guard(model, optimizers, precision="fp32", diagnose=diagnose)
    guard.step(loss_fn, samples() + 1)
    before = everything(model, optimizers)
    guard.step(loss_fn, samples())
    assert differences(before, everything(model, optimizers)) == []
    if diagnose == "full":
        assert_says(guard.incidents[0].diagnosis, op="log", module="discriminator", mark="applies")


# ---- healthy programs ----------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """A minute GPT: causal attention with an additive mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.table(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x)).flatten(0, 1)


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.block, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(x + self.norm2(self.block(x)))
        return self.head(x.mean((2, 3)))


class Listens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def random_data(kind: str, number: int = 60) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    if kind == "Reads":
        tokens = torch.randint(20, (number, 4, 9), generator=g)
        return [(t[:, :-1], t[:, 1:].flatten()) for t in tokens]
    shape = (4, 3, 8, 8) if kind == "Sees" else (4, 6, 4)
    return [(torch.randn(shape, generator=g), torch.randint(20, (4,), generator=g)) for _ in range(number)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Reads, Sees, Listens])
def test_a_healthy_run_is_left_alone(kind: Any, precision: Any, caplog: pytest.LogCaptureFixture) -> None:
    if kind is Listens and precision == "bf16" and not has_bf16_lstm():
        pytest.skip(NO_BF16_LSTM)
    caplog.set_level("INFO", logger="nanguard")
    ends = []
    for style in ("plain", "step", "own loop"):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        guard = None if style == "plain" else Guard(model, optimizer, precision=precision, clip="global", max_norm=1.0)
        caplog.clear()
        for batch in random_data(kind.__name__):
            if style == "step":
                guard.step(cross_entropy, batch)
            elif style == "own loop":
                own_step(guard, batch)
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = cross_entropy(model, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if guard is not None:
            guard.settle()
            assert guard.incidents == ()
            assert guard.counts["applied"] == 60
            assert [message for message in caplog.messages if not message.startswith("snapshots of")] == []
        ends.append(everything(model, [optimizer]))
    assert differences(ends[0], ends[1]) == []
    assert differences(ends[0], ends[2]) == []


def test_a_bad_batch_is_no_more_than_skipped_in_a_world_of_meta_tensors() -> None:
    """Nothing of the guard's is made on the default device."""
    ends = []
    for device in (None, "meta"):
        torch.manual_seed(0)
        model = Sees()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        data = random_data("Sees", 12)
        images = poisoned([(x.flatten(1), y) for x, y in data], 4)
        data = [(x.view(4, 3, 8, 8), y) for x, y in images]
        guard = Guard(model, optimizer, precision="bf16", diagnose="full")
        torch.set_default_device(device)
        try:
            for number, batch in enumerate(guard.epoch(data)):
                if number == 8:
                    own_step(guard, (batch[0] * NAN, batch[1]))
                guard.step(cross_entropy, batch)
        finally:
            torch.set_default_device(None)
        assert [i.diagnosis.cause for i in guard.incidents if i.diagnosis] == ["input_nonfinite"] * 2
        assert next(i.diagnosis.samples for i in guard.incidents if i.diagnosis) == (0,)
        ends.append(everything(model, [optimizer]))
    assert differences(ends[0], ends[1]) == []


# ---- what an examination must not do, or say -----------------------------------------------------------------------


@pytest.mark.parametrize("diagnose", ["off", "full"])
def test_a_generator_of_the_programs_own_goes_on_as_if_nobody_had_looked(diagnose: Any) -> None:
    generator, model = torch.Generator().manual_seed(0), nn.Linear(6, 1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x + torch.rand(x.shape, generator=generator)).mean()

    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="eager", diagnose=diagnose)
    for x in (torch.rand(8, 6), torch.full((8, 6), NAN), torch.rand(8, 6)):
        guard.step(loss_fn, x)
    plain = torch.Generator().manual_seed(0)
    for _ in range(3):
        torch.rand(8, 6, generator=plain)
    assert torch.equal(generator.get_state(), plain.get_state())


def test_an_exit_during_the_examination_waits_until_the_step_is_counted() -> None:
    calls, model = [], nn.Linear(6, 1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            raise SystemExit(3)
        return model(x).mean()

    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="eager")
    with pytest.raises(SystemExit):
        guard.step(loss_fn, torch.full((8, 6), NAN))
    assert guard.counts["skipped"] == len(guard.incidents) == 1


PROGRAM = """
import torch
from torch import nn
import nanguard

class Stop:
    def __init__(self):
        self.best = float("inf")

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.lin(x)
        scores[:, 0] = {literal}
        return scores.softmax(-1)

def said(x):
    return nanguard.diagnose(Masked(), lambda model, batch: model(batch).mean(), x, precision="fp32")
"""


@pytest.mark.parametrize("literal", ['float("-inf")', "float('nan') if False else 0.0"])
def test_a_literal_that_fills_a_mask_or_a_record_did_not_make_the_data(literal: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(literal=literal))
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(file.read_text(), str(file), "exec"), space)
    for value in (NAN, float("inf")):
        x = torch.rand(8, 4)
        x[2, 1] = value
        source = space["said"](x).source
        assert source is None or "scores = self.lin(x)" in source.text


def test_a_factor_that_spoils_every_sample_is_blamed_on_none() -> None:
    batch = torch.rand(8, 6) + 1, torch.tensor(0.0)
    diagnosis = diagnosed(nn.Linear(6, 1), lambda m, b: m(b[0]).mean() * b[1].log(), batch, depth="full")
    assert (diagnosis.op, diagnosis.samples) == ("log", ())


def test_an_infinite_weight_in_the_batch_is_no_mask() -> None:
    weights = torch.tensor([0.0, 0.0, float("inf"), 0.0])
    diagnosis = diagnosed(nn.Linear(6, 1), lambda m, b: (m(b[0])[:, 0] * b[1]).mean(), (torch.rand(4, 6), weights))
    assert (diagnosis.cause, diagnosis.because) == ("input_nonfinite", "batch[1] holds Inf at [2]")


def test_what_another_thread_has_made_is_not_said_with_certainty() -> None:
    with ThreadPoolExecutor(1) as pool:
        diagnosis = diagnosed(nn.Linear(6, 1), lambda m, x: (m(x) * pool.submit(torch.log, x).result()).mean())
    assert diagnosis.confidence == "guess"
    assert "seen" in diagnosis.because


class GivesOutItsScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.lin(x), self.scale


def test_a_parameter_that_the_model_gives_out_collects_no_hooks() -> None:
    model = GivesOutItsScale()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        with guard.autocast():
            y, scale = model(torch.rand(8, 6))
            loss = (y * scale).mean()
        guard.backward(loss)
        guard.update()
    assert not model.scale._backward_hooks


class Chatty(nn.Module):
    """Some of its calls give nothing that a gradient could reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, quiet: bool = False) -> Tensor | None:
        return None if quiet else torch.log(self.inp(x).relu().sum(-1))


def test_calls_that_give_nothing_do_not_hide_the_one_that_does() -> None:
    model = Chatty()
    with torch.no_grad():
        model.inp.weight.abs_()
    guard = nanguard.Guard(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    for place in range(5):
        x = torch.rand(3, 4) + 0.1
        x[1] = -1.0 if place == 3 else 1.0
        with guard.autocast():
            model(x, quiet=True)
            loss = model(x).mean()
            model(x, quiet=True)
        guard.backward(loss)
        guard.update()
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is not None
    assert (diagnosis.capture, diagnosis.cause, diagnosis.op) == ("tape", "log_of_zero", "log")


class Trap(nn.Module):
    """An infinity that the forward pass drops: what is computed again in backward brings it back."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inp, self.use_reentrant = nn.Linear(1, 1, bias=False), use_reentrant

    def bent(self, h: Tensor) -> Tensor:
        return torch.where(h <= 0, torch.exp(h), 1 + h)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.bent, self.inp(x), use_reentrant=self.use_reentrant)
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_computes_again_is_still_the_forward_pass(use_reentrant: bool) -> None:
    model = Trap(use_reentrant)
    with torch.no_grad():
        model.inp.weight.fill_(1.0)
    x = torch.tensor([[0.5], [200.0], [-0.5]])
    diagnosis = nanguard.diagnose(model, lambda model, x: model(x).mean(), x, precision="fp32")
    assert diagnosis.source is not None
    assert (diagnosis.phase, diagnosis.cause, diagnosis.op) == ("backward", "zero_times_inf", "exp")
    assert "torch.where(h <= 0, torch.exp(h), 1 + h)" in diagnosis.source.text


class OnlyOnce(nn.Module):
    """Fails when a batch comes again, as a kernel that is not there for the precision or shape of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        if id(x) in self.seen:
            raise RuntimeError("could not create a primitive descriptor for the forward propagation primitive")
        self.seen.add(id(x))
        return self.head(x)


@pytest.mark.parametrize("diagnose", ["auto", "full"])
@pytest.mark.parametrize("style", ["step", "own loop", "install"])
def test_a_step_that_cannot_be_run_again_does_not_end_the_run(style: str, diagnose: Any) -> None:
    torch.manual_seed(0)
    model = OnlyOnce()
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(8)]
    batches[3][0][0, 0] = NAN
    if style == "install":
        with nanguard.install(diagnose=diagnose) as autopilot:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for batch in batches:
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
        counts = autopilot.counts
    else:
        guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.1), diagnose=diagnose, precision="fp32")
        for batch in batches:
            guard.step(cross_entropy, batch) if style == "step" else own_step(guard, batch)
        counts = guard.counts
    assert (counts["applied"], counts["skipped"]) == (7, 1)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# ---- programs that are not changed -----------------------------------------------------------------------------------


class TrainsItsParts(nn.Module):
    """Called as a whole to validate, and in parts to train."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_a_module_that_is_called_to_validate_does_not_hide_the_calls_that_train() -> None:
    model = TrainsItsParts()
    with nanguard.install() as autopilot:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for place in range(4):
            with torch.no_grad():
                model(torch.ones(2, 6))
            x = torch.rand(4, 6)
            if place == 2:
                x[1, 3] = NAN
            model.body(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = autopilot.incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.module) == ("input_nonfinite", "body")
    assert incident.diagnosis.source is not None
    assert incident.diagnosis.source.text == "x[1, 3] = NAN"


def test_the_rank_with_a_bad_loss_is_named_on_the_others() -> None:
    flags = (Flags(rank=1, loss=True, gradients=False, buffers=False),)
    reading = Reading(step=3, epoch=0, batch=None, loss=0.5, found=("loss",), ranks=flags)
    verdict = Verdict(kind="nonfinite", reading=reading)
    outcome = Outcome(verdict=verdict, action=Action(response="skip"), applied=False)
    assert "found     loss of rank 1\n" in panel(Incident(number=1, outcome=outcome))


def test_a_later_diagnosis_that_is_better_takes_the_place_in_the_last_line() -> None:
    def incident(number: int, **fields: Any) -> Incident:
        reading = Reading(step=number, epoch=0, batch=None, loss=NAN, found=("loss",))
        diagnosis = titled(Diagnosis(phase="forward", **fields))
        outcome = Outcome(
            verdict=Verdict(kind="nonfinite", reading=reading),
            action=Action(response="skip"),
            applied=False,
            diagnosis=diagnosis,
        )
        return Incident(number=number, outcome=outcome)

    guessed = incident(1, cause="exp_overflow", op="exp", capture="graph", confidence="likely")
    unknown = incident(2, cause="unknown", capture="module")
    found = incident(3, cause="input_nonfinite", op="mse_loss", capture="live", confidence="certain")
    line = partial(closing_line, {"applied": 9, "skipped": 3}, unsound=(), refused_in_a_row=0)
    assert line([guessed, unknown]).endswith("; first known at step 1: overflow of an exponential (exp)")
    assert line([guessed, unknown, found]).endswith("; first known at step 3: non-finite data (mse_loss)")


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Critic(Actor):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sub(1e3).log()  # the critic


def test_of_several_networks_the_right_one_is_named() -> None:
    actor, critic, nans = Actor(), Critic(), torch.full((2, 6), NAN)
    with nanguard.install() as autopilot:
        acts = torch.optim.SGD(actor.parameters(), lr=1e-3)
        criticises = torch.optim.SGD(critic.parameters(), lr=1e-3)
        for net, optimizer, value in ((actor, acts, nans), (critic, criticises, torch.ones(2, 6))):
            net(value).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        critic(actor(torch.ones(2, 6))).mean().backward()
        acts.step()
    data, own, other = (incident.diagnosis for incident in autopilot.incidents)
    assert data is not None
    assert own is not None
    assert other is not None
    assert (data.network, data.module, data.cause) == ("actor, trained by acts", "actor.layer", "input_nonfinite")
    assert (own.network, own.module, own.cause) == ("critic, trained by criticises", "critic", "log_of_negative")
    assert (other.network, other.module, other.cause) == ("actor, trained by acts", "critic", "log_of_negative")
    assert "network   critic, trained by criticises" in str(own)


TWO_CLASSES = """
class Encoder:
    def loss(self, x):
        return x.log()

    def train(self, x):
        loss = self.loss(x)
        loss.backward()

class Decoder(Base):
    def loss(self, x):
        return (x + 1).log()

class Other(Decoder):
    def train(self, x):
        self.loss(x).sum().backward()
"""


def test_a_method_is_looked_for_in_its_own_class_and_its_bases(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(TWO_CLASSES)
    program = ProgramSource((str(file),))
    assert [source.line for source in program.lines_behind(str(file), 8, "log")] == [4]
    assert [source.line for source in program.lines_behind(str(file), 16, "log")] == [12]


@pytest.mark.parametrize(
    ("text", "is_risky"),
    [
        ("data = torch.load(folder / name / f'{step}.pt')", False),
        ("data = torch.load(Path(root) / name)", False),
        ("data = torch.load(folder / 'a.pt') / total", True),
        ("data = values / total", True),
    ],
)
def test_the_path_of_a_file_is_no_division_of_numbers(tmp_path: Path, text: str, is_risky: bool) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"def load(self):\n    {text}\n")
    line = line_that_makes_data(["data"], None, 0, [str(file)])
    assert (line is not None) == is_risky


@pytest.mark.parametrize(
    ("text", "line_number"),
    [
        ("    data = table[int(total / count):]\n", None),
        ("    start = int(total / count)\n    data = table[start:].copy()\n", None),
        ("    start = total / count\n    data = table * start\n", 2),
    ],
)
def test_an_index_makes_no_data_non_finite(tmp_path: Path, text: str, line_number: int | None) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"def load(table, total, count):\n{text}    return data\n")
    line = line_that_makes_data(["data"], None, 0, [str(file)])
    assert (None if line is None else line.line) == line_number
