"""Unusual loops: adversarial directions, no optimizer, agents that raise, rates that are far too high."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from helpers import line
from nanguard.diagnosis.trials import with_shown_samples
from nanguard.records.diagnosis import Diagnosis
from test_training_loops import SYNCS, found_in, place


@SYNCS
def test_a_loss_after_the_last_clearing_counts_even_if_its_gradients_are_finite(sync: Any) -> None:
    """Virtual adversarial training: the gradients of the first loss are cleared, but those of the second are used."""
    data, labels = torch.rand(24, 4), torch.arange(24) % 3
    labels[12:16] = -100
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)
        changed = []
        for x, y in DataLoader(TensorDataset(data, labels), batch_size=4):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            direction = torch.rand(4, 4, requires_grad=True)
            F.log_softmax(model(x + direction), 1).mean().backward()
            assert direction.grad is not None
            model.zero_grad()
            smooth = F.log_softmax(model(x + 0.1 * direction.grad), 1).mean()
            loss = F.cross_entropy(model(x), y) + smooth  # no label
            loss.backward()
            optimizer.step()
            changed.append(not torch.equal(before, model[0].weight))
    assert changed[:4] == [True, True, True, False]
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("all_labels_ignored", ("nll_loss_forward", line("no label")))
    assert found.dataset_indices == (12, 13, 14, 15)


# ---- agents ----------------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """The first ``num_harmless`` calls are harmless, those after them take the logarithm of 0."""

    def __init__(self, num_harmless: int = 1000) -> None:
        super().__init__()
        self.hidden, self.mean = nn.Linear(3, 8), nn.Linear(8, 1)
        self.num_harmless = num_harmless

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.num_harmless -= 1
        mean = self.mean(F.relu(self.hidden(x)))
        action = torch.tanh(mean * (1.0 if self.num_harmless >= 0 else 1e6))
        return action, torch.log(1 - action.pow(2))  # logarithm


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_state, self.of_action, self.both, self.out = (
            *(nn.Linear(3, 8), nn.Linear(1, 8), nn.Linear(16, 8)),
            nn.Linear(8, 1),
        )
        self.optimizer = Adam(self.parameters(), lr=1e-3)

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([F.relu(self.of_state(x)), F.relu(self.of_action(action))], dim=1)
        out: Tensor = self.out(F.relu(self.both(both)))
        return out

    def learn(self, x: Tensor, action: Tensor, target: Tensor) -> None:
        loss = F.smooth_l1_loss(self.forward(x, action), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_one_fault_of_a_soft_actor_critic_is_one_panel(caplog: pytest.LogCaptureFixture) -> None:
    """Four optimizers, targets by several modules without gradients, and a loss of what the step before it computed."""
    with nanguard.install() as autopilot:
        policy, alpha = Policy(num_harmless=6), torch.tensor(-2.0, requires_grad=True)
        critics, averages = [Critic(), Critic()], [Critic(), Critic()]
        optimizer, of_alpha = Adam(policy.parameters(), lr=1e-3), Adam([alpha], lr=1e-3)
        for _ in range(6):
            x, following = torch.rand(8, 3), torch.rand(8, 3)
            with torch.no_grad():
                action, log_prob = policy(following)
                values = torch.cat([average(following, action) for average in averages], dim=1)
                target = 0.9 * (values.min(1, keepdim=True)[0] - alpha.exp() * log_prob)
            for critic in critics:
                critic.learn(x, torch.rand(8, 1), target)
            action, log_prob = policy.forward(x)
            value = torch.min(critics[0](x, action), critics[1](x, action))
            optimizer.zero_grad()
            (alpha.exp() * log_prob - value).mean().backward()
            optimizer.step()
            of_alpha.zero_grad()
            (-alpha.exp() * (log_prob - 1).detach()).mean().backward()
            of_alpha.step()
            for critic, average in zip(critics, averages, strict=True):
                for mine, theirs in zip(average.parameters(), critic.parameters(), strict=True):
                    mine.data.copy_(mine.data * 0.99 + theirs.data * 0.01)
    places = {(found.cause, place(found)) for found in found_in(autopilot)}
    assert places == {("log_of_zero", ("log", line("logarithm")))}
    assert sum("why " in record.getMessage() for record in caplog.records) == 1


def test_the_action_of_an_agent_is_no_loss() -> None:
    """It has one element as a loss has, and is what raises."""
    autopilot = nanguard.install()
    with pytest.raises(ValueError, match="constraint"), autopilot:
        policy = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = SGD(policy.parameters(), lr=0.1)
        for step in range(6):
            state = torch.rand(3)
            if step == 4:
                state[1] = float("nan")  # poison
            mean = policy(state)
            torch.distributions.Normal(mean, 1.0, validate_args=True)
            optimizer.zero_grad()
            policy(torch.rand(8, 3)).pow(2).mean().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert incident.reading.found == ("output",)
    assert place(incident.diagnosis)[1] == line("poison")


# ---- data ------------------------------------------------------------------------------------------------------------


def test_data_that_were_changed_in_place_are_not_blamed_on_a_line_that_was_guessed() -> None:
    """What they were before is gone: the panel says which line may have made it."""
    data = torch.rand(24, 4)
    data[13] = 0.5
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(data), batch_size=4):
            x -= x.mean(1, keepdim=True)
            x /= x.std(1, keepdim=True)  # scale
            loss = model(x).pow(2).mean()  # use
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)[1], found.is_line_traced) == ("input_nonfinite", line("use"), True)
    assert f"div at test_unusual_loops.py:{line('scale')} changed it in place before" in found.because
    assert found.dataset_indices == (13,)


def test_the_first_step_of_a_program_without_an_optimizer_knows_of_bad_data() -> None:
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        for step in range(3):
            x = torch.rand(8, 4)
            x[3, 1] = float("nan") if step == 0 else 0.0
            model(x).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    (found,) = found_in(autopilot)
    assert (found.cause, found.op) == ("input_nonfinite", "addmm")
    assert found.because == "the input of addmm holds NaN at [3, 1]"


class Table(nn.Module):
    """``others`` is never given."""

    def __init__(self, others: nn.Module | None = None) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(12, 4), nn.Linear(4, 1)
        nn.init.normal_(self.items.weight, std=0.01)
        self.items.weight.data[7] /= 0  # by zero
        if others is not None:
            for mine, theirs in zip(self.children(), others.children(), strict=True):
                mine.weight.data.copy_(theirs.weight)  # type: ignore[operator,union-attr]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.items(x))
        return out


def test_a_division_in_place_is_what_made_a_parameter_non_finite() -> None:
    with nanguard.install() as autopilot:
        model = Table()
        optimizer = SGD(model.parameters(), lr=0.1)
        for x in torch.arange(12).split(4):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.cause, found.module, place(found)[1]) == ("parameter_corrupted", "items", line("by zero"))


# ---- samples ---------------------------------------------------------------------------------------------------------


@SYNCS
def test_samples_that_are_drawn_with_gradients_of_the_model_are_part_of_the_step(sync: Any) -> None:
    """Langevin dynamics in an energy-based model: the program writes to the data of what it takes gradients of."""
    with nanguard.install(sync=sync) as autopilot:
        energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Adam(energy.parameters(), fused=True)
        for step, x in enumerate(torch.rand(20, 3).split(4)):
            rate = 1e42 if step == 3 else 0.1
            fake = torch.autograd.Variable(torch.rand(4, 3), requires_grad=True)
            for _ in range(2):
                (slope,) = torch.autograd.grad(energy(fake).sum(), [fake])
                fake.data += rate * slope  # a step of the samples
            optimizer.zero_grad()
            (energy(fake.detach()).mean() - energy(x).mean()).backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("overflow_any_precision", ("mul", line("a step of the samples")))


class Annealed(nn.Module):
    """Its temperature falls from call to call, and is 0 at the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(3, 2), 3

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) / torch.tensor(float(self.left))  # temperature
        self.left -= 1
        return out


@SYNCS
def test_a_number_that_a_module_counts_with_is_put_back_to_make_its_call_again(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        model = Annealed()
        optimizer = Adam(model.parameters(), fused=True)
        for x in torch.rand(24, 3).split(4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert model.left == -3
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("div_by_zero", ("div", line("temperature")))
    assert found.is_line_traced, "it was run again, not looked for in the source"


@pytest.mark.parametrize("num", [3, 100])
def test_no_sample_is_named_if_all_rows_of_the_data_are_bad(num: int) -> None:
    found = Diagnosis(
        phase="data", cause="input_nonfinite", because="x holds NaN", confidence="certain", shape=(num, 3)
    )
    assert with_shown_samples(replace(found, samples=tuple(range(num)))).samples == ()
    assert with_shown_samples(replace(found, samples=(1,))).samples == (1,)


def test_two_bad_steps_of_an_image_without_a_module_that_is_trained_are_both_refused() -> None:
    """As in a transfer of style, on a GPU: no module call comes before which the state could be noted."""
    with nanguard.install(sync="late") as autopilot:
        features = nn.Linear(4, 3)
        image = torch.rand(2, 4, requires_grad=True)
        optimizer = Adam([image], fused=True)
        for step in range(8):
            loss = torch.sqrt(features(image).square() * float(step < 3) + float(step < 3)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert autopilot.unsound() == ()
    assert (autopilot.counts["applied"], autopilot.counts["skipped"] + autopilot.counts["lost"]) == (3, 5)
    assert image.isfinite().all()
    assert {found.cause for found in found_in(autopilot)} == {"sqrt_grad_at_zero"}


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_is_far_too_high_stays_the_cause_after_three_steps() -> None:
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = Adam(model.parameters(), lr=100.0)
        for step in range(9):
            x = torch.rand(8, 4)
            scores = model(x).softmax(1)
            loss = (scores[:, 0] + (1e-3 if step < 8 else 0.0)).log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [found.cause for found in found_in(autopilot)][-1:] == ["learning_rate_too_high"]
