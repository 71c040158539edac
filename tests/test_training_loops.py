"""Loops as people write them: an agent that plays, a GAN, slices of one tensor, a validation between two steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import LBFGS, SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import nanguard
from helpers import NAN, line
from nanguard.records.diagnosis import Diagnosis
from test_run import NANGUARD, done, script

INF = float("inf")
SYNCS = pytest.mark.parametrize("sync", ["late", "eager"])


def found_in(autopilot: Any) -> list[Diagnosis]:
    return [incident.diagnosis for incident in autopilot.incidents]


def place(found: Diagnosis) -> tuple[str, int | None]:
    return found.op, None if found.source is None else found.source.line


# ---- what is computed before the model is called ---------------------------------------------------------------------


@SYNCS
@pytest.mark.parametrize("rewards", ["equal", "one is NaN"])
def test_what_an_agent_computes_after_it_has_played(sync: Any, rewards: str) -> None:
    """It plays without gradients, for longer than a target would take, and then trains for some epochs."""
    with nanguard.install(sync=sync) as autopilot:
        actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softmax(-1))
        optimizer = Adam(actor.parameters(), fused=True)
        for update in range(4):
            states, actions = torch.randn(10, 4), []
            for state in states:
                with torch.no_grad():
                    actions.append(Categorical(actor(state)).sample())
            given = [0.0 if rewards == "equal" and update == 2 else float(number % 3) for number in range(10)]
            given[5] = NAN if rewards == "one is NaN" and update == 2 else given[5]
            returns = torch.tensor(given)
            returns = (returns - returns.mean()) / returns.std()  # normalised
            for _ in range(3):
                taken = Categorical(actor(states)).log_prob(torch.stack(actions))
                loss = -(taken.exp() * returns.detach()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    told = found_in(autopilot)
    expected = {"equal": ("zero_over_zero", "div"), "one is NaN": ("input_nonfinite", "mean")}[rewards]
    assert (told[0].cause, told[0].op) == expected
    assert place(told[0])[1] == line("normalised")
    if sync == "eager":  # later epochs fail by the same advantages; late, the host does not know that in time
        assert [(each.cause, place(each)) for each in told] == [(told[0].cause, place(told[0]))] * 3


@SYNCS
@pytest.mark.parametrize("average", ["by torch", "by hand"])
def test_an_average_of_the_weights_does_not_hide_what_comes_after_it(sync: Any, average: str) -> None:
    """It is written to between two steps, before the next batch is made: what is computed of that is no data."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(4, 4)
        optimizer = Adam(model.parameters(), fused=True)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(6):
            x, sigma = torch.randn(8, 4), torch.rand(8, 1) + 0.1
            weight = 1 / (sigma * (step != 4)) ** 2  # inverted
            loss = (weight * (model(x + sigma) - x).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if average == "by torch":
                averaged.update_parameters(model)
                continue
            with torch.no_grad():
                for mean, value in zip(averaged.parameters(), model.parameters(), strict=True):
                    mean.detach().view(-1).mul_(0.9).add_(0.1 * value.view(-1))
    told = found_in(autopilot)[0]
    assert (told.cause, told.phase, *place(told)) == ("div_by_zero", "forward", "reciprocal", line("inverted"))


@SYNCS
def test_a_packed_sequence_may_be_given_to_a_module(sync: Any) -> None:
    """It refuses to be made of anything but tensors. What is not read of the padding is no fault."""
    losses = []
    for guarded in (False, True):
        torch.manual_seed(0)
        with nanguard.install(sync=sync) if guarded else nullcontext() as autopilot:
            rnn = nn.GRU(3, 4, batch_first=True)
            optimizer = Adam(rnn.parameters(), fused=True)
            for step in range(5):
                x = torch.randn(3, 6, 3)
                x[2, 2:] = NAN
                x[1, 0] = NAN if step == 3 and guarded else 0.0
                packed = pack_padded_sequence(x, torch.tensor([6, 4, 2]), batch_first=True)
                loss = rnn(packed)[1].square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert losses[5:8] == losses[:3]
    (found,) = found_in(autopilot)
    assert (found.cause, found.step) == ("input_nonfinite", 3)


@SYNCS
@pytest.mark.parametrize("cut", [Tensor.detach, lambda state: state.data], ids=["detach", "data"])
def test_a_state_that_is_detached_from_an_earlier_step(sync: Any, cut: Any) -> None:
    """It was made with gradients, which are gone; its values are not."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(3, 3)
        optimizer = Adam(model.parameters(), fused=True)
        state = torch.ones(4, 3)
        for step in range(5):
            state = cut(state) * 0 if step == 3 else cut(state)
            shares = state.square() / state.square().sum(1, keepdim=True)  # of nothing
            state = model(torch.randn(4, 3)) + shares
            optimizer.zero_grad()
            state.square().mean().backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.cause, *place(found)) == ("zero_over_zero", "div", line("of nothing"))


@SYNCS
def test_slices_of_a_batch_are_followed_from_the_second_step_on(sync: Any) -> None:
    """Nothing says that a micro-batch begins, once the backward pass of the one before has ended."""
    with nanguard.install(sync=sync) as autopilot:
        model = nn.Linear(8, 8)
        optimizer = Adam(model.parameters(), fused=True)
        data = torch.randn(24, 8)
        data[14] = NAN
        for (batch,) in DataLoader(TensorDataset(data), batch_size=4):
            optimizer.zero_grad()
            for begin in (0, 2):
                part = batch[begin : begin + 2]
                noise = torch.randn_like(part)
                noised = part.cos() + noise  # noised
                (model(noised) - noise).pow(2).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("input_nonfinite", ("cos", line("noised")))
    assert (found.samples, found.dataset_indices) == ((2,), (14,))


@SYNCS
def test_a_gradient_by_an_input_that_is_no_leaf(sync: Any) -> None:
    """Networks that solve equations: what they are given was made before the loop, and requires a gradient."""
    with nanguard.install(sync=sync) as autopilot:
        x = torch.rand(20, 1, dtype=torch.float64, requires_grad=True).float()
        target = x.detach().sin()
        target[7] = NAN
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Adam(model.parameters(), fused=True)
        for _ in range(3):
            value = model(x)
            (slope,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
            loss = (target - value).pow(2).mean() + slope.pow(2).mean()  # residual
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = found_in(autopilot)[0]
    assert (found.cause, place(found), found.samples) == ("input_nonfinite", ("sub", line("residual")), (7,))


def test_the_first_bad_pass_of_a_closure_is_examined() -> None:
    """The line search goes on from it, and things overflow that were sound."""
    with nanguard.install() as autopilot:
        x = torch.rand(20, 1, dtype=torch.float64, requires_grad=True).float()
        target = torch.randn(20, 1)
        target[7] = NAN
        model, scale = nn.Linear(1, 1), nn.Parameter(torch.tensor([-6.0]))
        optimizer = LBFGS([*model.parameters(), scale], line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            value = model(x)
            (slope,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
            loss = (target - value).pow(2).mean() + (slope + scale.exp() * value).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert found_in(autopilot)[0].cause == "input_nonfinite"


# ---- which pass, which sample ----------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.dropout(x, 0.5, training=self.training))  # dropped
        return out


@SYNCS
def test_a_validation_between_two_steps_is_not_taken_for_the_pass_that_trains(sync: Any) -> None:
    """With gradients on, as some programs have it. Dropout does nothing there, so the layer uses the data first."""
    with nanguard.install(sync=sync) as autopilot:
        model = Dropping()
        optimizer = Adam(model.parameters(), fused=True)
        x, y = torch.randn(16, 8), torch.randint(3, (16,))
        for step in range(4):
            x[7] = NAN if step >= 2 else x[7]
            model.train()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            model(x)
    assert {place(found)[0] for found in found_in(autopilot)} == {"mul"}


def test_a_row_of_the_whole_data_is_no_sample_of_a_batch() -> None:
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
        optimizer = Adam(model.parameters())
        sources, targets = torch.randint(2, 40, (48, 6)), torch.randint(2, 40, (48, 6))
        sources[21] = 1
        for begin in range(0, 48, 8):
            source, target = sources[begin : begin + 8], targets[begin : begin + 8]
            out = model(source)
            scores = (out @ out.mT).masked_fill((source == 1)[:, None], -INF)
            loss = F.cross_entropy((scores.softmax(-1) @ out).mT, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.samples) == ("masked_softmax_all_neg_inf", ())


def test_the_first_dimension_of_a_hidden_state_is_no_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)

        def forward(self, tokens: Tensor, hidden: Any) -> Any:
            values, hidden = self.rnn(self.embedding(tokens), hidden)
            return self.out(values), hidden

    with nanguard.install() as autopilot:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        text, hidden = torch.randint(20, (31, 6)), (torch.zeros(1, 6, 8), torch.zeros(1, 6, 8))
        for begin in (0, 10, 20):
            hidden = (hidden[0].detach(), hidden[1].detach())
            if begin == 20:
                hidden[0][0, 3] = NAN
            values, hidden = model(text[begin : begin + 10], hidden)
            loss = F.cross_entropy(values.flatten(0, 1), text[begin + 1 : begin + 11].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, found.samples) == ("input_nonfinite", ())


# ---- several networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_statistics_of_a_generator_that_the_step_of_the_discriminator_has_spoiled(keeps: bool) -> None:
    """They were sound before the step, and are so again when it is examined.

    If the program does not keep what the generator returned, that is examined first, in the middle of the step.
    """
    with nanguard.install() as autopilot:
        generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        critic = nn.Linear(3, 1)
        optimizers = [Adam(generator.parameters()), Adam(critic.parameters())]
        all_labels = torch.rand(4, 8, 4)
        all_labels[2, 5] = NAN
        for labels in all_labels:
            real = torch.randn(8, 3)
            loss = -critic(real).mean() + F.mse_loss(critic(real), labels[:, :1])  # labelled
            made = generator(labels.clone())
            given = made.detach()
            if not keeps:
                del made
            loss = loss + critic(given).mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            optimizers[1].step()
    *before, found = found_in(autopilot)
    assert len(before) == (0 if keeps else 1)
    assert (found.capture, found.cause, place(found)) == ("tape", "input_nonfinite", ("mse_loss", line("labelled")))
    assert all(buffer.isfinite().all() for buffer in generator.buffers())


def test_a_sound_step_is_made_after_a_bad_one_of_another_network() -> None:
    """Nothing says that they belong together: the other one has stepped alone, before."""
    with nanguard.install():
        generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
        trains, judges = Adam(generator.parameters()), Adam(critic.parameters())
        before = generator.weight.detach().clone()
        real, noise = torch.full((8, 8), NAN), torch.rand(8, 4)
        judges.zero_grad()
        (critic(real).mean() - critic(generator(noise).detach()).mean()).backward()
        judges.step()
        trains.zero_grad()
        critic(generator(noise)).mean().backward()
        trains.step()
    assert not torch.equal(before, generator.weight)


# ---- causes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [lambda e: -INF * torch.ones_like(e), lambda e: e.new_full(e.shape, 1.0) * -INF])
def test_a_mask_may_be_a_product_with_an_infinity(mask: Any) -> None:
    with nanguard.install() as autopilot:
        model = nn.Linear(8, 8)
        optimizer = Adam(model.parameters())
        for step in range(3):
            edges = torch.eye(16)
            edges[3] = 0 if step == 1 else 1
            hidden = model(torch.randn(16, 8))
            scores = hidden @ hidden.mT
            shares = torch.where(edges > 0, scores, mask(scores)).softmax(1)  # shares
            optimizer.zero_grad()
            (shares @ hidden).pow(2).mean().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.cause, place(found)) == ("masked_softmax_all_neg_inf", ("softmax", line("shares")))


def test_a_learning_rate_of_one_is_far_too_high_for_adam() -> None:
    """The rate that is told is that of the steps that were made, not the one that has been set since."""
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        optimizer = Adam(model.parameters(), lr=0.0)
        for step in range(2):
            loss = model(torch.rand(16, 64)).abs().exp().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 1.0 + step
            optimizer.step()
    (found,) = found_in(autopilot)
    assert found.cause == "learning_rate_too_high"
    assert found.because.endswith("in 1 step of Adam with lr=1")


def test_memory_that_is_filled_later_has_no_values() -> None:
    """Whatever was in it by chance."""
    with nanguard.install() as autopilot:
        model = nn.Sequential(nn.Linear(4, 4), Filling())
        optimizer = SGD(model.parameters(), lr=0.1)
        loss = model(torch.zeros(8, 4)).sum().log()
        loss.backward()
        optimizer.step()
    (found,) = found_in(autopilot)
    assert found.trail
    assert not any(stretch.op == "resize" for stretch in found.trail)


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.full((64,), 3e38)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.memory.resize_(8, 4).zero_()


def test_the_format_is_that_of_the_op_that_is_named() -> None:
    """The data came in another one."""
    with nanguard.install() as autopilot:
        model = nn.Linear(4, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        data = torch.randn(2, 8, 4, dtype=torch.float64)
        data[1, 3] = NAN
        for x in data:
            optimizer.zero_grad()
            model(x.to(torch.float32)).sum().backward()
            optimizer.step()
    (found,) = found_in(autopilot)
    assert (found.op, found.dtype) == ("addmm", "float32")


# ---- errors of the program -------------------------------------------------------------------------------------------


RAISES = """
    import torch
    from torch import nn
    from torch.distributions import Normal
    from torch.utils.data import DataLoader, TensorDataset

    def likelihood(target, mean):
        return -Normal(mean, 1.0).log_prob(target).mean()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 4)
    data[9] = float("nan")
    for (x,) in DataLoader(TensorDataset(data), batch_size=4):
        loss = likelihood(x, model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_an_error_is_explained_once(tmp_path: Path) -> None:
    """When it passes, and not again at the end of the process, although functions have passed the NaN on."""
    ran = done(*NANGUARD, "--run-dir", "run", script(tmp_path, RAISES), cwd=tmp_path)
    assert ran.returncode == 1
    (incident,) = nanguard.read_run(tmp_path / "run").incidents
    assert incident.diagnosis is not None
    assert (incident.diagnosis.cause, incident.diagnosis.dataset_indices) == ("input_nonfinite", (9,))


# ---- lines outside of the step ---------------------------------------------------------------------------------------


ISOLATED = """
    import torch
    from torch import nn
    edges = torch.eye(6).roll(1, 0)
    edges[4] = 0
    d = edges.sum(1).pow(-0.5)  # guilty
    edges = d[:, None] * edges * d[None]
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(edges @ torch.randn(6, 3)).sum()
    loss.backward()
    optimizer.step()
"""

CONSTANT = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    data, target = torch.randn(16, 3).numpy(), torch.randn(16, 1)
    data[:, 1] = 1
    data = (data - data.mean(0)) / data.std(0)  # guilty
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for number, (x, y) in enumerate(DataLoader(TensorDataset(torch.from_numpy(data), target), batch_size=8)):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("code", [ISOLATED, CONSTANT], ids=["a graph", "a dataset"])
def test_the_line_of_a_script_that_made_its_data(code: str, tmp_path: Path) -> None:
    """It is in no function, and ran before training."""
    done(*NANGUARD, "--run-dir", "run", script(tmp_path, code), cwd=tmp_path)
    found = nanguard.read_run(tmp_path / "run").incidents[0].diagnosis
    assert found is not None
    assert found.source is not None
    assert (found.cause, found.is_line_traced) == ("input_nonfinite", False)
    assert found.source.text.endswith("# guilty")


@pytest.mark.parametrize("how", ["p.mul_(scale)", "p.data *= scale"])
def test_what_the_program_writes_into_its_weights(how: str, tmp_path: Path) -> None:
    """The first time it may have been the update; from then on updates are checked, so that the program is to blame."""
    code = f"""
    import torch
    from torch import nn
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(24):
        loss = model(torch.randn(8, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scale = 1.0 if step % 10 else 1 / torch.zeros(())
        with torch.no_grad():
            for p in model.parameters():
                {how}
    """
    done(*NANGUARD, "--run-dir", "run", script(tmp_path, code), cwd=tmp_path)
    told = [each.diagnosis for each in nanguard.read_run(tmp_path / "run").incidents]
    first, second = (each for each in told[:2] if each is not None)
    assert "by its update, or by the program; the program writes to tensors at train.py:14" in first.because
    assert first.source is None
    assert ["checked from now on" in str(each.notes) for each in (first, second)] == [True, False]
    assert "by the program, since the update of that step was finite" in second.because
    assert second.source is not None
    assert (second.source.line, second.is_line_traced) == (14, False)


@SYNCS
def test_an_error_of_anomaly_mode_is_explained_while_the_mode_is_on(sync: Any) -> None:
    """It names the op whose derivative was NaN first. That of a root was infinite before."""
    installed = []

    def train() -> None:
        with torch.autograd.set_detect_anomaly(True), nanguard.install(sync=sync) as autopilot:
            installed.append(autopilot)
            model = nn.Linear(3, 3)
            optimizer = Adam(model.parameters(), fused=True)
            for step in range(3):
                h = model(torch.randn(4, 3)) * torch.tensor([1.0, float(step < 2), 1.0])
                loss = torch.sqrt(h.square()).mean()  # the root
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="PowBackward0"), pytest.warns(UserWarning, match="PowBackward0"):
        train()
    (found,) = found_in(installed[0])
    assert (found.cause, *place(found)) == ("sqrt_grad_at_zero", "sqrt", line("the root"))


KEEPS = """
    import torch
    from torch import nn
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    kept = torch.zeros(4, 3)
    for step in range(6):
        kept = model(torch.randn(4, 3)) + 0.1 * kept.detach() / (step != 2)
        optimizer.zero_grad()
        kept.square().mean().backward()
        optimizer.step()
"""


def test_a_run_is_explained_by_its_first_fault_not_by_what_follows_from_it(tmp_path: Path) -> None:
    """That is known for certain, since it is data by then."""
    ran = done(*NANGUARD, "--run-dir", "run", script(tmp_path, KEEPS), cwd=tmp_path)
    told = done(*NANGUARD[:-1], "explain", "run", cwd=tmp_path).stdout
    assert "if the program keeps this from step to step" in ran.stderr
    assert "first known at step 2: division by zero" in " ".join(ran.stderr.split())
    assert "division by zero" in told.partition("other faults")[0]
    assert "non-finite data" in told.partition("other faults")[2]
