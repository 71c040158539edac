"""Snapshots on disk: back to the bit, never half, never run."""

from __future__ import annotations

import enum
import errno
import gc
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from nanguard.state.snapshots import codec, disk, files
from nanguard.state.snapshots.disk import DiskStore
from nanguard.state.snapshots.files import FACTS, TENSORS

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
]


def bits(tensor: Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(files._memory(whole))


def identical(a: Any, b: Any) -> bool:
    """The same types all the way down, and the same bits: NaN is NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, dict):
        if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
            return False
        return identical(list(a.items()), list(b.items()))  # the order too
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and identical(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def through_json(tree: Any) -> Any:
    plain, tensors = codec.encode(tree)
    return codec.decode(json.loads(json.dumps(plain, allow_nan=False)), tensors)


# ---- codec

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from(["$tuple", "$tensor", "nan", "__metadata__"])
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 3])])
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.sampled_from(["$dict", "$", "a"]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=3,
)
plain_numpy = npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes() | npst.complex_number_dtypes()
leaves = (
    scalars
    | npst.arrays(plain_numpy | npst.datetime64_dtypes() | npst.unicode_string_dtypes(max_len=4), npst.array_shapes())
    | plain_numpy.flatmap(npst.from_dtype)
    | st.lists(st.floats(width=32), max_size=4).map(torch.tensor)
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(keys, inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | lists.map(deque)
        | lists.map(lambda values: deque(values, 2))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | dicts
        | st.dictionaries(st.text(), inner, max_size=4)
        | dicts.map(OrderedDict)
        | dicts.map(lambda values: defaultdict(list, values))
        | dicts.map(lambda values: defaultdict(None, values))
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    )


@given(st.recursive(leaves, containers, max_leaves=12))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_encoded_comes_back_exactly(tree: Any) -> None:
    assert identical(through_json(tree), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tuple": [1, 2]},
        {"$tensor": "0"},
        {"$dict": [["a", 1]], "b": 2},
        {"a": {"$int": "0xff"}},
        {1: "int", "1": "text", (1, "a"): "tuple", None: 0, b"1": 1, 2.5: 2},
        [float("nan"), -float("nan"), math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308],
        struct.unpack("d", struct.pack("Q", 0x7FF4DEADBEEF0001))[0],
        10**5000,
        -(10**5000),
        [2**63 - 1, 2**63, -(2**63), -(2**63) - 1],
        "\ud800 \x00 é 🙂",
        bytearray(b"\x00\xff"),
        np.str_("a\x00"),
        np.bytes_(b""),
        np.bytes_(b"a\x00"),
        np.array([], dtype=np.float32),
        np.zeros((0, 3), dtype=np.int8),
        np.array(3.0),
        np.arange(12, dtype=">i4").reshape(3, 4).T,
        np.float64("nan"),
        np.datetime64("2024-01-01"),
        np.array(["abc", ""], dtype="<U3"),
        torch.tensor(1.0),
        torch.zeros(0, 3),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_odd_values_come_back_exactly(tree: Any) -> None:
    assert identical(through_json(tree), tree)


def test_one_tensor_in_two_places_is_one_afterwards() -> None:
    tensor = torch.ones(3)
    plain, tensors = codec.encode([tensor, {"again": tensor}])
    assert list(tensors.values()) == [tensor]
    assert tensors["0"] is tensor
    first, second = codec.decode(plain, tensors)
    assert first is second["again"]


def test_random_states_come_back() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()  # leaves a second number for later: part of the state
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }

    def draw() -> list[Any]:
        return [random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()]

    expected = draw()
    back = through_json(states)
    assert identical(back, states)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert draw() == expected


class Warmup:
    """A schedule with a state of its own, as LambdaLR allows."""

    def __init__(self) -> None:
        self.steps = 3

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "LambdaLR of a function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 8]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=lambda x: 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "ChainedScheduler": chained,
    "SequentialLR": sequential,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_every_scheduler_goes_on_as_if_never_stored(name: str, tensor_lr: bool) -> None:
    def make() -> tuple[Any, Any]:
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler = make()
    advance(optimizer, scheduler, 5)
    # What a scheduler's state shares with its optimizer (a tensor learning rate) is stored by value on the disk.
    plain, tensors = codec.encode({"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()})
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    state = codec.decode(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert identical(state["scheduler"], scheduler.state_dict())

    other, resumed = make()
    other.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["scheduler"])
    assert advance(other, resumed, 6) == advance(optimizer, scheduler, 6)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_on_as_if_never_stored(num_workers: int) -> None:
    def loader() -> Any:
        # Not forked: this process has threads, whose locks a forked one would find taken for ever.
        kind = "spawn" if num_workers else None
        data = list(range(20))
        return StatefulDataLoader(
            data, batch_size=2, shuffle=True, num_workers=num_workers, multiprocessing_context=kind
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what torch has deprecated
        torch.manual_seed(7)
        first = loader()
        batches = iter(first)
        for _ in range(3):
            next(batches)
        state = first.state_dict()
        assert identical(through_json(state), state)
        rest = [batch.tolist() for batch in batches]
        second = loader()
        second.load_state_dict(through_json(state))
        assert [batch.tolist() for batch in second] == rest


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"scheduler": {0: {"lr_lambdas": [len]}}}, r"^scheduler\.0\.lr_lambdas\[0\]: a function cannot be kept"),
        ({"a": [1, (2, lambda: 0)]}, r"^a\[1\]\[1\]: a function"),
        ({"colour": Colour.RED}, r"^colour: a \S*Colour "),
        ({"a": Pair(1, 2)}, r"^a: a \S*Pair "),
        ({(1, "x"): object()}, r"^\(1, 'x'\): an object "),
        ({"a": {Colour.RED: 1}}, r"^a\..*: a \S*Colour "),
        ({torch.ones(1): 1}, "a tensor as a key"),
        (object(), "^the state itself: an object "),
        (defaultdict(lambda: 0), "a defaultdict of a function"),
        ({"a": np.array([object()])}, "^a: a numpy.ndarray of dtype object"),
        ({"a": np.zeros(2, dtype=[("x", "f4")])}, "^a: a numpy.ndarray of dtype"),
        ({"a": np.ma.array([1])}, "^a: a numpy.ma.*MaskedArray"),
        ({"a": torch.ones(2).to_sparse()}, "^a: a tensor of layout torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "^a: a meta tensor"),
        ({"a": torch.nn.parameter.UninitializedParameter()}, "^a: a tensor of class UninitializedParameter"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        codec.encode(tree)
    assert "accepted are" in str(caught.value)


def test_what_holds_itself_is_an_error_and_no_crash() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ValueError, match="does it hold itself"):
        codec.encode({"a": tree})


def test_numpy_is_not_needed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.modules['safetensors'] = None\n"
        "import torch; from nanguard.state.snapshots.disk import DiskStore\n"
        "store = DiskStore(sys.argv[1]); store.write(1, {'a': torch.ones(2)}, {'b': (1, torch.zeros(1))})\n"
        "store.confirm(1); print(store.load().facts['b'][0])\n"
        "try: store.write(2, {}, {'f': [print]})\n"
        "except ValueError as error: print(str(error)[:16])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split("\n")[:2] == ["1", "f[0]: a function"], done.stderr


@pytest.mark.parametrize(
    "data",
    [
        {"$os.system": "true"},
        {"$numpy.array": ["|O8", [1], "0"]},
        {"$numpy.scalar": ["|O8", "00" * 8]},
        {"$numpy.scalar": ["|T16", "00" * 16]},
        {"$numpy.array": ["<f4", [7], "0"]},
        {"$dtype": "load"},
        {"$dtype": "__builtins__"},
        {"$device": "nonsense"},
        {"$tensor": "17"},
        {"$tensor": ["0"]},
        {"$defaultdict": ["eval", []]},
        {"$dict": [[[1], 2]]},
        {"$dict": [1]},
        {"$tuple": 3},
        {"$float": "00"},
        {"$bytes": "é"},
        {"$tuple": [], "$set": []},
    ],
    ids=str,
)
def test_what_encode_does_not_write_is_refused_and_not_run(data: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever part of it finds the fault
        codec.decode({"a": [data]}, {"0": torch.zeros(8, dtype=torch.uint8)})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*codec._DECODERS, "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=300, deadline=None)
def test_any_json_is_read_or_refused(data: Any) -> None:
    try:
        codec.decode(data, {"0": torch.zeros(8, dtype=torch.uint8)})
    except ValueError:
        return


# ---- the store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def contents(step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(40, 30, generator=generator)
    return {"weights": weights, "low": weights.bfloat16(), "step": torch.tensor(step)}, {
        "scheduler": {"milestones": Counter({3: 1}), "lr": (0.1, float("nan"))},
        "rng": [torch.get_rng_state()[:16], b"\x00"],
        "step": step,
    }


def add(store: DiskStore, *steps: int) -> None:
    for step in steps:
        store.write(step, *contents(step))
        store.confirm(step)


def is_whole(stored: disk.Stored, step: int) -> bool:
    tensors, facts = contents(step)
    return stored.step == step and identical(stored.tensors, tensors) and identical(stored.facts, facts)


def odd_tensors() -> dict[str, Tensor]:
    raw = torch.arange(256, dtype=torch.uint8)  # every pattern of bits: NaNs of many kinds, infinities, denormals
    tensors = {str(dtype): raw.view(dtype).reshape(2, -1) for dtype in DTYPES if dtype != torch.bool}
    storage = torch.arange(24.0)
    tied = torch.randn(5, 4)
    z = torch.randn(6, dtype=torch.complex64)
    return {
        **tensors,
        "bool": torch.tensor([[True, False], [False, True]]),
        "0-dim": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty in a way": torch.empty(3, 0, 2, dtype=torch.int16),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "every other": torch.arange(10, dtype=torch.bfloat16)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "tied": tied,
        "tied too": tied,
        "tied, another view": tied.view(20),
        "overlapping": storage[:16],
        "overlapping too": storage[8:],
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "parameter": nn.Parameter(torch.randn(3)),
        "channels last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "__metadata__": torch.ones(1),
        "facts/0": torch.ones(2),
        "": torch.ones(3),
        "é\ud800\n": torch.ones(4),
        "larger than a chunk": torch.randint(0, 100, ((files._CHUNK >> 3) + 13,)),
    }


def test_every_kind_of_tensor_comes_back_to_the_bit(folder: Path) -> None:
    tensors = odd_tensors()
    facts = {"also": {1: tensors["tied"], "own": torch.full((2,), -0.0), "numpy": np.arange(3)}}
    store = DiskStore(folder)
    store.write(7, tensors, facts)
    store.confirm(7)
    stored = DiskStore(folder).load()
    assert list(stored.tensors) == list(tensors)
    assert [name for name, tensor in tensors.items() if not identical(tensor.detach(), stored.tensors[name])] == []
    assert identical(stored.facts, facts)
    assert stored.tensors["tied"] is stored.tensors["tied too"]
    assert all(not tensor.requires_grad and tensor.device.type == "cpu" for tensor in stored.tensors.values())
    assert stored.tensors["overlapping"].data_ptr() != stored.tensors["overlapping too"].data_ptr()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = DiskStore(tmp_path_factory.mktemp("any"))
    dtypes = st.sampled_from(DTYPES[:-1])
    raw = st.lists(st.integers(0, 255), max_size=5).map(lambda n: torch.tensor(n * 16, dtype=torch.uint8))
    tensors = data.draw(st.dictionaries(st.text(), st.tuples(raw, dtypes).map(lambda a: a[0].view(a[1])), max_size=5))
    facts = data.draw(st.dictionaries(st.text(), st.recursive(leaves, containers, max_leaves=5), max_size=3))
    step = data.draw(st.integers(0, 10**12))
    store.write(step, tensors, facts)
    store.confirm(step)
    stored = store.load()
    assert stored.step == step
    assert identical(stored.tensors, tensors)
    assert identical(stored.facts, facts)


def test_the_tensor_file_is_safetensors_and_the_other_is_json(folder: Path) -> None:
    tensors = {name: tensor for name, tensor in odd_tensors().items() if "\ud800" not in name}
    store = DiskStore(folder)
    store.write(7, tensors, {"more": torch.ones(9)})
    store.confirm(7)
    read = safetensors.torch.load_file(folder / "step-000000007" / TENSORS)
    for name in ("torch.float32", "torch.bfloat16", "torch.float8_e4m3fn", "torch.int64", "bool", "0-dim", "empty"):
        assert identical(read[name], tensors[name].clone()), name
    assert read["torch.complex128"].shape == (2, 8, 16)  # as bytes, since the format has no such numbers
    assert torch.equal(read["transposed"], tensors["transposed"])
    assert sum(torch.equal(t, torch.ones(9)) for t in read.values()) == 1
    document = json.loads((folder / "step-000000007" / FACTS).read_text())
    assert document["format"] == files.FORMAT
    assert document["step"] == 7
    assert document["size"] == (folder / "step-000000007" / TENSORS).stat().st_size


def test_writing_takes_no_second_copy(folder: Path) -> None:
    tensors = {f"{n}": torch.full((4_000_000,), float(n)) for n in range(12)}  # 192 MB
    tensors["turned"] = tensors["0"].view(2000, 2000).T  # this one is copied: 16 MB
    tensors["tied"] = tensors["1"]
    store = DiskStore(folder)

    def memory(what: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(what))

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    store.write(1, tensors, {})
    assert memory("VmHWM") - before < 60e6
    assert (folder / "step-000000001.unconfirmed" / TENSORS).stat().st_size < 13 * 16e6 + 1e4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2).to_sparse()}, "^a: a tensor of layout"),
        ({"a": 1.0}, "^tensors must be tensors by name, got 'a': float"),
        ({3: torch.ones(1)}, "^tensors must be tensors by name, got 3: Tensor"),
    ],
)
def test_tensors_that_cannot_be_kept_leave_nothing_behind(folder: Path, tensors: Any, message: str) -> None:
    store = DiskStore(folder)
    with pytest.raises(ValueError, match=message):
        store.write(1, tensors, {})
    with pytest.raises(ValueError, match=r"^a\.0: a function"):
        store.write(1, {}, {"a": {0: print}})
    with pytest.raises(ValueError, match="step must be an integer from 0 on, got -1"):
        store.write(-1, {}, {})
    assert os.listdir(folder) == [".lock"]


def test_only_what_is_confirmed_counts(folder: Path) -> None:
    store = DiskStore(folder)
    assert store.steps() == []
    add(store, 3, 20, 100)
    store.write(1000, *contents(1000))
    assert store.steps() == [3, 20, 100]
    assert is_whole(store.load(), 100)
    store.confirm(1000)
    assert is_whole(store.load(), 1000)
    assert is_whole(store.load(999), 100)
    assert is_whole(store.load(20), 20)
    assert is_whole(store.load(4), 3)
    with pytest.raises(FileNotFoundError, match=r"no snapshot of step 2 or before .*there is no confirmed one"):
        store.load(2)
    with pytest.raises(FileNotFoundError, match="no unconfirmed snapshot of step 1,000"):
        store.confirm(1000)


def test_discarding_leaves_what_is_confirmed(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 5)
    store.write(5, {"other": torch.ones(1)}, {})
    store.write(6, *contents(6))
    store.discard(5)
    store.discard(6)
    store.discard(7)
    assert sorted(os.listdir(folder)) == [".lock", "step-000000005"]
    assert is_whole(store.load(), 5)


def test_rewinding_removes_all_that_is_newer(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 1, 2, 3)
    store.write(4, *contents(4))
    store.rewind(1)
    assert sorted(os.listdir(folder)) == [".lock", "step-000000001"]


def test_pruning_keeps_the_newest_and_the_unconfirmed(folder: Path) -> None:
    store = DiskStore(folder)
    store.write(0, *contents(0))
    add(store, 1, 2, 3, 4)
    store.prune(2)
    assert store.steps() == [3, 4]
    store.prune(1)
    store.prune(1)
    assert sorted(os.listdir(folder)) == [".lock", "step-000000000.unconfirmed", "step-000000004"]
    with pytest.raises(ValueError, match="keep must be 1 or more, got 0"):
        store.prune(0)
    assert store.steps() == [4]


def test_pruning_never_leaves_a_damaged_one_alone(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 1, 2)
    (folder / "step-000000002" / TENSORS).unlink()
    assert is_whole(store.load(), 1)
    store.prune(1)
    assert is_whole(store.load(), 1)
    add(store, 2)  # what comes in its place counts again
    store.prune(1)
    assert is_whole(store.load(), 2)
    assert store.steps() == [2]


def test_a_step_written_again_replaces_the_first_when_confirmed(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 5)
    for again in range(3):
        store.write(5, {"again": torch.tensor(again)}, {})
        store.write(5, {"again": torch.tensor(again + 10)}, {})  # an unconfirmed one is replaced at once
        if again == 0:
            assert is_whole(store.load(), 5)
        store.confirm(5)
        assert store.load().tensors["again"] == again + 10
        assert store.steps() == [5]
        assert len([name for name in os.listdir(folder) if name.startswith("step")]) == 1


def stages(monkeypatch: pytest.MonkeyPatch, fail_at: int, error: BaseException | None) -> list[str]:
    """Counts what goes to the disk, and raises at one of them."""
    seen: list[str] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[-1])
            seen.append(f"{name} {Path(what).name}")
            if error is not None and len(seen) - 1 == fail_at:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for name in ("fsync", "rename"):
        watch(os, name)
    return seen


def test_all_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(folder)
    add(store, 5)
    seen = stages(monkeypatch, -1, None)
    store.write(5, *contents(5))
    assert seen[:2] == [f"fsync {TENSORS}", f"fsync {FACTS}"]
    assert seen[2].startswith("fsync writing-")
    assert seen[3:] == ["rename step-000000005.1.unconfirmed", "fsync snapshots"]
    seen.clear()
    store.confirm(5)
    assert seen[:2] == ["rename step-000000005.1", "fsync snapshots"]  # only then does the old one go
    assert seen[2].startswith("rename trash-")
    assert seen[3:] == ["fsync snapshots"]


@pytest.mark.parametrize("fail_at", range(9))
@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_wherever_it_fails_a_good_one_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: BaseException
) -> None:
    store = DiskStore(folder)
    add(store, 4, 5)
    with monkeypatch.context() as patch:
        seen = stages(patch, fail_at, error)
        with pytest.raises(type(error)):
            store.write(5, {"new": torch.ones(1)}, {})
            assert sorted(os.listdir(folder)) == [
                ".lock",
                "step-000000004",
                "step-000000005",
                "step-000000005.1.unconfirmed",
            ]
            store.confirm(5)
        assert len(seen) == fail_at + 1
    if fail_at < 5:
        assert sorted(os.listdir(folder)) == [".lock", "step-000000004", "step-000000005"]
    stored = store.load()
    assert "new" in stored.tensors if fail_at > 5 else is_whole(stored, 5)
    add(store, 5)
    store.prune(2)
    assert store.steps() == [4, 5]
    assert is_whole(store.load(), 5)


def test_a_full_disk_is_an_error_and_leaves_good_ones_alone(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 100, 1 << 20):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(OSError, match="File too large"):
                    store.write(2, {"a": torch.ones(1 << 20)}, {})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert sorted(os.listdir(folder)) == [".lock", "step-000000001"]
    finally:
        signal.signal(signal.SIGXFSZ, handler)
    add(store, 2)
    assert is_whole(store.load(), 2)


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file" / "below")


# ---- damage


def damaged(folder: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> str:
    """Spoils the newest of three, checks that the one before is used, and returns the warning."""
    store = DiskStore(folder)
    if store.steps() != [10, 20, 30]:
        add(store, 10, 20, 30)
    path = folder / "step-000000030"
    saved = {name: (path / name).read_bytes() for name in (TENSORS, FACTS)}
    spoil(path)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nanguard"):
        stored = DiskStore(folder).load()
    for name, raw in saved.items():
        (path / name).write_bytes(raw)
    assert is_whole(stored, 20)
    (record,) = caplog.records
    assert record.name == "nanguard"
    assert "step 30 is damaged" in record.getMessage()
    assert record.getMessage().endswith("; step 20 is used instead")
    return record.getMessage()


@pytest.mark.parametrize("name", [TENSORS, FACTS])
def test_a_file_cut_short_is_seen(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    add(DiskStore(folder), 10, 20, 30)
    size = (folder / "step-000000030" / name).stat().st_size
    rng_reader = random.Random(0)
    for length in {0, 1, 7, 8, 9, size // 2, size - 1, *(rng_reader.randrange(size) for _ in range(40))}:
        assert name in damaged(folder, lambda path, n=length: os.truncate(path / name, n), caplog)


@pytest.mark.parametrize("name", [TENSORS, FACTS])
def test_one_flipped_bit_is_seen(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    add(DiskStore(folder), 10, 20, 30)
    size = (folder / "step-000000030" / name).stat().st_size
    rng_reader = random.Random(1)
    for place in [*range(100), size - 1, *(rng_reader.randrange(size) for _ in range(100))]:

        def flip(path: Path, place: int = place) -> None:
            raw = bytearray((path / name).read_bytes())
            raw[place] ^= 1 << rng_reader.randrange(8)
            (path / name).write_bytes(raw)

        damaged(folder, flip, caplog)


def test_junk_behind_a_file_is_seen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (TENSORS, FACTS):
        assert name in damaged(folder, lambda path, n=name: append(path / n, b" "), caplog)


def append(path: Path, more: bytes) -> None:
    with path.open("ab") as file:
        file.write(more)


def test_files_of_another_snapshot_are_seen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = folder / "step-000000020"
    message = damaged(folder, lambda path: shutil.copy(other / TENSORS, path), caplog)
    assert "its checksum differs" in message
    message = damaged(folder, lambda path: [shutil.copy(other / n, path) for n in (TENSORS, FACTS)], caplog)
    assert f"{FACTS} is one of step 20" in message


def test_a_missing_file_is_seen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (TENSORS, FACTS):
        assert f"{name} is missing" in damaged(folder, lambda path, n=name: (path / n).unlink(), caplog)


def reseal(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Alters facts.json and makes its checksum right again, as someone who means harm would."""
    document = json.loads((path / FACTS).read_bytes())
    del document["format"], document["sha256"]
    change(document)
    (path / FACTS).unlink()
    files._write_facts(path / FACTS, document)


def test_an_unknown_version_is_not_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def newer(path: Path) -> None:
        raw = (path / FACTS).read_bytes()
        (path / FACTS).write_bytes(raw.replace(b'{"format": 2,', b'{"format": 3,', 1))

    assert "it has format 3, and this nanguard reads format 2" in damaged(folder, newer, caplog)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(facts={"$reduce": ["os.system", ["touch PWNED"]]}),
        lambda d: d.update(facts={"a": {"$numpy.array": ["|O8", [1], "0"]}}),
        lambda d: d.update(facts=[1]),
        lambda d: d.update(facts=None),
        lambda d: d.update(header=1 << 50),
        lambda d: d.update(header=-5),
        lambda d: d.update(index=[]),
        lambda d: d["index"]["weights"].update(shape=[1 << 50]),
        lambda d: d["index"]["weights"].update(shape=[-40, -30]),
        lambda d: d["index"]["weights"].update(shape=[30.0, 40]),
        lambda d: d["index"]["weights"].update(dtype="load"),
        lambda d: d["index"]["weights"].update(dtype="int32", shape="x"),
        lambda d: d["tensors"].update(weights="../../secret"),
        lambda d: d.pop("tensors_sha256"),
        lambda d: d.clear() or d.update(a=1),
    ],
)
def test_facts_made_by_someone_else_run_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], Any]
) -> None:
    damaged(folder, lambda path: reseal(path, change), caplog)


def test_facts_nested_without_end_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def nest(path: Path) -> None:
        rest = b'"step": 30, "facts": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
        digest = files.hashlib.sha256(rest).hexdigest().encode()
        (path / FACTS).write_bytes(b'{"format": 2, "sha256": "' + digest + b'", ' + rest)

    damaged(folder, nest, caplog)


def test_when_none_is_sound_the_error_says_what_was_looked_at(folder: Path) -> None:
    store = DiskStore(folder)
    add(store, 10, 20)
    (folder / "step-000000010" / FACTS).unlink()
    os.truncate(folder / "step-000000020" / TENSORS, 100)
    with pytest.raises(FileNotFoundError) as caught:
        store.load()
    assert f"step 10: {FACTS} is missing" in str(caught.value)
    assert f"step 20: {TENSORS} has 100 bytes instead of" in str(caught.value)
    assert str(folder) in str(caught.value)


def test_other_names_in_the_folder_are_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(folder)
    add(store, 10)
    junk = ["step-1", "step-000000010.0", "step-0000000010", "step-000000010.bak", "step-٠٠٠٠٠٠٠١١", "notes", "trash"]
    junk += ["step-000000099.unconfirmed.old", "writing-", "trash-1-zzzzzzzz", "step-000000011.01", "step--00000001"]
    for name in junk:
        (folder / name).mkdir()
    (folder / "run.jsonl").write_text("")
    (folder / "step-000000012").write_text("a file, where there should be a folder")
    (folder / "step-000000013").mkdir()
    (folder / "step-000000014").symlink_to(folder / "nowhere")
    del store
    store = DiskStore(folder)
    assert store.steps() == [10, 12, 13, 14]
    assert is_whole(store.load(), 10)
    assert [record.getMessage().split(" is damaged")[0] for record in caplog.records] == [
        "snapshot of step 14",
        "snapshot of step 13",
        "snapshot of step 12",
    ]
    store.rewind(10)
    store.prune(1)
    assert sorted(os.listdir(folder)) == sorted([*junk, "run.jsonl", ".lock", "step-000000010"])


# ---- opening


def leave(folder: Path) -> list[str]:
    """What a process that died at several moments would leave."""
    names = ["writing-1-0123abcd", "trash-99999-0123abcd", "step-000000050.unconfirmed", "step-000000010.1.unconfirmed"]
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / TENSORS).write_bytes(b"half")
    return names


def test_opening_removes_what_was_left_unfinished(folder: Path) -> None:
    add(DiskStore(folder), 10)
    gc.collect()
    leave(folder)
    store = DiskStore(folder)
    assert sorted(os.listdir(folder)) == [".lock", "step-000000010"]
    assert is_whole(store.load(), 10)


def test_opening_removes_nothing_of_one_who_lives(folder: Path) -> None:
    first = DiskStore(folder)
    add(first, 10)
    first.write(20, *contents(20))
    left = leave(folder)
    second = DiskStore(folder)
    second.write(30, *contents(30))
    assert set(left) < set(os.listdir(folder))
    first.confirm(20)
    second.confirm(30)
    assert is_whole(first.load(20), 20)
    assert is_whole(first.load(), 30)
    second.write(40, *contents(40))
    del first
    gc.collect()
    second.write(60, *contents(60))  # alone now: what others left goes, what is its own stays
    second.confirm(40)
    second.confirm(60)
    assert sorted(os.listdir(folder)) == [".lock", *(f"step-0000000{n}" for n in (10, 20, 30, 40, 60))]


def test_a_living_process_is_known_by_its_lock(folder: Path) -> None:
    code = (
        "import sys, torch; from nanguard.state.snapshots.disk import DiskStore; store = DiskStore(sys.argv[1]);"
        "store.write(5, {'a': torch.ones(2)}, {}); print('ready', flush=True); sys.stdin.read()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        DiskStore(folder)
        assert "step-000000005.unconfirmed" in os.listdir(folder)
    finally:
        writer.kill()
        writer.communicate()
    DiskStore(folder)
    assert os.listdir(folder) == [".lock"]


def test_a_worker_that_outlives_its_parent_holds_no_lock(folder: Path) -> None:
    code = (
        "import os, sys, signal, time, torch; from nanguard.state.snapshots.disk import DiskStore\n"
        "store = DiskStore(sys.argv[1]); store.write(5, {'a': torch.ones(2)}, {})\n"
        "if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(600)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())  # told by the worker, once it runs
    parent.stdout.close()
    try:
        parent.wait()
        os.kill(worker, 0)  # it lives
        DiskStore(folder)
        assert os.listdir(folder) == [".lock"]
    finally:
        os.kill(worker, signal.SIGKILL)


def test_where_nothing_can_be_locked_only_what_is_old_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def cannot(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", cannot)
    names = leave(folder)
    for name in names[:2]:
        os.utime(folder / name, (0, 0))
    store = DiskStore(folder)
    add(store, 10)
    assert sorted(os.listdir(folder)) == sorted([".lock", "step-000000010.2", "step-000000050.unconfirmed"])
    assert is_whole(store.load(), 10)


def test_what_cannot_be_removed_is_told_and_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(folder)
    add(store, 1, 2)

    def cannot(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cannot)
        store.prune(1)
    assert "cannot remove" in caplog.text
    assert store.steps() == [2]
    del store
    gc.collect()
    DiskStore(folder)
    assert sorted(os.listdir(folder)) == [".lock", "step-000000002"]


def test_killed_200_times_the_newest_good_one_always_loads(folder: Path) -> None:
    driver = Path(__file__).with_name("kill9.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(driver), str(folder), "200", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["troubles"] == []
    assert found["kills"] == 200
    assert sum(found["phases"].values()) == 200
    unfinished = sum(count for phase, count in found["phases"].items() if phase != "nothing unfinished")
    assert unfinished >= 60, found["phases"]
