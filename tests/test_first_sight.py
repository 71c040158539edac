"""What the first panel says about programs of other people: word by word, it has to be right."""

from __future__ import annotations

import cProfile
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import SGD, Adam, RMSprop
from torch.utils.data import DataLoader, Dataset

import nanguard
from helpers import NAN, line
from test_run import NANGUARD, done, script
from test_training_loops import found_in, place

# ---- learning rates --------------------------------------------------------------------------------------------------


def test_a_learning_rate_is_blamed_although_the_first_thing_to_overflow_is_a_buffer() -> None:
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.Sigmoid())
        optimizer = Adam(model.parameters(), lr=1e15)
        for _ in range(3):
            optimizer.zero_grad()
            F.binary_cross_entropy(model(torch.randn(16, 4)), torch.rand(16, 1)).backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.step, found.phase, found.cause) == (1, "buffer", "learning_rate_too_high")
    assert "lower the learning rate" in found.fix.words


def test_a_rate_of_one_or_more_is_blamed_for_an_overflow_that_its_steps_lead_to() -> None:
    """Each step of Adam makes the weight larger by the rate."""
    with nanguard.install() as autopilot:
        log_alpha = torch.full((1,), 0.3, requires_grad=True)
        optimizer = Adam([log_alpha], lr=30)
        for _ in range(7):
            alpha = torch.exp(0.6 * log_alpha.detach())
            optimizer.zero_grad()
            (1e-30 * alpha - log_alpha).sum().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.op, found.step, found.cause) == ("exp", 5, "learning_rate_too_high")


def test_a_rate_of_one_is_not_blamed_for_an_overflow_of_data() -> None:
    """SGD has such rates, and weights that begin small grow."""
    with nanguard.install() as autopilot:
        table = nn.Embedding(8, 4)
        nn.init.normal_(table.weight, std=1e-4)
        optimizer = SGD(table.parameters(), lr=1.0)
        for step in range(6):
            wanted = torch.full((8, 4), 1e25 if step == 5 else 0.3)
            optimizer.zero_grad()
            (table(torch.arange(8)) - wanted).square().sum().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.step, found.cause) == (5, "overflow_any_precision")


# ---- lines outside of the step ---------------------------------------------------------------------------------------


LOADS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.Embedding(8, 4)

        def forward(self, x):
            return self.items(x).sum(1)

    saved = Net().state_dict()
    for name, values in saved.items():
        values[5, 1] = values[5, 1] / torch.zeros(())
    torch.save({"model": saved}, "model.pt")
    model, average = Net(), Net()
    for name, param in model.named_parameters():
        nn.init.xavier_normal_(param.data)
    model.items.weight.data[0, :] = 0
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.load("model.pt")
    model.load_state_dict(state["model"])  # guilty
    optimizer.load_state_dict(optimizer.state_dict())
    average.load_state_dict(model.state_dict())
    for _ in range(2):
        loss = model(torch.arange(8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_bad_weight_comes_from_the_file_that_was_loaded_not_from_a_row_that_was_set_to_zero(tmp_path: Path) -> None:
    done(*NANGUARD, "--run-dir", "run", script(tmp_path, LOADS), cwd=tmp_path)
    found = nanguard.read_run(tmp_path / "run").incidents[0].diagnosis
    assert found is not None
    assert found.source is not None
    assert (found.cause, found.module, found.is_line_traced) == ("parameter_corrupted", "items", False)
    assert found.source.text.endswith("# guilty")


class Chosen:
    """Makes an optimizer by its name, somewhere else than in the file of the model."""

    def __init__(self, params: Any, name: str) -> None:
        kinds: dict[str, Any] = {"adam": Adam, "rmsprop": RMSprop}
        self.optimizer = kinds[name](params, eps=0.0)  # made here


def test_the_line_that_made_an_optimizer_is_known() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1, bias=False)
        optimizer = Chosen(model.parameters(), "rmsprop").optimizer
        x = torch.randn(8, 4)
        x[:, 2] = 0  # so that one gradient is 0
        model(x).sum().backward()
        optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.phase) == ("optimizer_eps_underflow", "optimizer")
    assert found.source is not None
    assert (found.source.line, found.is_line_traced) == (line("made here"), True)


# ---- modules with a state --------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Is called for each entry of a sequence, and keeps its state and a count between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 6), nn.Linear(6, 1)
        self.states: list[Tensor] = []

    def begin(self, size: int) -> None:
        self.hidden = self.cell.bias_hh[:6].detach().clone().repeat(size, 1)
        self.states = [self.hidden]
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.norm(dim=1, keepdim=True)  # direction
        self.hidden = self.cell(x, self.hidden)
        self.states.append(self.hidden)
        self.num_calls += 1
        score: Tensor = self.out(torch.stack(self.states).mean(0)).sigmoid() / self.num_calls
        return score


@pytest.mark.parametrize("value", [NAN, 0.0])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("sync", ["eager", "late"])
def test_a_module_that_keeps_a_state_from_call_to_call_is_called_again_from_its_beginning(
    value: float, begins: bool, sync: Any
) -> None:
    """Whether the program sets the state for each sequence, or cuts it off from the one before."""
    with nanguard.install(sync=sync) as autopilot:
        model = Reader()
        optimizer = Adam(model.parameters(), fused=sync == "late")
        model.begin(4)
        for step in range(7):
            data = np.random.default_rng(step).normal(size=(5, 4, 3)).astype(np.float32)
            if step == 4:
                data[2, 1] = value
            sequence = torch.from_numpy(data)
            if begins:
                model.begin(4)
            else:
                model.hidden, model.states, model.num_calls = model.hidden.detach(), [], 0
            loss = torch.zeros(())
            for x in sequence:
                loss = loss - torch.log(model(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert found.step == 4
    if value == 0:
        assert (found.cause, *place(found)) == ("division_by_near_zero_norm", "div", line("direction"))
        assert found.repeats
    else:
        assert found.cause == "input_nonfinite"
        assert found.because.startswith("sequence holds NaN at [2, 1, 0] and 2 more")


class Mixture(nn.Module):
    """Is never called itself: the program calls a method that calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))

    def loss(self, points: Tensor) -> Tensor:
        return self.net(points).square().mean()


def test_what_a_layer_of_torch_is_given_has_the_name_that_the_program_gives_to_the_network_around_it() -> None:
    with nanguard.install() as autopilot:
        model = Mixture()
        optimizer = SGD(model.parameters(), lr=0.1)
        data = torch.from_numpy(np.ones((8, 2), dtype=np.float32))
        data.numpy()[3, 1] = NAN
        model.loss(data).backward()
        optimizer.step()
    (found,) = found_in(autopilot)
    assert found.because == "points holds NaN at [3, 1]"


# ---- samples ---------------------------------------------------------------------------------------------------------


class Speakers(Dataset[Tensor]):
    """Gives some record, whichever it is asked for."""

    def __init__(self, *, draws: bool) -> None:
        self.records = torch.randn(12, 3)
        self.records[5, 1] = NAN
        self.draws = draws

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Tensor:
        return self.records[random.choice([11, 5, 7]) if self.draws else index]


@pytest.mark.parametrize("draws", [True, False])
def test_an_index_of_a_dataset_that_draws_its_records_is_not_said_to_be_that_of_the_bad_one(draws: bool) -> None:
    random.seed(3)
    with nanguard.install() as autopilot:
        model = nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Speakers(draws=draws), batch_size=4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert found.cause == "input_nonfinite"
    assert (found.is_record_finite, "is finite: the dataset may draw records" in str(found)) == (draws, draws)


# ---- numbers of the program ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1e38, 1.0])
def test_a_number_that_makes_a_loss_overflow_is_named(weight: float) -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        inputs = torch.full((8, 4), 3.0 if weight > 1 else 1e30)
        loss = weight * (10 + model(inputs).square().sum())
        loss.backward()
        optimizer.step()
    found = found_in(autopilot)[0]
    assert found.cause == "overflow_any_precision"
    is_named = "multiplied by 1e+38, a number of the program" in found.because
    assert (is_named, "lower this number" in found.fix.words) == (weight > 1, weight > 1)


# ---- errors of the program -------------------------------------------------------------------------------------------


def as_class(label: Tensor) -> Tensor:
    target = torch.zeros(1, 5)
    target[0, math.ceil(label) - 1] = 1
    return target


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_label_that_cannot_be_an_integer_is_data(is_computed: bool) -> None:
    labels = torch.tensor([1.0, 2.0, NAN, 4.0])
    with pytest.raises(ValueError, match="NaN"), nanguard.install() as autopilot:
        model = nn.Linear(3, 5)
        optimizer = SGD(model.parameters(), lr=0.1)
        for number in range(4):
            out = model(torch.randn(1, 3)).log_softmax(1)
            given = torch.from_numpy(labels.numpy()[number : number + 1])
            label = out.mean().detach().sub(9).log() if is_computed else given
            loss = F.mse_loss(out, as_class(label))  # given
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = found_in(autopilot)[0]
    if is_computed:
        assert found.cause != "input_nonfinite"
        return
    assert (found.cause, found.step, *place(found)) == ("input_nonfinite", 2, "", line("given"))
    assert found.because.startswith("label, which as_class() was given, holds NaN")


def test_an_error_between_two_steps_is_not_said_to_be_of_one_network() -> None:
    """Of several that are trained: it may be the other one that was called."""
    with pytest.raises(ValueError, match="loc"), nanguard.install() as autopilot:
        critic, policy = nn.Linear(3, 1), nn.Linear(3, 2)
        optimizers = [SGD(each.parameters(), lr=0.1) for each in (critic, policy)]

        def act(state: Tensor) -> Tensor:
            with torch.no_grad():
                chosen: Tensor = Normal(policy(state), 1.0, validate_args=True).sample()
                return chosen

        for step in range(3):
            for each, optimizer in zip((critic, policy), optimizers, strict=True):
                optimizer.zero_grad()
                each(torch.randn(4, 3)).sum().backward()
                optimizer.step()
            act(torch.tensor([0.0, NAN if step == 2 else 1.0, 0.0]))
    (found,) = found_in(autopilot)
    assert (found.cause, found.network) == ("input_nonfinite", "")


# ---- many calls ------------------------------------------------------------------------------------------------------


def calls_to_explain(num: int) -> int:
    """How many functions are called if the states of an episode are joined from so many."""
    with nanguard.install() as autopilot:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        arrays = np.ones((num, 2), dtype=np.float32)
        arrays[num // 2] = NAN
        played = [torch.from_numpy(each) for each in arrays]
        states = [state * 2.0 for state in played]
        model(torch.stack(states)).square().mean().backward()
        profile = cProfile.Profile()
        profile.runcall(optimizer.step)
    assert found_in(autopilot)[0].cause == "input_nonfinite"
    return sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]


def test_an_episode_of_many_calls_is_explained_in_a_time_that_grows_with_their_number_not_with_its_square() -> None:
    calls_to_explain(20)  # the first time, files are read
    assert calls_to_explain(400) < 5 * calls_to_explain(100)
