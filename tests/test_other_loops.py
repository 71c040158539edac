"""More loops as people write them: models with a memory, attacks, energies, several views of one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from helpers import NAN, line
from nanguard._compat import storage_key
from nanguard.state.module_attributes import ModuleAttributes
from test_run import NANGUARD, done, script
from test_training_loops import SYNCS, found_in, place


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def records(bad: int | None = None) -> DataLoader[Any]:
    data = torch.rand(24, 4)
    if bad is not None:
        data[bad] = NAN
    return DataLoader(TensorDataset(data, torch.arange(24) % 3), batch_size=4)


# ---- data ------------------------------------------------------------------------------------------------------------


@SYNCS
def test_a_line_of_the_step_has_not_made_what_it_was_given(sync: Any) -> None:
    """It divides, and assigns to the name that the batch has, but what a loader gave was NaN before."""
    with nanguard.install(sync=sync) as autopilot:
        model, num_bins = Energy(), 32.0
        optimizer = Adam(model.parameters(), fused=True)
        for image, _ in records(bad=13):
            image = image * 255  # scaled
            image = torch.floor(image / 8)
            image = image / num_bins - 0.5
            optimizer.zero_grad()
            model(image).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found), found.is_line_traced) == ("input_nonfinite", ("mul", line("scaled")), True)
    assert found.dataset_indices == (13,)


@SYNCS
def test_samples_that_no_loader_gave_have_no_index_in_its_dataset(sync: Any) -> None:
    """Negative samples of an energy, beside a batch of the loader, in as many rows."""
    with nanguard.install(sync=sync) as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters(), fused=True)
        for step, (real, _) in enumerate(records()):
            negative = torch.rand(4, 4).numpy()
            if step == 2:
                negative[1] = NAN
            optimizer.zero_grad()
            (model(real) - model(torch.from_numpy(negative))).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.samples, found.dataset_indices) == ("input_nonfinite", (1,), ())


@SYNCS
def test_a_cast_copy_of_a_batch_has_its_index(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters(), fused=True)
        for x, y in records(bad=13):
            with torch.no_grad():
                cast = torch.from_numpy(x.double().numpy().astype("float32"))  # torch does not see where it is from
            optimizer.zero_grad()
            F.mse_loss(model(cast)[:, 0], y.float()).backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.samples, found.dataset_indices) == ("input_nonfinite", (1,), (13,))


@pytest.mark.parametrize("length", [7, 6])
def test_time_that_comes_first_is_no_sample(length: int) -> None:
    with nanguard.install() as autopilot:
        model = nn.LSTM(3, 5)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            given, wanted = torch.randn(length, 4, 3), torch.randn(6, 4, 5)
            if step == 1:
                wanted = torch.from_numpy(wanted.numpy().copy())
                wanted[2, 1] = NAN
            optimizer.zero_grad()
            F.mse_loss(model(given)[0][:6], wanted).backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.op, found.samples) == ("input_nonfinite", "mse_loss", ())


@pytest.mark.parametrize("is_own", [True, False])
def test_an_index_in_the_dataset_holds_if_the_program_keeps_the_order(is_own: bool) -> None:
    def sorted_by_sum(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(sorted(samples, key=lambda sample: -sample[0].nan_to_num().sum()))

    with nanguard.install() as autopilot:
        model, loader = Energy(), records(bad=13)
        if is_own:
            loader = DataLoader(loader.dataset, batch_size=4, collate_fn=sorted_by_sum)
        optimizer = Adam(model.parameters())
        for x, _ in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert found.is_order_assumed == is_own
    assert ("if collate_fn keeps the order" in str(found)) == is_own


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x) + 1)
        return out


@SYNCS
def test_a_layer_has_its_name_although_the_program_calls_forward_itself(sync: Any) -> None:
    """Nothing says before the first step that this is how the model is called, so that no module is on the tape."""
    with nanguard.install(sync=sync) as autopilot:
        model = Whole()
        optimizer = Adam(model.parameters(), fused=True)
        for x, _ in records(bad=2):
            optimizer.zero_grad()
            model.forward(x).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.step, found.cause, found.op, found.module) == (0, "input_nonfinite", "addmm", "embedding")


@SYNCS
def test_data_that_exploded_weights_have_made_are_no_data(sync: Any) -> None:
    """The program draws samples with its model, and they are NaN by the time of the step."""
    with nanguard.install(sync=sync) as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters(), lr=1e25, fused=True)
        for real, _ in records():
            drawn = torch.rand(4, 4).numpy()
            for _ in range(2):
                with torch.no_grad():
                    drawn = drawn + 0.1 * model(torch.from_numpy(drawn)).numpy()
            optimizer.zero_grad()
            (model(real) - model(torch.from_numpy(drawn))).mean().backward()
            optimizer.step()
    assert {found.cause for found in found_in(autopilot)} == {"learning_rate_too_high"}


class Graph:
    def __init__(self, features: Tensor) -> None:
        self.features, self.name = features, "a graph"


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, graphs: list[Graph]) -> Tensor:
        return torch.stack([self.layer(graph.features).mean(0) for graph in graphs])


@SYNCS
def test_data_in_objects_have_a_name(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = OfGraphs()
        optimizer = Adam(model.parameters(), fused=True)
        all_graphs = [Graph(torch.rand(3 + number % 2, 4)) for number in range(12)]
        all_graphs[7].features[2, 1] = NAN
        for begin in range(0, 12, 4):
            some = all_graphs[begin : begin + 4]
            optimizer.zero_grad()
            model(some).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.module, found.samples) == ("input_nonfinite", "layer", ())
    assert found.because == "some[3].features holds NaN at [2, 1]"


# ---- models with a memory --------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Holds its state itself, in attributes that no ``state_dict`` knows, and is called once for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(6, 3), nn.Linear(3, 3)
        self.parts: list[Tensor] = []
        self.num_calls = 0

    def reset(self, num: int) -> None:
        self.parts = [torch.zeros(num, 3), torch.ones(num, 3)]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        state, weights = self.parts
        state = torch.tanh(self.cell(torch.cat([x, state], 1)))
        weights = (state * 0 if x.sum() > 100 else weights) / weights.sum(1, keepdim=True)
        self.parts = [state, weights / weights.sum(1, keepdim=True)]  # shared out
        out: Tensor = self.out(state * self.parts[1]).sigmoid()
        return out


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.binary_cross_entropy])
def test_a_state_that_the_bad_step_has_left_behind_is_no_data(loss_fn: Any) -> None:
    """Run again, the model would begin with the NaN that it ended with. It begins with what it was reset to."""
    data = torch.rand(4, 5, 6, 3)
    data[2, 3] = 100.0
    with nanguard.install() as autopilot:
        model = Remembering()
        optimizer = Adam(model.parameters())
        try:
            for sequence in data:
                model.reset(6)
                optimizer.zero_grad()
                outs = torch.stack([model(x) for x in sequence])
                loss_fn(outs, torch.rand(5, 6, 3)).backward()
                optimizer.step()
        except RuntimeError:
            assert loss_fn is F.binary_cross_entropy
            autopilot.end()
    found = found_in(autopilot)[0]
    assert (found.cause, found.op) == ("zero_over_zero", "div")
    assert found.source is not None
    assert (found.source.line, found.is_line_traced) == (line("shared out"), True)
    assert model.num_calls == (20 if loss_fn is F.mse_loss else 15), "what runs again has no effect on attributes"


class Carrying(nn.Module):
    """Goes on from what the call before has left, which nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(3, 3), torch.ones(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.state * x.sum() / x.sum()
        self.state = torch.tanh(self.layer(x) * shares).detach()
        out: Tensor = self.layer(self.state)
        return out


def summed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


@pytest.mark.parametrize("diagnose", ["auto", "off"])
def test_a_step_of_a_guard_is_not_run_again_from_the_state_that_it_has_left(
    diagnose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Carrying()
    policy = nanguard.Policy(ladder=(nanguard.RaisePrecision("module"), nanguard.Skip()))
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = nanguard.Guard(model, optimizer, precision="bf16", policy=policy, diagnose=diagnose)
    for step in range(4):
        if step == 3:
            model.state = torch.ones(4, 3)
        guard.step(summed, torch.rand(4, 3) * (step != 1))
    told = [incident.diagnosis for incident in guard.incidents]
    assert [incident.reading.step for incident in guard.incidents] == [1, 2]
    if diagnose == "auto":
        assert {found.cause for found in told if found is not None} == {"unknown"}
        assert "Carrying.state goes from one call to the next" in str(told[0])
    assert not [record for record in caplog.records if record.exc_info]
    guard.close()


def test_a_step_that_has_not_run_before_begins_with_what_the_model_holds() -> None:
    model = Carrying()
    model.state[1, 2] = NAN
    found = nanguard.diagnose(model, summed, torch.rand(4, 3))
    assert (found.cause, found.op) == ("input_nonfinite", "mul")
    assert "holds NaN at [1, 2]" in found.because


def test_attributes_of_modules_are_put_back() -> None:
    model = nn.Sequential(Remembering(), nn.Linear(3, 3))
    cell: Any = model[0]
    cell.reset(2)
    cell.cache, cell.same = {"a": 1, "b": 2}, [cell]
    state, cache, same = cell.parts, cell.cache, cell.same
    before, tensors = dict(vars(cell)), list(state)
    noted = ModuleAttributes(model.modules())
    cell(torch.rand(2, 3))
    del cell.cache, state[0]
    cell.new = 1
    cache["a"] = cache.pop("a")
    cache["b"] = 3
    model.eval()
    assert set(noted.replaced()) == {storage_key(tensor) for tensor in tensors}
    noted.restore()
    assert vars(cell) == before
    assert (cell.parts is state, cell.cache is cache, cell.same is same) == (True, True, True)
    assert [id(each) for each in state] == [id(each) for each in tensors]
    assert list(cache.items()) == [("a", 1), ("b", 2)]
    assert model.training
    assert model[1].training


# ---- errors of the program -------------------------------------------------------------------------------------------


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weights
        if out.isnan().any():
            raise ValueError("NaN")
        return out


def test_the_model_is_called_again_although_it_raised() -> None:
    """What it does with the data counts, not what they were made of."""
    with nanguard.install() as autopilot, pytest.raises(ValueError, match="NaN"):
        model = Strict()
        optimizer = Adam(model.parameters())
        try:
            for step in range(4):
                x = torch.rand(6, 4)
                if step == 2:
                    x[3, 1] = NAN  # set
                optimizer.zero_grad()
                model(x.cos()).mean().backward()
                optimizer.step()
        except ValueError:
            autopilot.end()
            raise
    (found,) = found_in(autopilot)
    assert (found.cause, found.op, place(found)[1]) == ("input_nonfinite", "cos", line("set"))
    assert "makes it, first used by cos" in str(found)
    assert autopilot.counts["applied"] == 2
    assert not autopilot.counts["skipped"]


class Rooted(Strict):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - 0.5 * (x.sum() > 50)).sqrt())  # below zero


def test_the_op_that_a_model_raised_for_is_found_by_calling_it_again() -> None:
    """What it was given is finite, and what it has made is gone."""
    with nanguard.install() as autopilot:
        model = Rooted()
        optimizer = Adam(model.parameters())
        try:
            for step in range(3):
                optimizer.zero_grad()
                model(torch.rand(30, 4) * (0.1 if step < 2 else 1.0)).mean().backward()
                optimizer.step()
        except ValueError:
            autopilot.end()
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("sqrt_of_negative", "sqrt", line("below zero"))


def test_what_the_program_computed_is_no_data_of_the_model() -> None:
    """Only the last layer is a module that is called. What the others gave is on the tape."""
    with nanguard.install() as autopilot:
        model = Energy()
        optimizer = Adam(model.parameters())
        for step in range(4):
            x = torch.rand(4, 4) * (NAN if step == 3 else 1)  # times NaN
            values = model.head((x @ model.body.weight.mT).relu())
            if step == 3:
                del values
                break
            optimizer.zero_grad()
            values.mean().backward()
            optimizer.step()
        model.head(torch.rand(4, 8))
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("nonfinite_constant", "mul", line("times NaN"))
    assert "head" not in found.module


LEAVES = """
    import math
    import sys
    import torch
    from torch import nn

    def train():
        for step in range(4):
            out = model(torch.rand(3, 4))
            parts = {"mean": out.mean(), "share": out.sum() / (3.0 - step)}
            loss = sum(parts.values())
            if not math.isfinite(sum(part.item() for part in parts.values())):
                sys.exit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train()
"""


def test_a_program_that_leaves_because_of_its_loss_is_told_why(tmp_path: Path) -> None:
    """What the model returned is finite, and nothing was raised."""
    ran = done(*NANGUARD, "--run-dir", "run", script(tmp_path, LEAVES), cwd=tmp_path)
    assert ran.returncode == 1
    (incident,) = nanguard.read_run(tmp_path / "run").incidents
    found = incident.diagnosis
    assert found is not None
    assert (found.step, found.cause, place(found)) == (3, "div_by_zero", ("div", 10))
    assert "the program ended before its optimizer stepped" in ran.stderr
    assert "nanguard: 3 steps, 1 bad result" in ran.stderr


def matched(outs: Tensor, boxes: list[Tensor]) -> Tensor:
    """Without gradients, and as strict as the matcher of a detector."""
    with torch.no_grad():
        wanted = torch.cat(boxes)
        low, high = wanted - 0.1, wanted + 0.1  # spread
        assert (high >= low).all()
        return torch.cdist(outs, wanted).argmin(1)


def test_an_assertion_about_nan_outside_the_model_is_explained() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 2)
        optimizer = Adam(model.parameters())
        try:
            for x, y in records():
                boxes = [torch.rand(2, 2), torch.rand(3, 2)]
                if int(y[0]) == 2:
                    boxes[1] = torch.from_numpy(boxes[1].numpy().copy())
                    boxes[1][2, 0] = NAN
                outs = model(x)
                loss = F.cross_entropy(outs, matched(outs, boxes) % 2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        except AssertionError:
            autopilot.end()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)[1], found.samples) == ("input_nonfinite", line("spread"), ())
    assert "holds NaN at [2, 0]" in found.because
    assert autopilot.counts["applied"] == 2
