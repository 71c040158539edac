"""What a program under ``install`` is told of a fault the first time: names, causes and advice."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from helpers import NAN, line
from nanguard.records.diagnosis import Diagnosis

INF = float("inf")
SYNCS = pytest.mark.parametrize("sync", ["late", "eager"])


def first(incidents: Any) -> Diagnosis:
    found = incidents[0].diagnosis
    assert isinstance(found, Diagnosis)
    return found


def batches() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    return DataLoader(data, batch_size=8, shuffle=False)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


# ---- tensors that are neither trained nor data -----------------------------------------------------------------------


@SYNCS
def test_weights_of_classes_are_no_data(sync: Any) -> None:
    """The only sample that is named is the one of the class."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0, INF]))
        for x, y in batches():
            y[5] = 3
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.phase) == ("nonfinite_constant", "buffer")
    assert found.because == "buffer weight of CrossEntropyLoss, which is not trained, held Inf at [3] before the step"
    assert found.samples in ((), (5,))


WEIGHTED = """
import torch
from torch import nn
counts = torch.tensor([3.0, 5.0, 8.0, 0.0])
weight = counts.sum() / counts
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
criterion(model(torch.rand(6, 4)), torch.arange(6) % 3).backward()
optimizer.step()
"""

SCHEDULED = """
import math
import torch
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = math.inf if step == 1 else 0.1
    optimizer.zero_grad()
    model(torch.rand(6, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("text", "number"), [(WEIGHTED, 5), (SCHEDULED, 9)])
def test_the_line_that_sets_a_number_that_is_not_finite_is_found(text: str, number: int, tmp_path: Path) -> None:
    """The weight of a class that has no sample, and a learning rate."""
    script = tmp_path / "train.py"
    script.write_text(text)
    with nanguard.install() as autopilot:
        exec(compile(text, str(script), "exec"), {"__name__": "__main__"})
    found = first(autopilot.incidents)
    assert (found.cause, found.is_line_traced) == ("nonfinite_constant", False)
    assert found.source is not None
    assert found.source.line == number


@SYNCS
@pytest.mark.parametrize(
    ("name", "cause"),
    [("body.1.running_var", "buffer_corrupted"), ("body.0.weight", "parameter_corrupted")],
)
def test_a_network_that_is_not_trained_has_its_names(sync: Any, name: str, cause: str) -> None:
    with nanguard.install(sync=sync) as autopilot:
        frozen, head = Frozen().eval(), nn.Linear(4, 3)
        frozen.state_dict()[name][2] = NAN
        optimizer = SGD(head.parameters(), lr=0.1, fused=True)
        for x, y in batches():
            with torch.no_grad():
                features = frozen(x)
            optimizer.zero_grad()
            F.cross_entropy(head(features), y).backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.module) == (cause, name.rpartition(".")[0])
    assert f"{name} of Frozen, which is not trained, held NaN at [2" in found.because, "not as a view of it has them"
    assert not found.samples


@SYNCS
def test_a_network_of_another_optimizer_is_trained(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        body, head = nn.Linear(4, 4), nn.Linear(4, 3)
        with torch.no_grad():
            head.weight[2] = NAN
        optimizers = [SGD(each.parameters(), lr=0.1, fused=True) for each in (body, head)]
        for x, y in batches():
            F.cross_entropy(F.linear(body(x), head.weight), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    told = [incident.diagnosis for incident in autopilot.incidents[:2] if incident.diagnosis is not None]
    assert told
    assert not any("not trained" in found.because or "TrainedModules" in found.because for found in told)


@SYNCS
def test_data_have_the_name_of_their_place_in_a_call(sync: Any) -> None:
    """Of a list its entry, of a keyword the keyword, and of a call over several lines the same."""
    told = []
    for kind in ("list", "keyword", "lines"):
        with nanguard.install(sync=sync) as autopilot:
            model = nn.Linear(4, 3)
            optimizer = SGD(model.parameters(), lr=0.1, fused=True)
            for x, y in batches():
                views, weights, norm = [x, x + 1], torch.ones(3), torch.tensor(8.0)
                if kind == "list":
                    views = [x.clone(), torch.full_like(x, NAN)]
                elif kind == "keyword":
                    weights = torch.tensor(numbers := [1.0, 1.0, NAN])
                    assert numbers
                else:
                    norm = torch.tensor(NAN)
                given = [views[0].data.numpy(), views[1].data.numpy(), weights.numpy(), norm.numpy()]
                one, two, weights, norm = map(torch.from_numpy, given)  # tensors that no call is seen to make
                out = model(torch.cat([one, two]))
                loss = (
                    F.cross_entropy(out, torch.cat([y, y]), weight=weights)
                    / norm
                )  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        told.append(first(autopilot.incidents).because)
    assert told[0].startswith("two holds NaN")
    assert "weight" in told[1]
    assert told[2].startswith("norm holds NaN")


@SYNCS
def test_data_in_a_dict_have_their_key(sync: Any) -> None:
    """So the line that makes them is found, though it ran in a loader; and an infinity has its sign."""

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 1)

        def forward(self, b: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.fc(torch.cat([b["x"], b["gap"]], -1))
            return out

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        x = torch.stack(rows)
        gap = torch.log(x[:, :1].abs())  # in the loader
        return {"x": x, "gap": gap}

    data = torch.randn(16, 4)
    data[13, 0] = 0.0
    with nanguard.install(sync=sync) as autopilot:
        model = Gaps()
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for b in DataLoader(list(data), batch_size=8, collate_fn=collate):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(b).square().mean().backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert found.because == "b['gap'] holds -Inf at [5, 0]"
    assert (found.samples, found.dataset_indices) == ((5,), (13,))
    assert found.source is not None
    assert (found.source.line, found.is_line_traced) == (line("in the loader"), False)


@SYNCS
def test_data_in_an_object_of_the_program_have_their_attribute(sync: Any) -> None:
    class Graph:
        def __init__(self, x: Tensor) -> None:
            self.x, self.edges = x, torch.randint(0, 6, (2, 9))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, graph: Graph) -> Tensor:
            out: Tensor = self.layer(graph.x[graph.edges[0]])
            return out

    graphs = [Graph(torch.randn(6, 3)) for _ in range(4)]
    graphs[2].x[4, 1] = NAN
    with nanguard.install(sync=sync) as autopilot:
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for graph in graphs:
            graph.edges[0] = 4
            optimizer.zero_grad()
            model(graph).sum().backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.because, found.samples) == ("graph.x holds NaN at [4, 1]", ())


@SYNCS
def test_samples_that_are_found_by_halves_are_all_of_them(sync: Any) -> None:
    """A class has no weight: all samples of this class are bad alone, and without them the batch is not."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for x, y in batches():
            weights = torch.from_numpy(torch.tensor([1.0, 1.0, NAN, 1.0]).numpy())
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, weight=weights).backward()
            optimizer.step()
    assert first(autopilot.incidents).samples == (2, 5)


def test_a_queue_that_the_program_keeps_is_neither_data_nor_a_batch() -> None:
    """A bad step is not made, but what the program has kept of it stays. Its rows are no samples."""
    with nanguard.install(sync="eager") as autopilot:
        model = nn.Linear(5, 4, bias=False)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        queue = torch.randn(16, 4)
        for step in range(9):
            x = torch.randn(4, 5) * (step != 2)
            f = model(x)
            f = f / f.norm(dim=1, keepdim=True)
            loss = F.cross_entropy(f @ queue.T, torch.arange(4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue[4:8] = f.detach() if step < 3 else queue[4:8]
    assert first(autopilot.incidents).cause == "division_by_near_zero_norm"
    last = first(autopilot.incidents[-1:])
    assert "queue holds NaN at [4, 0] and 15 more; the step before was not finite either: if" in last.because
    assert last.samples == ()


# ---- what counts as a step -------------------------------------------------------------------------------------------


@SYNCS
def test_an_evaluation_with_gradients_is_no_batch_that_was_left_out(sync: Any) -> None:
    """Programs that were written before ``no_grad()`` evaluate so. A batch that is left out in training counts."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for epoch in range(2):
            model.train()
            for place, (x, y) in enumerate(batches()):
                loss = F.cross_entropy(model(x * (NAN if (epoch, place) == (1, 1) else 1)), y)
                if (epoch, place) == (1, 1):
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            del loss
            for x, y in batches():
                F.cross_entropy(model(x * NAN), y).item()
    assert [incident.outcome.did for incident in autopilot.incidents] == ["the program did not train on this pass"]


@SYNCS
def test_the_last_line_counts_steps_that_were_in_flight(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for step in range(20):
            loss = model(torch.randn(8, 4)).mean() * (NAN if step >= 4 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert autopilot.refused_in_a_row == 16


# ---- causes ----------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.second(self.first(x).relu())))
        return out


def trained(sync: Any, model: nn.Module, loss_fn: Any) -> Diagnosis:
    with nanguard.install(sync=sync) as autopilot:
        optimizer = SGD(model.parameters(), lr=0.01, fused=True)
        for x, y in batches():
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    return first(autopilot.incidents)


@SYNCS
@pytest.mark.parametrize("std", [1e30, 2e38])
def test_weights_that_were_too_large_from_the_start(sync: Any, std: float) -> None:
    """They are finite in one layer, or Inf here and there, and it is a later layer that overflows."""
    model = Stack()
    with torch.no_grad():
        model.head.weight.mul_(1.0)  # no line for another parameter of this name
    torch.nn.init.normal_(model.second.weight, std=1e30)  # far too large
    if std > 1e30:
        with torch.no_grad():
            model.second.weight.copy_(torch.randn(8, 8) * std)
    found = trained(sync, model, F.cross_entropy)
    assert (found.cause, found.phase, found.module) == ("parameter_corrupted", "parameter", "second")
    assert "parameter second.weight" in found.because
    assert found.source is not None
    assert found.source.line == line("far too large") or std > 1e30


@SYNCS
def test_a_divisor_that_is_no_tensor_is_a_number_of_the_program(sync: Any) -> None:
    temperature = 0.0
    found = trained(sync, nn.Linear(4, 3), lambda out, y: F.cross_entropy(out / temperature, y))
    assert found.cause == "div_by_zero"
    assert found.because.endswith("/ 0: the divisor is a number of the program, such as a setting or a count")


@SYNCS
def test_a_logarithm_that_is_finite_with_a_derivative_that_is_not(sync: Any) -> None:
    """An eps for a denominator would be advice for a line that has none."""
    found = trained(sync, nn.Linear(4, 3), lambda out, y: -torch.log(out.softmax(1) * 1e-39).mean())
    assert (found.cause, found.phase, found.op) == ("log_of_zero", "backward", "log")
    assert "exceeds float32, although the logarithm itself does not" in found.because


@SYNCS
def test_a_running_variance_that_is_negative(sync: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    model[1].running_var[1] = -2.0  # type: ignore[index]
    found = trained(sync, model, F.cross_entropy)
    assert (found.cause, found.module) == ("sqrt_of_negative", "1")
    assert found.because == "running_var holds -2, and no variance is negative"


@SYNCS
@pytest.mark.parametrize(
    ("lr", "decay", "cause"), [(0.1, 1e6, "weight_decay_too_high"), (1e12, 5e-4, "learning_rate_too_high")]
)
def test_a_weight_decay_that_makes_weights_grow(sync: Any, lr: float, decay: float, cause: str) -> None:
    """A learning rate that is absurd itself is the cause, although it makes the decay too large as well."""
    with nanguard.install(sync=sync) as autopilot:
        model = Stack()
        optimizer = SGD(model.parameters(), lr=lr, weight_decay=decay, momentum=0.9, fused=True)
        for x, y in [*batches(), *batches()]:
            optimizer.zero_grad()
            F.cross_entropy(model(x).square(), y).backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert found.cause == cause
    assert ("multiplies weights by -1e+05 in each step" in found.because) == (cause == "weight_decay_too_high")


@SYNCS
def test_a_line_that_is_a_part_of_a_statement_is_shown_with_the_rest(sync: Any) -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        count = (y > 5).sum()
        loss = (
            F.cross_entropy(  # the line that torch names
                out,
                y,
            )
            / count
        )
        return loss  # noqa: RET504

    found = trained(sync, nn.Linear(4, 3), loss_fn)
    assert found.source is not None
    assert found.source.text == "F.cross_entropy(  # the line that torch names"
    assert found.source.statement == "loss = F.cross_entropy(out, y) / count"
    assert "loss = F.cross_entropy(out, y) / count" in str(found)


@SYNCS
def test_data_that_a_loop_goes_through_have_no_wrong_name(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for step in range(3):
            values = [model(torch.ones(4)) for _ in range(3)]
            rewards = torch.from_numpy(torch.full((3,), NAN if step == 1 else 1.0).numpy())
            loss = torch.zeros(())
            for value, reward in zip(values, rewards, strict=True):
                loss = loss + (value - reward).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert "values" not in found.because
    assert found.because.startswith("argument 0 of ")


@SYNCS
def test_a_variable_of_an_old_program_is_the_tensor_inside(sync: Any) -> None:
    """What is written to it is made again, and data are named as they came, with the sample that they came in."""
    gc.collect()  # guards of other tests
    called, told = type(Variable).__call__, []
    for kind in ("write", "mixed"):
        with nanguard.install(sync=sync) as autopilot:
            model = nn.Linear(4, 3)
            optimizer = SGD(model.parameters(), lr=0.1, fused=True)
            for place, (x, y) in enumerate(batches()):
                x[5, 0] = NAN if (kind, place) == ("mixed", 1) else 0.0
                mixed = Variable((x + x.flip(0)) / 2)
                outputs = Variable(torch.zeros(2, 8, 3))
                for number in range(2):
                    outputs[number] = model(mixed)
                count = (y > 5).sum() if (kind, place) == ("write", 1) else 8
                loss = (outputs.log_softmax(-1) * 0).sum() / count  # empty
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        told.append(first(autopilot.incidents))
    assert [found.capture for found in told] == ["tape", "tape"]
    assert told[0].cause == "zero_over_zero"
    assert told[0].source is not None
    assert told[0].source.line == line("empty")
    assert "x holds NaN at [5, 0]" in told[1].because
    assert told[1].dataset_indices == (13,)
    assert type(Variable).__call__ is called, "as it was before"


@SYNCS
def test_a_tensor_beside_a_number_does_not_get_the_name_of_the_number(sync: Any) -> None:
    share, told = 0.5, []
    for kind in ("product", "difference", "literal"):
        with nanguard.install(sync=sync) as autopilot:
            model = nn.Linear(4, 3)
            optimizer = SGD(model.parameters(), lr=0.1, fused=True)
            for x, y in batches():
                x[5] = NAN
                mixed = share * x if kind == "product" else share - x if kind == "difference" else 0.5 * x
                optimizer.zero_grad()
                F.cross_entropy(model(mixed), y).backward()
                optimizer.step()
        told.append(first(autopilot.incidents).because.partition(" holds")[0])
    assert told == ["the tensor in share * x", "x", "x"]


@SYNCS
def test_what_the_first_step_computes_before_the_model_is_called_is_no_data(sync: Any) -> None:
    """Most faults of a program show in its first step: its optimizer is made, and no step has begun a tape yet."""
    with nanguard.install(sync=sync) as autopilot:
        teacher, model = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        x = torch.randn(8, 4)
        with torch.no_grad():
            soft = (teacher(x).softmax(-1) * 0).log()  # of a teacher
        optimizer.zero_grad()
        F.mse_loss(model(x), soft).backward()
        optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.op, found.phase) == ("log_of_zero", "log", "forward")
    assert found.source is not None
    assert found.source.line == line("of a teacher")


def test_what_is_computed_before_the_first_batch_is_not_held() -> None:
    """It would be as large as all the data."""
    with nanguard.install() as autopilot:
        raw, model = torch.randn(24, 4), nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        held = weakref.ref(raw)
        data = DataLoader(TensorDataset(raw * 2, torch.arange(24) % 3), batch_size=8)
        del raw
        for x, y in data:
            assert held() is None
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert autopilot.counts["applied"] == 3


# ---- what lies behind a zero, and numbers of the program -------------------------------------------------------------


@SYNCS
def test_an_overflow_that_a_division_made_zero_is_the_cause(sync: Any) -> None:
    """1 / inf is 0, and the logarithm of it is what reaches the loss."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for x, _ in batches():
            grown = (model(x).square().sum(1) + 100).exp()
            loss = -torch.log(1 / grown).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.op) == ("exp_overflow", "exp")
    assert found.source is not None
    assert found.source.text.startswith("grown =")


@SYNCS
def test_a_zero_of_its_own_is_the_cause_whatever_else_overflowed(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for x, _ in batches():
            out = model(x)
            share = 1 / (out.square().sum(1) + 100).exp()
            loss = -torch.log(out.square().sum(1) * 0).mean() + share.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.op) == ("log_of_zero", "log")


@SYNCS
def test_a_factor_of_the_program_that_is_too_large_is_named(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for x, y in batches():
            loss = 1e39 * F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert found.cause == "overflow_any_precision"
    assert "is multiplied by 1e+39, a number of the program such as a setting, and" in found.because


@SYNCS
def test_nodes_of_graphs_are_no_samples(sync: Any) -> None:
    """Three records of five rows each are put into one tensor: row 7 is not the eighth sample of the batch."""
    records = [torch.from_numpy(torch.randn(5, 4).numpy()) for _ in range(6)]
    records[4][2, 1] = NAN
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for nodes in DataLoader(records, batch_size=3, collate_fn=torch.cat):  # type: ignore[arg-type]
            loss = model(nodes).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert found.because == "nodes holds NaN at [7, 1]"
    assert (found.samples, found.dataset_indices) == ((), ())


class Parts(nn.Module):
    """Is never called itself: only its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def loss(self, x: Tensor, limit: Tensor) -> Tensor:
        assert (limit > 0).any()
        return (self.layers(x) * limit).square().mean()


@SYNCS
@pytest.mark.parametrize("name", ["x", "limit"])
def test_data_are_named_in_a_call_of_a_layer_and_in_a_comparison(sync: Any, name: str) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = Parts()
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        for x, _ in batches():
            given = {"x": x, "limit": torch.ones(8, 4)}
            given[name][2, 3] = NAN
            loss = model.loss(**{key: torch.from_numpy(value.numpy()) for key, value in given.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert first(autopilot.incidents).because == f"{name} holds NaN at [2, 3]"


def test_the_first_pass_of_a_model_that_is_never_called_itself_may_end_the_program(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FLOW)
    ran = subprocess.run(
        [sys.executable, "-m", "nanguard", "run", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 1
    assert "deviation of a single element" in ran.stderr, ran.stderr
    assert "x.var(0)" in ran.stderr
    assert "step 0" in ran.stderr


@SYNCS
@pytest.mark.parametrize(("value", "why"), [(NAN, "holds NaN"), (-1.0, "a second moment can never be negative")])
def test_a_moment_that_a_checkpoint_has_damaged_is_the_cause(sync: Any, value: float, why: str) -> None:
    """The weight is non-finite after the first update; no gradient was."""
    model = nn.Linear(4, 3)
    saved = Adam(model.parameters(), fused=sync == "late")
    model(torch.ones(2, 4)).sum().backward()
    saved.step()
    state = saved.state_dict()
    state["state"][0]["exp_avg_sq"][1, 2] = value
    with nanguard.install(sync=sync) as autopilot:
        optimizer = Adam(model.parameters(), fused=sync == "late")
        optimizer.load_state_dict(state)
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.phase) == ("optimizer_state_corrupted", "optimizer")
    assert "exp_avg_sq of weight holds" in found.because
    assert why in found.because
    assert all(torch.isfinite(param).all() for param in model.parameters())


def test_weights_come_of_the_line_that_loads_weights(tmp_path: Path) -> None:
    """Not of the one after it, which loads the optimizer."""
    (tmp_path / "train.py").write_text(RESUMED)
    ran = subprocess.run(
        [sys.executable, "-m", "nanguard", "run", "train.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=120,
    )
    assert 'net.load_state_dict(saved["net"])' in ran.stderr, ran.stderr


RESUMED = """
import torch
from torch import nn

net = nn.Linear(2, 2)
adam = torch.optim.Adam(net.parameters())
weights = {"weight": torch.full((2, 2), float("nan")), "bias": torch.zeros(2)}
torch.save({"net": weights, "adam": adam.state_dict()}, "a.pt")
saved = torch.load("a.pt")
net.load_state_dict(saved["net"])
adam.load_state_dict(saved["adam"])
net(torch.randn(4, 2)).sum().backward()
adam.step()
"""


FLOW = """
import torch
from torch import nn

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def log_prob(self, x):
        x = self.layer(x)
        u = (x - x.mean(0)) / torch.sqrt(x.var(0) + 1e-5)
        return torch.distributions.Normal(0.0, 1.0).log_prob(u).sum(1)

model = Flow()
optimizer = torch.optim.Adam(model.parameters())
(-model.log_prob(torch.randn(1, 2))).mean().backward()
optimizer.step()
"""


class Scores(nn.Module):
    """Has no parameters, so only its code and the layers around it tell which one it is."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(mask, -INF)
        return scores.softmax(-1)


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.size = nn.Parameter(torch.ones(4)), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / (x - x.mean(-1, keepdim=True)).mul(self.size).square().mean(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.scores, self.out = Spread(), *make_layers(2), Scores(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(x)
        out: Tensor = self.out(self.scores(self.q(x), self.k(x), mask) @ x)
        return x + out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        for block, mask in zip(self.blocks, masks, strict=True):
            x = block.forward(x, mask)
        return x


def make_layers(num: int) -> list[nn.Linear]:
    return [nn.Linear(4, 4) for _ in range(num)]


@SYNCS
@pytest.mark.parametrize("fault", ["softmax", "div"])
def test_a_module_inside_one_whose_forward_the_program_calls_itself_is_named(sync: Any, fault: str) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = Blocks()
        optimizer = SGD(model.parameters(), lr=0.01, fused=True)
        if fault == "div":
            model.blocks[1].norm.size = 0.0
        open_, shut = torch.zeros(8, 8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool)
        for _ in range(3):
            loss = model.forward(torch.randn(8, 4), [open_, shut if fault == "softmax" else open_]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = first(autopilot.incidents)
    module = "blocks.1.scores" if fault == "softmax" else "blocks.1.norm"
    assert (found.op, found.module) == (fault, module)


@SYNCS
def test_rewards_that_are_all_infinite_are_data_and_no_mask(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.01, fused=True)
        memory = [torch.full((8, 1), -INF if step == 1 else 1.0) for step in range(4)]
        for rewards in memory:
            target = rewards + 0.9 * model(torch.randn(8, 4)).detach()
            loss = F.mse_loss(model(torch.randn(8, 4)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = first(autopilot.incidents)
    assert (found.cause, found.because) == ("input_nonfinite", "rewards holds -Inf at [0, 0] and 7 more")
