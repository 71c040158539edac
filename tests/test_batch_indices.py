"""The record of the dataset that a guilty sample is: of the very batch that failed, whatever is prepared in advance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset

import nanguard
from helpers import NAN
from nanguard.records.diagnosis import Diagnosis
from nanguard.state.batches import num_samples

BAD = (13, 29)


class Records(Dataset[tuple[Tensor, Tensor]]):
    """The inputs of two records are NaN."""

    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), index / 34)
        return (x * NAN if index in BAD else x), torch.tensor([float(index)])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        records = Records()
        return (records[index] for index in range(len(records)))


class Eager(Sampler[int]):
    """Draws as soon as it is asked for an iterator, not when the first index is."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(34).tolist())

    def __len__(self) -> int:
        return 34


def mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def guarded(**options: Any) -> nanguard.Guard:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return nanguard.Guard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), precision="fp32", **options
    )


def told(diagnoses: list[Diagnosis | None]) -> list[int]:
    return sorted(index for each in diagnoses if each is not None for index in each.dataset_indices)


LOADERS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "shuffled, the last one dropped": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "with workers": {"batch_size": 4, "shuffle": True, "num_workers": 2},
    "with workers that stay": {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "by a sampler": {"batch_size": 4, "sampler": Eager()},
    "by a sampler of batches": {"batch_sampler": BatchSampler(RandomSampler(range(34)), 5, drop_last=False)},
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_dataset_index_of_a_sample_is_told(name: str) -> None:
    guard = guarded(sync="late" if "shuffled" in name else "eager")
    loader = DataLoader(Records(), **LOADERS[name])
    seen: list[int] = []
    for _ in range(2):
        for batch in guard.epoch(loader):
            seen += [int(y) for x, y in zip(*batch, strict=True) if x.isnan().any()]
            guard.step(mse, batch)
    guard.settle()
    assert sorted(seen) == told([incident.diagnosis for incident in guard.incidents])
    for diagnosis in (incident.diagnosis for incident in guard.incidents):
        assert diagnosis is not None
        assert len(diagnosis.samples) == len(diagnosis.dataset_indices) > 0
        assert f"of the batch: dataset ind{'ex' if len(diagnosis.samples) == 1 else 'ices'} " in str(diagnosis)
        assert Diagnosis.from_dict(diagnosis.as_dict()) == diagnosis


def test_how_many_samples_there_are_is_unclear_if_tensors_of_a_mapping_all_differ() -> None:
    one, other = torch.ones(7, 4), torch.ones(6, 4)
    assert num_samples([one, other]) == 7
    assert num_samples({"a": one, "b": other}) is None
    assert num_samples({"a": one, "b": other, "c": other}) == 6


def test_of_a_part_of_a_dataset_the_index_is_that_in_the_whole() -> None:
    """That is what a user can look up."""
    guard, order = guarded(), torch.randperm(34).tolist()
    part = Subset(Subset(Records(), order), range(33, -1, -1))
    for batch in guard.epoch(DataLoader(part, batch_size=4, shuffle=True)):
        guard.step(mse, batch)
    assert told([incident.diagnosis for incident in guard.incidents]) == sorted(BAD)


@pytest.mark.parametrize("style", ["step", "own loop"])
def test_with_accumulation_it_is_that_of_the_microbatch(style: str) -> None:
    guard = guarded(**({"accumulate": 3} if style == "step" else {}))
    for place, batch in enumerate(guard.epoch(DataLoader(Records(), batch_size=4))):
        if style == "step":
            guard.step(mse, batch)
            continue
        with guard.autocast():
            loss = mse(guard.model, batch)
        guard.backward(loss)
        if place % 3 == 2:
            guard.update()
    assert told([incident.diagnosis for incident in guard.incidents]) == list(BAD)


def test_after_a_rollback_it_is_that_of_the_batch_that_comes_again() -> None:
    policy = nanguard.Policy([nanguard.Rollback(times=2), nanguard.Skip(times=20)], divergence=None)
    guard = guarded(policy=policy, snapshots=nanguard.Snapshots(every=2, confirm=1))
    for batch in guard.epoch(DataLoader(Records(), batch_size=2, shuffle=True)):
        guard.step(mse, batch)
    diagnoses = [incident.diagnosis for incident in guard.incidents]
    assert guard.counts["rolled_back"] > 0
    assert set(told(diagnoses)) == set(BAD)
    assert all(d is not None and len(d.samples) == len(d.dataset_indices) for d in diagnoses)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_program_that_is_not_changed(workers: int, runs_ahead: bool) -> None:
    """Also if it fetches each batch before it uses the one that it has."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with nanguard.install() as autopilot:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(Records(), batch_size=4, shuffle=True, num_workers=workers)
        for _ in range(2):
            for batch in one_ahead(loader) if runs_ahead else loader:
                step(model, optimizer, batch)
            with torch.no_grad():
                for x, _ in DataLoader(Records(), batch_size=7):
                    model(x)
    assert told([incident.diagnosis for incident in autopilot.incidents]) == sorted([*BAD, *BAD])


def one_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
    yield waiting


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    mse(model, batch).backward()
    optimizer.step()


def test_of_a_stream_or_of_a_copy_whose_batch_is_not_sure_none_is_told() -> None:
    guard = guarded()
    for batch in guard.epoch(DataLoader(Stream(), batch_size=4)):
        guard.step(mse, batch)
    diagnoses = [incident.diagnosis for incident in guard.incidents]
    assert [d.samples for d in diagnoses if d is not None] == [(1,), (1,)]
    assert told(diagnoses) == []

    model = nn.Linear(4, 1)
    with nanguard.install() as autopilot:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        ahead = [tuple(part.clone() for part in batch) for batch in DataLoader(Records(), batch_size=4)]
        for batch in ahead:
            step(model, optimizer, batch)
    assert len(autopilot.incidents) == 2
    assert told([incident.diagnosis for incident in autopilot.incidents]) == []


def test_of_batches_of_two_loaders_at_once_it_is_that_of_the_one_with_the_bad_data() -> None:
    model = nn.Linear(4, 1)
    with nanguard.install() as autopilot:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loaders = [DataLoader(Records(), batch_size=4, shuffle=shuffles) for shuffles in (False, True)]
        for one, other in zip(*loaders, strict=True):
            optimizer.zero_grad()
            (mse(model, one) + mse(model, [torch.nan_to_num(part) for part in other])).backward()
            optimizer.step()
    assert len(autopilot.incidents) == 2
    assert told([incident.diagnosis for incident in autopilot.incidents]) == list(BAD)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("way", ["epoch", "install"])
def test_the_program_draws_the_same_numbers_and_gets_the_same_batches(name: str, way: str) -> None:
    def batches(loader: Any) -> list[Any]:
        torch.manual_seed(3)
        seen = [batch[1] for _ in range(2) for batch in (guard.epoch(loader) if guard is not None else loader)]
        return [*seen, torch.get_rng_state()]

    guard = None
    plain = batches(DataLoader(Records(), **LOADERS[name]))
    loader = DataLoader(Records(), **LOADERS[name])
    samplers = loader.sampler, loader.batch_sampler
    if way == "epoch":
        guard = guarded()
        noted = batches(loader)
    else:
        with nanguard.install():
            noted = batches(loader)
    assert len(plain) == len(noted)
    assert all(torch.equal(one, two) for one, two in zip(plain, noted, strict=True))
    assert (loader.sampler, loader.batch_sampler) == samplers
