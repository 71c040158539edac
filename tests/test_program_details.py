"""The details of a diagnosis in programs as people write them: which module, which name, which sample, which cause."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import SGD, Adam
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import nanguard
from helpers import NAN, line
from nanguard.records.panel import what_happened
from test_training_loops import found_in, place

# ---- which module ----------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(mask, float("-inf"))
        weights: Tensor = nn.Softmax(dim=-1)(scores)  # all of a row
        return weights @ x


class Attention(nn.Module):
    """Makes the module that it calls anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended: Tensor = Scores()(self.query(x), mask)
        return attended


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_module_that_is_made_while_the_model_runs_belongs_to_the_one_that_made_it() -> None:
    with nanguard.install() as autopilot:
        model = Encoder()
        optimizer = Adam(model.parameters())
        for step in range(4):
            mask = torch.zeros(3, 5, 5, dtype=torch.bool)
            mask[1] = step == 2
            optimizer.zero_grad()
            model(torch.randn(3, 5, 4), mask).square().mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("masked_softmax_all_neg_inf", "softmax", line("all of a row"))
    assert found.module == "layers.0"


class Agent:
    def __init__(self) -> None:
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        self.critic_target = copy.deepcopy(self.critic)
        self.optimizer = Adam(self.critic.parameters())

    def train(self, states: Tensor, following: Tensor) -> None:
        with torch.no_grad():
            target = 1.0 + 0.9 * self.critic_target(following)
        loss = F.mse_loss(self.critic(states), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_a_network_that_no_optimizer_trains_has_the_name_that_the_program_gave_it() -> None:
    with nanguard.install() as autopilot:
        agent = Agent()
        memory = np.random.default_rng(0).normal(size=(40, 3))
        memory[21, 0] = NAN
        for step in range(4):
            rows = np.arange(step * 8, step * 8 + 8)
            agent.train(torch.FloatTensor(memory[rows]), torch.FloatTensor(memory[rows + 1]))
    assert found_in(autopilot)[0].module == "critic_target.0"
    assert found_in(autopilot)[0].cause == "input_nonfinite"


# ---- which data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unpacked", "a tuple", "not unpacked"])
def test_entries_of_a_batch_that_a_comprehension_goes_through_have_names(kind: str) -> None:
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)
    targets[9] = NAN
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(TensorDataset(inputs, targets), batch_size=4):
            if kind == "unpacked":
                x, y = [each.double().float() for each in batch]
            elif kind == "a tuple":
                x, y = tuple(each.double().float() for each in batch)
            else:
                entries = [each.double().float() for each in batch]
                x, y = entries[0], entries[1]
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    name = "an entry of batch" if kind == "not unpacked" else "y"
    assert found.because.startswith(f"{name} holds NaN at [1, 0]")
    assert (found.samples, found.dataset_indices) == ((1,), (9,))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinities_that_a_layer_multiplies_by_its_weights_are_no_mask() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            table = np.eye(3) if step == 1 else np.ones((3, 3))
            x = torch.FloatTensor(np.log(table))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert found.cause == "input_nonfinite"
    assert "-Inf" in found.because


def test_a_bad_pass_that_only_an_attack_uses_has_the_names_and_indices_of_the_batch() -> None:
    """The attack calls the model several times before the first step, and throws the results away."""
    images = torch.rand(16, 4)
    images[2, 1] = NAN
    with nanguard.install(sync="eager") as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = SGD(model.parameters(), lr=0.1)
        for clean, y in DataLoader(TensorDataset(images, torch.arange(16) % 3), batch_size=4):
            model.eval()
            moved = clean.detach() + 0.001 * torch.randn(clean.shape)
            for _ in range(3):
                moved.requires_grad_()
                apart = F.kl_div(F.log_softmax(model(moved), 1), F.softmax(model(clean), 1), reduction="sum")
                gradient = torch.autograd.grad(apart, [moved])[0]
                moved = moved.detach() + 0.1 * torch.sign(gradient.detach())
                moved = torch.min(torch.max(moved, clean - 0.3), clean + 0.3).clamp(0.0, 1.0)
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(moved), y).backward()
            optimizer.step()
    incident = autopilot.incidents[0]
    assert what_happened(incident.outcome) == "the output of the model is NaN or Inf"
    found = found_in(autopilot)[0]
    assert (found.cause, found.samples, found.dataset_indices) == ("input_nonfinite", (2,), (2,))
    assert found.because.startswith("clean holds NaN at [2, 1]")


def test_a_program_that_raises_at_data_it_has_only_picked_has_a_line() -> None:
    targets = torch.rand(16) + 0.5
    targets[6] = NAN
    model = nn.Linear(4, 1)

    def train() -> None:
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(torch.rand(16, 4), targets), batch_size=4):
            mean, counts = model(x).squeeze(1), y != 0
            spread = Normal(mean[counts], 1.0, validate_args=True)  # some libraries turn it off for all
            loss = -spread.log_prob(y[counts]).mean()  # picked
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with pytest.raises(ValueError, match="support"), nanguard.install() as autopilot:
        train()
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("input_nonfinite", "index", line("picked"))
    assert found.dataset_indices == (6,)


class Strict(nn.Module):
    """Raises at what it was given, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        assert not torch.isnan(hidden).any()
        return hidden


def test_a_model_that_raised_has_returned_nothing() -> None:
    with pytest.raises(AssertionError), nanguard.install() as autopilot:
        model = Strict()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), NAN if step == 2 else 1.0)).mean().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert what_happened(incident.outcome) == "a call that raised was given NaN or Inf"


class Clouds(Dataset[Tensor]):
    """Points that are scaled to a size of 1. ``opened`` is set by the first record, as a file would be."""

    def __init__(self, *, is_bad_on_disk: bool) -> None:
        self.clouds = np.random.default_rng(0).normal(size=(16, 5, 3)).astype(np.float32)
        self.clouds[6] = NAN if is_bad_on_disk else 0.25
        self.opened, self.num_read = False, 0
        self.first, self.second, self.third = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
        self.fourth = torch.Generator().manual_seed(1)

    def draws(self) -> list[float]:
        drawn = [self.first.random(), self.second.rand(), self.third.random()]
        return [*drawn, torch.rand((), generator=self.fourth).item()]

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, index: int) -> Tensor:
        self.opened = True
        self.num_read += 1
        self.draws()
        points = self.clouds[index]
        points = points - points.mean(0)
        points = self.scaled(points)
        self.scaled(np.ones((5, 3)))  # finite, and its frame may be where the other one was
        return torch.from_numpy(points + np.random.normal(0, 0.01, points.shape).astype(np.float32))

    def scaled(self, points: Any) -> Any:
        size = np.sqrt((points**2).sum(1)).max()
        return points / size  # scaled


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_bad_on_disk", [False, True])
def test_the_line_of_a_dataset_that_makes_a_record_bad_is_found_by_reading_it_again(
    is_bad_on_disk: bool, num_workers: int
) -> None:
    np.random.seed(0)
    drawn = []
    with nanguard.install() as autopilot:
        data = Clouds(is_bad_on_disk=is_bad_on_disk)
        model = nn.Sequential(nn.Flatten(), nn.Linear(15, 2))
        optimizer = SGD(model.parameters(), lr=0.1)
        for points in DataLoader(Subset(data, range(2, 14)), batch_size=4, num_workers=num_workers):
            optimizer.zero_grad()
            model(points).square().mean().backward()
            optimizer.step()  # the record is read again in the second step
            drawn.append(np.random.rand() if num_workers else None)
    (found,) = found_in(autopilot)
    assert (found.cause, found.dataset_indices) == ("input_nonfinite", (6,))
    assert found.makes_data is not is_bad_on_disk
    assert (place(found)[1] == line("scaled")) is not is_bad_on_disk
    assert (data.opened, data.num_read) == ((False, 0) if num_workers else (True, 12))
    apart = Clouds(is_bad_on_disk=is_bad_on_disk)
    for _ in range(data.num_read):
        apart.draws()
    assert data.draws() == apart.draws(), "its own generators are as if the record had been read once"
    if num_workers:
        assert drawn == list(np.random.RandomState(0).rand(3))


class Prepared(Dataset[Tensor]):
    """Computes its records when it is made. What it does to them when they are read is not to blame."""

    scale = 2.0

    def __init__(self, how: str) -> None:
        raw = np.random.default_rng(0).random((16, 3)).astype(np.float32)
        raw[6] = 0.25
        self.rows: Any = []
        if how == "appended":
            for row in raw:
                centred = row - row.mean()
                self.rows.append(centred / np.abs(centred).max())  # appended
        else:
            self.table, self.num = self.prepared(raw)

    def prepared(self, raw: Any) -> Any:
        centred = raw - raw.mean(1, keepdims=True)
        scaled = centred / np.abs(centred).max(1, keepdims=True)  # returned
        return scaled, len(raw)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        scaled = (self.rows[index] if self.rows else self.table[index]) / self.scale
        return torch.from_numpy(scaled)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", ["appended", "returned"])
def test_the_line_that_made_a_record_when_the_dataset_was_made_is_found(how: str) -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        for rows in DataLoader(Prepared(how), batch_size=4):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.dataset_indices) == ("input_nonfinite", (6,))
    assert place(found)[1] == line(how)
    assert not found.is_line_traced, "the panel says probably"


# ---- which sample ----------------------------------------------------------------------------------------------------


def test_the_target_that_cannot_be_aligned_is_named_although_targets_are_joined() -> None:
    words = [[1, 2, 1], [2, 1], [1, 2] * 6, [2]] * 2

    def joined(batch: Any) -> Any:
        frames, targets = zip(*batch, strict=True)
        lengths = torch.tensor([len(each) for each in targets])
        return torch.stack(frames), torch.tensor([label for each in targets for label in each]), lengths

    data: Any = [(torch.randn(5, 4), word) for word in words[:2] + words[4:6] + words[2:4] + words[3:]]
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        for frames, targets, lengths in DataLoader(data, batch_size=4, collate_fn=joined):
            logits = F.log_softmax(model(frames), -1).transpose(0, 1)
            optimizer.zero_grad()
            F.ctc_loss(logits, targets, torch.full((len(lengths),), 5), lengths, reduction="sum").backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.cause, found.samples, found.dataset_indices) == ("ctc_inf", (0,), (4,))


def test_the_numbers_of_a_list_are_no_samples() -> None:
    """Four classes, and a batch of a multiple of four that the program draws itself."""
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        model = nn.Linear(8, 4)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(4):
            target = torch.softmax(torch.randn(16, 4), -1)
            if step == 2:
                target[5] = torch.tensor([1.0, 0.0, 0.0, 0.0])
            predicted = model(torch.randn(16, 8)).softmax(-1)
            optimizer.zero_grad()
            (target * (target / predicted).log()).sum(-1).mean().backward()  # p * log p
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("log_of_zero", "log", line("p * log p"))
    assert (found.samples, found.element) == ((), (5, 1))


# ---- which cause -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("loss", ["binary_cross_entropy_with_logits", "kl_div", "cross_entropy", "nll_loss", "l1_loss"])
def test_a_loss_over_nothing_is_no_riddle(loss: str) -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(4):
            some = torch.arange(6) < (0 if step == 2 else 3)
            out = model(torch.randn(6, 4))[some]
            target = torch.softmax(torch.randn(6, 2), 1)[some]
            target = target.argmax(1) if loss == "nll_loss" else target
            optimizer.zero_grad()
            getattr(F, loss)(out, target).backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert found.cause == "zero_over_zero"
    assert "no elements" in found.because or "nothing" in found.because
    assert "no elements" in found.fix.words


def table(size: int, width: int) -> Tensor:
    frequencies = np.arange(size)[:, None] / np.power(0.0, np.arange(width)[None])  # divides by 0
    return torch.FloatTensor(np.sin(frequencies))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.positions = nn.Embedding.from_pretrained(table(8, 6), freeze=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x) + self.positions(x)
        return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_table_that_was_computed_is_not_called_uninitialised_memory() -> None:
    with nanguard.install() as autopilot:
        model = Positions()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.arange(8)).mean().backward()
        optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.cause, found.module) == ("parameter_corrupted", "positions")
    assert place(found)[1] == line("divides by 0")


@pytest.mark.parametrize("is_in_data", [False, True])
def test_a_bold_rate_is_blamed_if_the_step_is_finite_without_its_steps(is_in_data: bool) -> None:
    """The same division by 0 is that of the program if it happens with the first weights, too."""
    torch.manual_seed(0)
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = Adam(model.parameters(), lr=0.5)
        for step in range(2):
            x = torch.rand(8, 4) * 4
            scale = F.softplus(-2 * model(x).abs()) * (0.0 if is_in_data and step == 1 else 1.0)
            optimizer.zero_grad()
            (1 / scale.pow(2)).mean().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert found.cause == ("div_by_zero" if is_in_data else "learning_rate_too_high")
    assert ("the same step is finite" in found.because) is not is_in_data


def test_a_program_that_raises_as_it_evaluates_exploded_weights_is_told_why() -> None:
    """Nothing of an evaluation is recorded, but the first step has made the weights explode."""

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            probabilities = torch.softmax(model(torch.ones(2, 4)) * 1e30, -1)
            torch.multinomial(probabilities, 1)  # raises

    with pytest.raises(RuntimeError, match="probability"), nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        optimizer = Adam(model.parameters(), lr=1e20)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        evaluate(model)
    (found,) = found_in(autopilot)
    assert (found.cause, *place(found)) == ("learning_rate_too_high", "", line("raises"))
    assert "in 1 step of Adam with lr=1e+20" in found.because


def test_an_error_in_an_evaluation_that_has_nothing_to_do_with_weights_is_not_explained() -> None:
    with pytest.raises(RuntimeError, match="probability"), nanguard.install() as autopilot:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            torch.multinomial(model(torch.ones(2, 4)) * 0 - 1, 1)
    assert found_in(autopilot) == []


# ---- which line of NumPy ---------------------------------------------------------------------------------------------


class Head(nn.Linear):
    """Shows which file is the program's."""


def rooted(points: Any) -> Tensor:
    values = 2.0 * np.power(points, 0.5)  # a root
    return torch.from_numpy(values).float()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_root_of_numpy_is_a_line_that_may_make_data_bad() -> None:
    with nanguard.install() as autopilot:
        model = Head(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            batch = rooted(np.linspace(-1.0 if step == 1 else 0.0, 1, 8).reshape(2, 4))
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)[1]) == ("input_nonfinite", line("a root"))


def test_a_long_call_is_named_by_its_first_argument() -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            rewards = [1.0, 2.0, NAN if step == 1 else 3.0]
            returns = torch.tensor(rewards, dtype=torch.float32, device="cpu").to("cpu")
            loss = (model(torch.ones(3, 4)).flatten() * (returns - returns.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert found.because.startswith("torch.tensor(rewards, ...) holds NaN at [2]")


def test_hooks_of_the_program_are_not_told_of_an_optimizer_that_it_has_not_made() -> None:
    told: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: told.append(optimizer))
    weights = torch.ones(3, requires_grad=True)
    try:
        with nanguard.install() as autopilot:
            for factor in (2.0, 2.0, torch.nan, 2.0):
                (weights * factor).sum().backward()
                with torch.no_grad():
                    weights -= 0.1 * weights.grad
                weights.grad = None
            assert autopilot.counts["skipped"] == 1
    finally:
        handle.remove()
    assert told == []
    assert torch.allclose(weights, torch.full((3,), 0.4))
