"""Programs of reinforcement learning and meta-learning under ``install``, as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.optim import SGD, Adam

import nanguard
from helpers import NAN, line
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.panel import headline

BAD, STEPS = 3, 6


def only(incidents: Any) -> Diagnosis:
    (incident,) = incidents
    assert incident.diagnosis is not None
    found: Diagnosis = incident.diagnosis
    return found


def at(found: Diagnosis) -> int:
    assert found.source is not None
    assert found.source.file == __file__
    return found.source.line


# ---- modules that return objects -------------------------------------------------------------------------------------


class OwnGaussian:
    """A distribution as autoencoders define it themselves. It also knows itself, and its module."""

    def __init__(self, mean: Tensor, owner: nn.Module) -> None:
        self.mean, self.parts, self.owner, self.itself = mean, {"logvar": mean * 0.5}, owner, self

    def log_prob(self, action: Tensor) -> Tensor:
        logvar = self.parts["logvar"]
        return -0.5 * (logvar + (action[..., None] - self.mean).pow(2) / logvar.exp()).sum(-1)


class Policy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scores = kind, nn.Linear(4, 3)

    def forward(self, state: Tensor) -> Any:
        scores = self.scores(state)
        if self.kind == "categorical":
            return Categorical(logits=scores)
        if self.kind == "independent":
            return Independent(Normal(scores.mean(-1, keepdim=True), scores.exp().mean(-1, keepdim=True)), 1)
        return OwnGaussian(scores, self)


@pytest.mark.parametrize("sync", ["late", "eager"])
@pytest.mark.parametrize("kind", ["categorical", "independent", "own"])
def test_a_module_may_return_a_distribution(kind: str, sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        policy = Policy(kind)
        optimizer = Adam(policy.parameters(), fused=True)
        for step in range(STEPS):
            advantages = torch.tensor([1.0, NAN if step == BAD else 0.5])
            action = torch.tensor([0, 1])
            chances = policy(torch.randn(2, 4))
            log_prob = chances.log_prob(action[:, None] if kind == "independent" else action)
            optimizer.zero_grad()
            (-log_prob * advantages).mean().backward()  # advantages
            optimizer.step()
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, found.op, at(found)) == ("tape", "input_nonfinite", "mul", line("advantages"))
    assert "advantages holds NaN at [1]" in found.because


def test_what_hooks_of_the_program_sum_up_is_not_summed_up_again() -> None:
    """Statistics of an optimizer such as KFAC: a hook writes to a tensor that belongs to no module."""

    def train(how: Any) -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        with nanguard.install(diagnose=how) as autopilot:
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            sums = {0: torch.zeros(2, 4)}

            def add(module: nn.Module, args: Any) -> None:
                sums[0][1].add_(args[0].detach().square().mean(0))

            model[0].register_forward_pre_hook(add)
            optimizer = SGD(model.parameters(), lr=0.1)
            for step in range(STEPS):
                x, weight = torch.randn(8, 4), torch.ones(8, 1)
                weight[5] = NAN if step == BAD else 1.0
                optimizer.zero_grad()
                (model(x) * weight).mean().backward()
                optimizer.step()
        return sums[0], list(autopilot.incidents)

    plain, _ = train("off")
    examined, incidents = train("full")
    assert only(incidents).cause == "input_nonfinite"
    torch.testing.assert_close(examined, plain, rtol=0, atol=0)


# ---- passes that are not for training --------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_an_agent_that_chooses_an_action_makes_no_step(sync: Any) -> None:
    """Nobody turned gradients off. The pass belongs to the actor, although only the critic steps around it."""
    with nanguard.install(sync=sync) as autopilot:
        actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
        actor_optimizer = Adam(actor.parameters(), fused=True)
        critic_optimizer = Adam(critic.parameters(), fused=True)
        for step in range(STEPS):
            state = torch.randn(4)
            state[1] = NAN if step == BAD else 0.0
            actor(state[None]).detach().numpy()
            states, actions = torch.randn(8, 4), torch.randn(8, 2)
            critic_optimizer.zero_grad()
            critic(torch.cat([states, actions], 1)).square().mean().backward()
            critic_optimizer.step()
            if step % 2:
                actor_optimizer.zero_grad()
                (-critic(torch.cat([states, actor(states)], 1))).mean().backward()
                actor_optimizer.step()
    (incident,) = autopilot.incidents
    found = only([incident])
    assert (found.cause, found.op, incident.outcome.did) == (
        "input_nonfinite",
        "addmm",
        "the program did not train on this pass",
    )
    assert found.network == "actor, trained by actor_optimizer"
    assert headline(incident.outcome) == (
        "the output of the model is NaN or Inf: not used for training, nothing changed"
    )
    assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (STEPS + STEPS // 2, 0)


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_pass_is_not_thrown_away_if_one_of_its_results_is(sync: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.extra = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.value(x), self.extra(x)

    with nanguard.install(sync=sync) as autopilot:
        model = Two()
        optimizer = Adam(model.parameters(), fused=True)
        for step in range(STEPS):
            x = torch.full((2, 4), NAN if step == BAD else 1.0)
            first, _ = model(x)
            del _
            second = model(torch.randn(2, 4))[0]
            optimizer.zero_grad()
            (first + second).sum().backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    assert (incident.outcome.did, only([incident]).cause) == ("", "nonfinite_constant")


# ---- meta-learning ---------------------------------------------------------------------------------------------------


class Learner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, weights: list[Tensor] | None = None) -> Tensor:
        weight, bias = weights or list(self.layer.parameters())
        return nn.functional.linear(x, weight, bias)


class Meta(nn.Module):
    """Its ``forward`` is a whole step of training, with an inner step for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Learner()
        self.optimizer = Adam(self.net.parameters(), fused=True)

    def forward(self, tasks: Tensor, queries: Tensor) -> float:
        total = torch.zeros(())
        for task, query in zip(tasks, queries, strict=True):
            inner = self.net(task).square().mean()
            grads = torch.autograd.grad(inner, list(self.net.parameters()))
            fast = [p - 0.1 * grad for p, grad in zip(self.net.parameters(), grads, strict=True)]
            total = total + (self.net(query, fast) - 1).square().mean()
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        return total.item()


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_module_whose_forward_is_a_whole_step_is_looked_into(sync: Any) -> None:
    with nanguard.install(sync=sync) as autopilot:
        meta = Meta()
        for step in range(STEPS):
            tasks, queries = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
            queries[1, 2, 3] = NAN if step == BAD else 0.0  # queries
            meta(tasks, queries)
    found = only(autopilot.incidents)
    assert (found.capture, found.cause, at(found)) == ("tape", "input_nonfinite", line("queries"))
    assert (found.op, found.module) == ("addmm", "net")
    assert all(torch.isfinite(p).all() for p in meta.parameters())


# ---- errors outside a step -------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """The program calls its parts, and ``act`` without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scores = nn.Linear(4, 8), nn.Linear(8, 3)

    def act(self, state: Tensor) -> Tensor:
        features = self.base(state).tanh()
        return Categorical(logits=self.scores(features), validate_args=True).sample()


def play(bad: float, *, in_the_environment: bool) -> None:
    agent = Agent()
    optimizer = Adam(agent.parameters(), fused=True)
    for step in range(STEPS):
        state = torch.randn(5, 4)
        state[2, 1] = bad if step == BAD else 0.0
        for _ in range(3):
            with torch.no_grad():
                agent.act(state)  # acts
            if in_the_environment and step == BAD:
                raise ValueError("the environment is broken")
        optimizer.zero_grad()
        agent.scores(agent.base(torch.randn(5, 4))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_nan_that_makes_the_program_raise_without_gradients_is_explained(sync: Any) -> None:
    with pytest.raises(ValueError, match="Expected parameter logits"), nanguard.install(sync=sync) as autopilot:
        play(NAN, in_the_environment=False)
    (incident,) = autopilot.incidents
    found = only([incident])
    assert (found.cause, found.phase, at(found)) == ("input_nonfinite", "data", line("acts"))
    assert found.because == "state, which act() was given, holds NaN at [2, 1]"
    assert headline(incident.outcome) == (
        "a call that raised was given NaN or Inf: not used for training, nothing changed"
    )
    assert incident.outcome.did.startswith("the program raised ValueError: Expected parameter logits")
    assert (autopilot.counts["applied"], autopilot.counts["skipped"]) == (BAD, 0)


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_scale = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, state: Tensor) -> Normal:
        return Normal(self.mean(state), self.log_scale.exp(), validate_args=True)  # scale


@pytest.mark.parametrize("sync", ["late", "eager"])
def test_a_model_that_raises_because_of_its_own_infinity_is_explained(sync: Any) -> None:
    """What it was given is finite, and it has returned nothing."""
    with pytest.raises(ValueError, match="Expected parameter scale"), nanguard.install(sync=sync) as autopilot:
        policy = Gaussian()
        optimizer = Adam(policy.parameters(), lr=1e6, fused=True)
        for _ in range(STEPS):
            loss = -policy(torch.randn(3, 4)).log_prob(torch.ones(3, 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = autopilot.incidents
    found = only([incident])
    assert (found.cause, found.op, at(found)) == ("learning_rate_too_high", "exp", line("scale"))
    assert incident.outcome.did.startswith("the program raised ValueError: Expected parameter scale")


def test_a_model_that_raises_for_another_reason_is_no_incident() -> None:
    with pytest.raises(RuntimeError, match="shapes"), nanguard.install() as autopilot:
        policy = Gaussian()
        optimizer = Adam(policy.parameters())
        for size in (4, 4, 5):
            loss = -policy(torch.randn(3, size)).log_prob(torch.ones(3, 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not autopilot.incidents


def test_an_error_outside_a_step_that_has_nothing_to_do_with_nan_is_no_incident() -> None:
    with pytest.raises(ValueError, match="broken"), nanguard.install() as autopilot:
        play(0.0, in_the_environment=True)
    assert not autopilot.incidents


# ---- data and parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cat", "stack"])
def test_a_batch_of_single_transitions_does_not_name_the_wrong_sample(how: str) -> None:
    """Row 0 of a transition is not sample 0 of the batch."""
    join: Any = getattr(torch, how)
    memory = [(torch.randn(1, 4), torch.tensor([NAN if number == 5 else 1.0])) for number in range(8)]
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        states, rewards = zip(*memory, strict=True)
        values = model(torch.cat(states)).squeeze(1)
        optimizer.zero_grad()
        (values - join(rewards).flatten()).square().mean().backward()
        optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, found.samples) == ("input_nonfinite", ())
    assert "rewards[5] holds NaN at [0]" in found.because


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 5)
        self.transitions = nn.Parameter(torch.randn(5, 5))
        self.transitions.data[3, :] = -torch.inf
        self.transitions.data[:, 4] = -torch.inf  # forbidden

    def forward(self, x: Tensor) -> Tensor:
        every = self.scores(x)[:, None] + self.transitions
        return (every - every.amax(-1, keepdim=True)).exp().sum(-1).log().mean()


def test_infinities_that_the_program_has_written_are_no_uninitialised_memory() -> None:
    with nanguard.install() as autopilot:
        model = Tagger()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.randn(6, 4)).backward()
        optimizer.step()
    found = only(autopilot.incidents)
    assert (found.cause, at(found)) == ("parameter_corrupted", line("forbidden"))
    assert found.because == "parameter transitions was non-finite before the step: 9 of 25 elements, all -inf"


# ---- gradients of torch.func -----------------------------------------------------------------------------------------


def test_gradients_made_by_hand_with_vmap_are_located_when_the_fault_comes_again() -> None:
    """No call inside ``vmap`` can be made again alone, and there is no backward pass at which to look at a trace."""
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 1)
        optimizer = SGD(model.parameters(), lr=0.1)

        def loss_of(params: dict[str, Tensor], sample: Tensor) -> Tensor:
            out = torch.func.functional_call(model, params, (sample[None],))
            return (out.abs() * (sample.sum() > 1e6)).log().sum()  # log

        per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
        for _ in range(STEPS):
            grads = per_sample({name: p.detach() for name, p in model.named_parameters()}, torch.randn(3, 4))
            for name, p in model.named_parameters():
                p.grad = grads[name].mean(0)
            optimizer.step()
    causes = [incident.diagnosis.cause for incident in autopilot.incidents if incident.diagnosis is not None]
    assert causes[:2] == ["unknown", "log_of_zero"]
    assert at(only(autopilot.incidents[1:2])) == line("log")
