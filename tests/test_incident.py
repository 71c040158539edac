"""What is kept of a failing step: back to the bit, never half, never run, and never in the way of training."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import nanguard
from helpers import NAN, TinyNet, loss_fn, make_batches, poisoned
from nanguard.errors import NanguardError
from nanguard.incidents import bundle as writing
from nanguard.incidents import files
from nanguard.incidents.bundle import Bundles, folders
from nanguard.incidents.files import INCIDENT, TENSORS
from nanguard.incidents.reader import Bundle, BundleError, load
from nanguard.incidents.trees import Fields, Lost, flatten, restore
from nanguard.records.steps import Action, Outcome, Reading, Verdict
from nanguard.replay import explain
from nanguard.state.rng import RngReader
from nanguard.state.training_modes import TrainingModes
from nanguard.step.pending import Microbatch, PendingStep
from test_snapshot_disk import DTYPES, containers, identical, scalars

CPU = torch.device("cpu")


def made_by(diagnosis: nanguard.Diagnosis | None = None, **fields: Any) -> Outcome:
    reading = Reading(step=7, epoch=2, batch=5, loss=NAN, norms=(NAN, math.inf), found=("loss", "gradients"), **fields)
    action = Action(response="skip", rung=0, count=1, times=3, per=100, passed=("not that one",))
    verdict = Verdict(kind="nonfinite", reading=reading)
    return Outcome(verdict=verdict, action=action, applied=False, did="", diagnosis=diagnosis)


def step_on(*batches: Any, model: nn.Module | None = None, divisor: int = 0) -> PendingStep:
    """A step as the guard notes it."""
    window = PendingStep(7, 2, 5, True, divisor or len(batches) or 1)
    rng_reader = RngReader(CPU)
    window.microbatches = [Microbatch(loss_fn, batch, rng_reader.now(), True) for batch in batches]
    window.training = TrainingModes([] if model is None else list(model.modules()))
    return window


HISTORY = [
    Reading(step=s, epoch=2, batch=s, loss=1.5 / (s + 1), mean_loss=0.5, norms=(2.0,), scale=8.0) for s in (5, 6)
]


def keep(run_dir: Path, *batches: Any, capture: Any = "full", number: int = 1, **options: Any) -> Path | None:
    """Keeps a step on these batches; what is no option of ``keep`` is one of ``Bundles``."""
    model = options.pop("model", None) or nn.Linear(2, 2)
    outcome = options.pop("outcome", None) or made_by()
    mine = {key: options.pop(key) for key in ("precision", "kept_fp32") if key in options}
    bundles = Bundles(run_dir, capture, **options)
    window = step_on(*batches, model=model)
    return bundles.keep(number, outcome=outcome, pending=window, history=HISTORY, model=model, **mine)


def kept(run_dir: Path, *batches: Any, **options: Any) -> Bundle:
    path = keep(run_dir, *batches, **options)
    assert path is not None
    return load(path)


def through_disk(run_dir: Path, batch: Any) -> Any:
    (back,) = kept(run_dir, batch, capture="batch").batches()
    return back


def diagnosed() -> tuple[nn.Module, Any, nanguard.Diagnosis]:
    torch.manual_seed(0)
    model, (batch,) = TinyNet(), poisoned(make_batches(1), 0)
    return model, batch, nanguard.diagnose(model, loss_fn, batch)


# ---- what is said


def test_all_that_was_said_comes_back(tmp_path: Path) -> None:
    model, batch, diagnosis = diagnosed()
    outcome = made_by(diagnosis)
    bundle = kept(tmp_path, batch, model=model, outcome=outcome, precision="bf16", kept_fp32=("norm",), number=3)
    assert repr(bundle.outcome) == repr(outcome).replace("bundle=''", f"bundle={str(bundle.path)!r}")  # NaN != NaN
    assert repr(bundle.diagnosis) == repr(diagnosis)
    assert bundle.history == tuple(HISTORY)
    assert (bundle.number, bundle.path.name, bundle.facts["step"], bundle.facts["batch"]) == (3, "0003", 7, 5)
    environment = bundle.facts["environment"]
    assert environment["precision"] == "bf16"
    assert environment["torch"] == torch.__version__
    assert environment["nanguard"] == nanguard.__version__
    assert environment["flags"]["num_threads"] == torch.get_num_threads()
    assert bundle.facts["kept_fp32"] == ["norm"]
    assert bundle.facts["capture"] == "full"
    assert set(bundle.captured) >= {"batch", "rng", "weights"}


def test_the_json_is_strict_and_says_nan_in_words(tmp_path: Path) -> None:
    path = kept(tmp_path, torch.ones(2)).path

    def refuse(text: str) -> None:
        raise AssertionError(text)

    document = json.loads((path / INCIDENT).read_bytes(), parse_constant=refuse)
    assert document["schema"] == 1
    assert document["outcome"]["verdict"]["reading"]["loss"] == "nan"
    assert document["outcome"]["verdict"]["reading"]["norms"] == ["nan", "inf"]


def test_a_step_that_was_not_examined_and_one_without_a_window_are_kept_too(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, "full")
    path = bundles.keep(1, outcome=made_by(), pending=None, history=(), model=nn.Linear(2, 2))
    assert path is not None
    bundle = load(path)
    assert bundle.diagnosis is None
    assert bundle.batches() == []
    assert bundle.rng() == []
    assert "guard.epoch(loader)" in bundle.why_not("batch")
    assert "not examined" in explain.long(bundle)


def test_a_loop_of_the_users_own_is_kept_with_what_was_seen(tmp_path: Path) -> None:
    window = PendingStep(7, 2, 5, False, 1, last_seen={"x": torch.arange(3)})
    path = Bundles(tmp_path, "batch").keep(1, outcome=made_by(), pending=window, history=(), model=nn.Linear(2, 2))
    assert path is not None
    bundle = load(path)
    assert bundle.captured == ("batch",)
    assert identical(bundle.batches(), [{"x": torch.arange(3)}])
    assert "did not call the loss function itself" in bundle.why_not("rng")


def test_modules_in_evaluation_mode_are_named(tmp_path: Path) -> None:
    model = TinyNet()
    model.norm.eval()
    assert kept(tmp_path, torch.ones(2), model=model).facts["eval_modules"] == ["norm"]


# ---- data, to the bit

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: str
    more: Any = None


class Colour(Enum):
    RED = "red"


class Batch:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Encoding(dict[str, Any]):
    pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    width = dtype.itemsize
    tensor = torch.randint(0, 2, (3, 4, width), dtype=torch.uint8) if dtype is torch.bool else None
    raw = torch.randint(0, 256, (3, 4 * width), dtype=torch.uint8)
    tensor = raw.view(dtype) if tensor is None else tensor.bool()
    assert identical(through_disk(tmp_path, {"x": tensor}), {"x": tensor})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.zeros(0, 3),
        lambda: torch.arange(12.0).reshape(3, 4).T,
        lambda: torch.arange(12.0)[::3],
        lambda: torch.ones(1).expand(5, 4),
        lambda: torch.tensor([NAN, -NAN, math.inf, -0.0]),
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        lambda: torch.tensor([1 + 2j]).conj().imag,
        lambda: torch.tensor(1 + 2j, dtype=torch.complex128),
        lambda: torch.zeros(2, 0, dtype=torch.complex64),
    ],
)
def test_odd_tensors_come_back_to_the_bit(tmp_path: Path, make: Callable[[], Tensor]) -> None:
    assert identical(through_disk(tmp_path, [make()]), [make()])


def test_views_of_one_storage_and_one_tensor_twice(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    one, two, same = through_disk(tmp_path, (base[:6], base[4:], [base[:6]]))
    assert identical([one, two, same], [base[:6], base[4:], [base[:6]]])
    again, there = through_disk(tmp_path, (base, {"there": base}))
    assert again is there["there"]


def test_what_requires_a_gradient_does_so_again(tmp_path: Path) -> None:
    x = torch.ones(2, requires_grad=True)
    back = through_disk(tmp_path, {"x": x, "made": x * 2, "y": torch.ones(2)})
    assert [back[name].requires_grad for name in ("x", "made", "y")] == [True, True, False]
    assert back["made"].is_leaf
    assert torch.equal(back["made"], x.detach() * 2)


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    z, x = torch.tensor([1 + 2j]), torch.ones(2, 3, dtype=torch.bfloat16)
    path = kept(tmp_path, {"z": z, "x": x}, model=TinyNet()).path
    there = safetensors.torch.load_file(path / TENSORS)
    assert torch.equal(there["batch[0].0"], torch.view_as_real(z))
    assert torch.equal(there["batch[0].1"], x)
    assert there["weights.inp.weight"].shape == (12, 6)


@given(st.recursive(scalars | st.lists(st.floats(width=32), max_size=4).map(torch.tensor), containers, max_leaves=12))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_python_has_comes_back_exactly(tree: Any) -> None:
    data, tensors, notes = flatten(tree, "batch")
    back = restore(json.loads(json.dumps(data, allow_nan=False)), tensors)
    if not notes:  # a key or member that is no plain value, such as a set in a set
        assert identical(back, tree)


@pytest.mark.parametrize(
    "batch",
    [
        None,
        "text",
        3,
        [],
        {},
        ("a", 1, None, True, 2.5, b"\x00", 1j, math.inf),
        {"ids": ["a", "b"], "n": 3, 5: (1, [2, {"deep": torch.ones(1)}])},
        OrderedDict(b=torch.ones(1), a=2),
        defaultdict(list, a=[torch.zeros(1)]),
        deque([1, torch.ones(1)], 4),
        Counter("abca"),
        {"set": {1, 2}, "frozen": frozenset("ab")},
        [np.arange(6).reshape(2, 3), np.float32(2.5), np.array(["a", "bc"])],
        [torch.float16, torch.device("cuda:1"), torch.Size([1, 2])],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_structures_come_back_exactly(tmp_path: Path, batch: Any) -> None:
    bundle = kept(tmp_path, [batch], capture="batch")
    assert identical(bundle.batches(), [[batch]])
    assert bundle.facts["notes"] == []


def test_a_named_tuple_is_one_again(tmp_path: Path) -> None:
    back = through_disk(tmp_path, Pair(torch.ones(2), [Pair(1, "b")]))
    assert type(back).__name__ == "Pair"
    assert back._fields == ("x", "y")
    assert back.y[0].y == "b"
    assert torch.equal(back.x, torch.ones(2))
    x, y = back
    assert x is back.x
    assert back._replace(y=3).y == 3
    assert type(back)(*back) == back
    assert back._asdict().keys() == {"x", "y"}
    assert repr(back.y[0]) == "Pair(x=1, y='b')"


def test_a_packed_sequence_is_one_again(tmp_path: Path) -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    back = through_disk(tmp_path, packed)
    assert isinstance(back, PackedSequence)
    assert identical(list(back), list(packed))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Sample(x=torch.ones(2), name="a", more=Sample(x=torch.zeros(1), name="b")), "Sample"),
        (Batch(x=torch.ones(2), name="a", more=Batch(name="b")), "Batch"),
        (SimpleNamespace(x=torch.ones(2), name="a", more=SimpleNamespace(name="b")), "SimpleNamespace"),
        (Encoding(x=torch.ones(2), name="a", more=Encoding(name="b")), "Encoding"),
    ],
    ids=["dataclass", "class", "namespace", "mapping"],
)
def test_other_classes_come_back_as_their_fields(tmp_path: Path, value: Any, name: str) -> None:
    bundle = kept(tmp_path, value, capture="batch")
    (back,) = bundle.batches()
    assert isinstance(back, Fields)
    assert torch.equal(back["x"], torch.ones(2))
    assert torch.equal(back.x, torch.ones(2))
    assert back.more.name == back["more"]["name"] == "b"
    assert len(bundle.facts["notes"]) == 2
    assert f"{name} comes back as a dict of its fields" in bundle.facts["notes"][1]


def test_fields_win_over_what_a_dict_can_do() -> None:
    fields = Fields(values=3, x=1)
    assert fields.values == 3
    fields.x = 2
    assert fields == {"values": 3, "x": 2}


@pytest.mark.parametrize(
    ("value", "back", "words"),
    [
        (Colour.RED, "red", "comes back as its value"),
        (PurePosixPath("a/b"), "a/b", "comes back as text"),
        (np.array(["a", None], dtype=object), ["a", None], "comes back as plain values"),
        (nn.Parameter(torch.ones(2)).data.as_subclass(type("Image", (Tensor,), {})), torch.ones(2), "a plain tensor"),
        (len, Lost("builtin_function_or_method"), "cannot be saved"),
        (nn.Linear(1, 1), Lost("torch.nn.modules.linear.Linear"), "cannot be saved"),
        (torch.ones(2).to_sparse(), Lost("a tensor of layout torch.sparse_coo"), "cannot be saved"),
        (torch.ones(2, device="meta"), Lost("a meta tensor, which has no values,"), "cannot be saved"),
        (object(), Lost("object"), "cannot be saved"),
        (defaultdict(lambda: 0, a=1), {"a": 1}, "a plain dict"),
        ({Colour.RED: 1}, {"Colour.RED": 1}, "comes back as text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_as_it_was_is_noted(tmp_path: Path, value: Any, back: Any, words: str) -> None:
    bundle = kept(tmp_path, {"x": value, "rest": torch.ones(3)}, capture="batch")
    assert identical(bundle.batches(), [{"x": back, "rest": torch.ones(3)}])
    (note,) = bundle.facts["notes"]
    assert words in note
    assert note.startswith("batch[0]['x']:")


def test_trees_that_hold_themselves_end(tmp_path: Path) -> None:
    batch: Any = {"x": torch.ones(1)}
    batch["self"] = [batch]
    deep: Any = torch.ones(1)
    for _ in range(5000):
        deep = [deep]
    back, down = kept(tmp_path, batch, deep, capture="batch").batches()
    assert back["self"] == [Lost("something that contains itself")]
    assert identical(back["x"], torch.ones(1))
    assert isinstance(down, list)


def test_every_microbatch_is_there_with_its_random_states(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    batches = make_batches(11)
    bundle = kept(tmp_path, *batches)

    def draw() -> list[Any]:
        return [random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()]

    expected = draw()
    assert identical(bundle.batches(), batches)
    states = bundle.rng()
    assert len(states) == 11
    for state in states:
        state.restore(CPU)
        assert draw() == expected
    assert len((bundle.path / INCIDENT).read_text()) < 100_000  # Python's 625 numbers are no text


def test_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    model = TinyNet()
    model.register_parameter("z", nn.Parameter(torch.randn(2, dtype=torch.complex64)))
    model.register_buffer("mask", torch.tensor([-math.inf, 0.0], dtype=torch.bfloat16), persistent=False)
    model.tied = model.inp
    weights = kept(tmp_path, torch.ones(1), model=model).weights()
    live = dict([*model.named_parameters(), *model.named_buffers()])
    assert weights.keys() == live.keys()
    assert all(identical(weights[name], live[name].detach().clone()) for name in live)


# ---- how much is kept


def test_nothing_is_written_where_nothing_is_wanted(tmp_path: Path) -> None:
    assert keep(tmp_path, torch.ones(1), capture="none") is None
    assert list(tmp_path.iterdir()) == []


def test_meta_holds_no_data(tmp_path: Path) -> None:
    secret = {"patient-4711": torch.full((4, 3), 1234.5), "name": ["Mustermann"], "hidden": {"Erika": 98765}}
    model = nn.Linear(3, 2)
    diagnosis = nanguard.Diagnosis(phase="data", cause="input_nonfinite", samples=(1, 2))
    path = keep(tmp_path, secret, secret, capture="meta", model=model, outcome=made_by(diagnosis))
    assert path is not None
    assert [each.name for each in path.iterdir()] == [INCIDENT]
    raw = (path / INCIDENT).read_bytes()
    for word in (b"4711", b"Mustermann", b"Erika", b"98765", b"1234.5", b"hidden"):
        assert word not in raw
    bundle = load(path)
    assert bundle.facts["microbatches"][0]["tensors"] == [{"dtype": "float32", "shape": [4, 3], "device": "cpu"}]
    assert (bundle.captured, bundle.batches(), bundle.rng(), bundle.weights(), bundle.samples()) == (
        (),
        [],
        [],
        {},
        None,
    )
    assert "capture='meta'" in bundle.why_not("weights")
    assert bundle.diagnosis is not None
    assert bundle.diagnosis.samples == (1, 2)


def test_batch_holds_no_weights(tmp_path: Path) -> None:
    bundle = kept(tmp_path, torch.ones(1), capture="batch")
    assert bundle.captured == ("batch", "rng")
    assert bundle.weights() == {}
    assert "only with capture='full'" in bundle.why_not("weights")


def test_a_batch_over_the_limit_is_left_out_whole_and_its_bad_samples_kept(tmp_path: Path) -> None:
    batch = (torch.randn(64, 100), torch.arange(64), "text")
    diagnosis = nanguard.Diagnosis(phase="forward", cause="log_of_zero", samples=(3, 60))
    size = 64 * 100 * 4 + 64 * 8
    bundle = kept(tmp_path, batch, batch_limit=size, outcome=made_by(diagnosis))  # the text is too much
    assert bundle.captured == ("rng", "samples", "weights")
    assert bundle.batches() == []
    assert "over the limit of 26,112 bytes" in bundle.why_not("batch")
    assert identical(bundle.samples(), (batch[0][[3, 60]], batch[1][[3, 60]], "text"))
    bundle = kept(tmp_path, batch, batch_limit=size + 1000, outcome=made_by(diagnosis))
    assert bundle.captured == ("batch", "rng", "samples", "weights")
    assert identical(bundle.batches(), [batch])


def test_the_limit_counts_all_microbatches(tmp_path: Path) -> None:
    batch = torch.zeros(100)
    assert "batch" in kept(tmp_path, batch, batch_limit=6000).captured
    assert "batch" not in kept(tmp_path, *[batch] * 16, batch_limit=6000).captured


def test_what_only_looks_small_counts_by_what_would_be_written(tmp_path: Path) -> None:
    bundle = kept(tmp_path, torch.ones(1).expand(1 << 40), torch.ones(1))
    assert "over the limit of 256.0 MiB" in bundle.why_not("batch")


def test_weights_over_the_limit_are_left_out_whole(tmp_path: Path) -> None:
    bundle = kept(tmp_path, torch.ones(1), model=TinyNet(), weights_limit=400)
    assert bundle.captured == ("batch", "rng")
    assert "over the limit of 400 bytes" in bundle.why_not("weights")


def test_weights_that_cannot_be_written_are_left_out_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.ones(2).to_sparse())
    bundle = kept(tmp_path, torch.ones(1), model=model)
    assert bundle.captured == ("batch", "rng")
    assert "sparse: a tensor of layout torch.sparse_coo cannot be saved" in bundle.why_not("weights")


def keep_many(bundles: Bundles, causes: Iterable[Any], size: int = 1) -> list[Path | None]:
    """One incident for each cause; the batch is of ``size`` numbers."""
    return [
        bundles.keep(
            number,
            outcome=made_by(diagnosis=nanguard.Diagnosis(phase="forward", cause=cause, because="it is so")),
            pending=step_on(torch.ones(size)),
            history=(),
            model=nn.Linear(1, 1),
        )
        for number, cause in enumerate(causes, 1)
    ]


def test_of_one_kind_the_first_are_kept_and_the_rest_thinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundles = Bundles(tmp_path)
    kept = keep_many(bundles, ["log_of_zero"] * 120 + ["div_by_zero"])
    assert [number for number, path in enumerate(kept, 1) if path] == [*range(1, 11), 30, 100, 121]
    assert bundles.num_left_out == 108
    assert [record.getMessage() for record in caplog.records] == [
        "10 incidents of one kind are saved; from now on only some are",
        "100 incidents were not saved to disk so far; the run log has them",
    ]


def test_a_run_with_many_incidents_does_not_fill_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundles = Bundles(tmp_path, "batch", most=2)
    causes = ["log_of_zero"] * 3 + ["div_by_zero"] * 2 + ["exp_overflow", "ctc_inf"]
    kept = keep_many(bundles, causes)
    assert [path and path.name for path in kept] == ["0001", "0002", None, "0004", None, "0006", None]
    there = [load(path) for path in folders(tmp_path)]
    assert [bundle.captured for bundle in there] == [("batch", "rng")] * 2 + [()] * 2, "the first of a kind, small"
    assert "capture='batch' was asked for" in there[2].facts["notes"][0]
    assert bundles.num_left_out == 3
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "no more of these kinds. Delete what you do not need",
        "now only the first of each new kind, without data",
    ]


def test_all_incidents_of_a_run_together_have_a_limit(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, "batch", total_limit=100_000)
    keep_many(bundles, ["log_of_zero"] * 5, size=10_000)
    there = [load(path) for path in folders(tmp_path)]
    assert ["batch" in bundle.captured for bundle in there] == [True, True, False, False, False]
    assert "over the limit" in there[2].why_not("batch")
    assert "were left of the limit for all incidents of a run" in there[2].facts["notes"][0]
    again = Bundles(tmp_path, "batch", total_limit=100_000)
    (path,) = keep_many(again, ["log_of_zero"], size=10_000)
    assert path is not None
    assert "batch" not in load(path).captured, "what an earlier process wrote counts"


def test_the_last_of_a_run_is_kept_whatever_came_before(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path)
    keep_many(bundles, ["log_of_zero"] * 20)
    known = nanguard.Diagnosis(phase="forward", cause="log_of_zero", because="it is so")
    window, model = step_on(torch.ones(1)), nn.Linear(1, 1)
    assert bundles.gather(known, window, (), model) is None
    assert bundles.gather(known, window, (), model, in_any_case=True) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capture": "all"}, "capture must be one of 'none', 'meta', 'batch', 'full', got 'all'"),
        ({"batch_limit": -1}, "batch_limit must be a whole number, 0 or more, got -1"),
        ({"weights_limit": 1.5}, "weights_limit"),
        ({"most": True}, "most"),
        ({"total_limit": -1}, "total_limit"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Bundles(tmp_path, **options)


# ---- numbers and names


def test_numbers_go_on_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first = kept(tmp_path, torch.tensor(1)).path
    second = kept(tmp_path, torch.tensor(2)).path  # a new run in the same place begins at 1 again
    third = kept(tmp_path, torch.tensor(3), number=12).path
    fourth = kept(tmp_path, torch.tensor(4), number=2).path
    assert [path.name for path in (first, second, third, fourth)] == ["0001", "0002", "0012", "0013"]
    assert [load(path).batches()[0].item() for path in folders(tmp_path)] == [1, 2, 3, 4]


def test_ranks_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    paths = [kept(tmp_path, torch.tensor(rank), rank=rank, world_size=3).path for rank in (2, 0, 1)]
    assert [path.name for path in paths] == ["0001-rank2", "0001", "0001-rank1"]
    assert [path.name for path in folders(tmp_path)] == ["0001", "0001-rank1", "0001-rank2"]
    assert load(paths[0]).facts["environment"]["rank"] == 2


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    others = ["1", "0001.bak", "writing-x", "notes", "0001-rank", "٠٠٠١"]
    for name in others:
        (tmp_path / "incidents" / name).mkdir(parents=True)
    (tmp_path / "incidents" / "0001").write_text("a file in the way")
    assert kept(tmp_path, torch.ones(1)).path.name == "0002"
    assert sorted(os.listdir(tmp_path / "incidents")) == sorted([*others, "0001", "0002"])


# ---- never half, never in the way


def test_a_process_killed_while_writing_leaves_nothing_of_that_name(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import torch\n"
        "import test_incident as t; from nanguard.incidents import files, bundle\n"
        "which = getattr(sys.modules['nanguard.incidents.' + sys.argv[3]], sys.argv[4])\n"
        "def killed(*args): os._exit(9)\n"
        "setattr(sys.modules['nanguard.incidents.' + sys.argv[3]], sys.argv[4], killed)\n"
        "t.keep(Path(sys.argv[2]), torch.ones(4))"
    )
    for module, name in (("files", "flush"), ("files", "sync"), ("files", "write_tensors")):
        command = [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent), str(tmp_path), module, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 9, done.stderr
        assert folders(tmp_path) == []
    left = list((tmp_path / "incidents").iterdir())
    assert len(left) == 3
    os.utime(left[0], (0, 0))
    assert kept(tmp_path, torch.ones(1)).path.name == "0001"
    assert sorted((tmp_path / "incidents").iterdir()) == sorted([*left[1:], tmp_path / "incidents" / "0001"])


@pytest.mark.parametrize("name", ["flush", "write_tensors", "sync"])
def test_a_full_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, name, full)
    assert keep(tmp_path, torch.ones(1)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step 7: the incident could not be saved" in record.getMessage()
    assert "No space left on device" in record.getMessage()
    assert "the run goes on" in record.getMessage()
    assert list((tmp_path / "incidents").iterdir()) == []


def test_a_run_dir_that_cannot_be_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert keep(tmp_path / "file", torch.ones(1)) is None
    assert "could not be saved" in caplog.text


def test_a_batch_that_cannot_be_looked_into_is_left_out(tmp_path: Path) -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("closed")

        __iter__ = items

    class Vast(list[int]):
        def __iter__(self) -> Any:
            return iter(range(10**9))

    bundle = kept(tmp_path, [SimpleNamespace(x=Vast())], capture="batch")
    assert "more than 1,000,000 values outside of tensors" in bundle.why_not("batch")
    assert "RuntimeError: closed" in kept(tmp_path, Broken(a=1), capture="batch").why_not("batch")


def test_an_interrupt_goes_through_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, torch.ones(1))
    assert list((tmp_path / "incidents").iterdir()) == []


def test_keeping_changes_nothing(tmp_path: Path) -> None:
    model, batch = TinyNet(), {"x": torch.randn(3), "y": [1]}
    before = (
        torch.get_rng_state(),
        random.getstate(),
        [p.detach().clone() for p in model.parameters()],
        batch["x"].clone(),
    )
    keep(tmp_path, batch, model=model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert identical([p.detach() for p in model.parameters()], before[2])
    assert identical(batch, {"x": before[3], "y": [1]})


# ---- what is not whole is not read


def document_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / INCIDENT).read_text())
    return document


def read_everything(path: Path) -> None:
    """All that a reader can ask for; only ``BundleError`` may come of it."""
    bundle = load(path)
    bundle.batches()
    bundle.rng()
    bundle.weights()
    bundle.samples()
    explain.short(bundle)
    explain.long(bundle)
    json.dumps(explain.as_dict(bundle))


def refused(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        read_everything(path)
    assert isinstance(caught.value, NanguardError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, batch, diagnosis = diagnosed()
    path = kept(tmp_path_factory.mktemp("whole"), (*batch, Pair(1, Sample(torch.ones(2), "a"))), model=model).path
    read_everything(path)
    model, batch, diagnosis = diagnosed()
    outcome = made_by(diagnosis, scale=4.0)
    return kept(path.parent.parent, (*batch, Pair(1, Sample(torch.ones(2), "a"))), model=model, outcome=outcome).path


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    path = tmp_path / "0001"
    path.mkdir()
    for file in whole.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.update(schema=2), "schema 2, and this nanguard reads schema 1"),
    (lambda d: d.pop("schema"), "it has no schema"),
    (lambda d: d.clear(), "it has no schema"),
    (lambda d: d.pop("outcome"), "outcome"),
    (lambda d: d.pop("environment"), "'environment' is missing"),
    (lambda d: d.pop("contents"), "'contents' is missing"),
    (lambda d: d.update(step="7"), "step: expected int, got '7'"),
    (lambda d: d["outcome"]["verdict"].pop("reading"), "reading"),
    (lambda d: d["outcome"]["verdict"].update(kind="bad"), "outcome.verdict.kind: expected"),
    (lambda d: d["outcome"]["verdict"]["reading"].update(loss="many"), "outcome.verdict.reading.loss: expected float"),
    (lambda d: d["outcome"]["action"].update(per=[1]), "outcome.action.per: expected"),
    (lambda d: d["diagnosis"].update(phase="bad luck"), "bad luck"),
    (lambda d: d["diagnosis"].update(source=3), "Source"),
    (lambda d: d["history"].append(1), r"history\[2\]: expected an object"),
    (lambda d: d.update(tensors=None), "weights that were not saved"),
    (lambda d: d["tensors"].pop("index"), "does not say what its tensors are"),
    (lambda d: d["tensors"].pop("size"), "does not say how large"),
    (lambda d: d["tensors"].update(size=5), "instead of 5"),
    (lambda d: d["tensors"].update(tensors_sha256="0" * 64), "its checksum differs"),
    (
        lambda d: d["tensors"]["index"]["weights.inp.weight"].update(shape=[-1, 2]),
        "invalid entry for a tensor: 'weights.inp.weight'",
    ),
    (lambda d: d["tensors"]["index"]["weights.inp.weight"].update(shape=[1 << 60]), "bytes instead of"),
    (
        lambda d: d["tensors"]["index"]["weights.inp.weight"].update(dtype="load"),
        "a dtype that this torch does not have",
    ),
    (lambda d: d["tensors"]["index"]["weights.inp.weight"].update(complex=True), "RuntimeError"),
    (lambda d: d["tensors"]["index"].pop("weights.inp.weight"), "not saved: 'inp.weight'"),
    (lambda d: d["contents"].pop("batch[0]"), "were captured"),
    (lambda d: d["contents"]["weights"].append("more"), "not saved: 'more'"),
    (lambda d: d["contents"].update({"batch[0]": {"$tensor": "99"}}), "cannot be read"),
    (lambda d: d["contents"].update({"batch[0]": {"$reduce": ["os.system", ["touch PWNED"]]}}), "cannot be read"),
    (lambda d: d["contents"].update({"batch[0]": {"$named": ["A", ["__class__"], [1]]}}), "named tuple"),
    (lambda d: d["contents"].update({"batch[0]": {"$named": ["A", ["x=print(1)"], [1]]}}), "named tuple"),
    (lambda d: d["contents"].update({"batch[0]": {"$fields": [1]}}), "fields of an object"),
    (lambda d: d["contents"].update({"batch[0]": {"$packed": [1]}}), "cannot be read"),
    (lambda d: d["contents"].update({"rng[0]": {"cpu": 1}}), "random state"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_is_wrong_is_said(broken: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    document = document_of(broken)
    change(document)
    (broken / INCIDENT).write_text(json.dumps(document))
    message = refused(broken)
    assert str(broken) in message
    with pytest.raises(BundleError, match=words):
        read_everything(broken)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is incomplete"),
        (b"\x80\x04\x95", "is incomplete"),
        (b"[1, 2]", "no schema"),
        (b'{"schema": NaN}', "holds NaN"),
        (b"[" * 200_000, "is incomplete"),
        (b'{"schema": 1' + b"0" * 5000 + b"}", "is incomplete"),
    ],
)
def test_other_files_are_refused(broken: Path, text: bytes, words: str) -> None:
    (broken / INCIDENT).write_bytes(text)
    assert words in refused(broken)


def test_missing_files_are_said(broken: Path, tmp_path: Path) -> None:
    (broken / TENSORS).unlink()
    assert f"{TENSORS} is missing" in refused(broken)
    (broken / INCIDENT).unlink()
    assert f"there is no {INCIDENT} in it" in refused(broken)
    assert "there is no such file or folder" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [TENSORS, INCIDENT])
def test_truncated_files_are_refused(broken: Path, name: str) -> None:
    size = (broken / name).stat().st_size
    rng_reader = random.Random(0)
    whole = (broken / name).read_bytes()
    for length in {0, 1, 8, size // 2, size - 1, *(rng_reader.randrange(size) for _ in range(20))}:
        (broken / name).write_bytes(whole[:length])
        refused(broken)


def test_one_flipped_bit_in_the_tensors_is_seen(broken: Path) -> None:
    whole = (broken / TENSORS).read_bytes()
    rng_reader = random.Random(1)
    for place in [0, 9, len(whole) - 1, *(rng_reader.randrange(len(whole)) for _ in range(30))]:
        raw = bytearray(whole)
        raw[place] ^= 1 << rng_reader.randrange(8)
        (broken / TENSORS).write_bytes(raw)
        assert "checksum differs" in refused(broken)


def test_random_bytes_in_the_json_are_read_or_refused(broken: Path) -> None:
    whole = (broken / INCIDENT).read_bytes()
    rng_reader = random.Random(2)
    for _ in range(150):
        raw = bytearray(whole)
        for _ in range(rng_reader.choice([1, 3, 30])):
            raw[rng_reader.randrange(len(raw))] = rng_reader.randrange(256)
        (broken / INCIDENT).write_bytes(raw)
        try:
            read_everything(broken)
        except BundleError:
            continue


def places_in(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, child in children for place in places_in(child, (*at, key)))]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["$tuple", "a", "shape"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_at_any_place_is_read_or_refused(whole: Path, data: st.DataObject) -> None:
    document = document_of(whole)
    for place in data.draw(st.lists(st.sampled_from(places_in(document)[1:]), min_size=1, max_size=2)):
        tree: Any = document
        try:
            for key in place[:-1]:
                tree = tree[key]
            tree[place[-1]] = data.draw(values)
        except (KeyError, IndexError, TypeError):
            continue
    changed = whole.parent / f"changed-{os.getpid()}"
    changed.mkdir(exist_ok=True)
    (changed / INCIDENT).write_text(json.dumps(document))
    if not (changed / TENSORS).exists():
        (changed / TENSORS).write_bytes((whole / TENSORS).read_bytes())
    try:
        read_everything(changed)
    except BundleError:
        return


def test_a_day_is_what_decides_over_what_was_left(tmp_path: Path) -> None:
    assert writing._DAY_S == 86_400
    old, new = tmp_path / "incidents" / "writing-1-0123abcd", tmp_path / "incidents" / "writing-2-0123abcd"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    keep(tmp_path, torch.ones(1))
    assert (old.exists(), new.exists()) == (False, True)
