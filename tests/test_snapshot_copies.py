"""Copies of a training state: equal to the bit, out of training's way, and put back; and the memory they take."""

from __future__ import annotations

import copy
import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import TinyNet, loss_fn, make_batches
from nanguard import Guard
from nanguard.errors import ProtocolError
from nanguard.state.snapshots import bulk, copies, memory, packing
from nanguard.state.snapshots.copies import Copier, Copies, write_back

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
MIB = 1 << 20


def some_state(device: str = "cpu") -> dict[str, Tensor]:
    """Every kind of tensor a state may hold."""
    g = torch.Generator().manual_seed(3)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    return {
        "weight": nn.Parameter(new(40, 30)),
        "bf16": new(33).bfloat16(),
        "fp16": new(7, 5).half(),
        "fp64": new(3).double(),
        "complex": torch.complex(new(4), new(4)),
        "mask": new(11) > 0,
        "int": torch.arange(9, device=device),
        "fp8": new(6).to(torch.float8_e4m3fn),
        "uint16": torch.arange(5, device=device).to(torch.uint16),
        "scalar": torch.tensor(5.0, device=device),
        "empty": torch.empty(0, 3, device=device),
        "channels_last": new(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": new(6, 4).t(),
        "gaps": new(8, 8)[:, ::2],
        "expanded": new(1, 4).expand(3, 4),
        "odd nan": torch.tensor([0x7FC1, 0x7F81, 0x3F80], dtype=torch.int16, device=device).view(torch.bfloat16),
        "sparse": torch.eye(3, device=device).to_sparse(),
        "step": torch.tensor(7.0),
        "rng": torch.get_rng_state(),
    }


def bits(tensor: Tensor) -> Tensor:
    """To compare NaNs, and dtypes that cannot be compared."""
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def noted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: bits(tensor).clone() for name, tensor in state.items()}


def spoil(state: dict[str, Tensor]) -> None:
    """Changes every tensor in place."""
    with torch.no_grad():
        for name, tensor in state.items():
            if name == "expanded":
                tensor[0].add_(1)
            elif tensor.layout is not torch.strided:
                tensor.mul_(2)
            elif tensor.numel():
                tensor.copy_((tensor.float() + 1 if not tensor.is_complex() else tensor + 1).to(tensor.dtype))


def differing(state: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(bits(state[name]), expected[name])]


class Instant:
    """A stream, or an event, of a GPU on which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = record = synchronize = _nothing

    def query(self) -> bool:
        return True


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a Copier that takes the CPU for a GPU: every way of copying, without what only a GPU can show."""
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Instant)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(copies, "_pinned", lambda size: torch.full((size,), 205, dtype=torch.uint8))

    def make(where: Any) -> Copier:
        copier = Copier(CPU, where)
        copier._on_cuda, copier._reader = True, Instant()
        return copier

    return make


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes so small that the state of a test needs several chunks and parcels, and tensors are large."""
    monkeypatch.setattr(packing, "_CHUNK", 2048)
    monkeypatch.setattr(packing, "_PARCEL", 1024)
    monkeypatch.setattr(bulk, "_ALONE", 700)


# ── On the CPU, and in pretence ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_state_comes_back_to_the_bit(where: Any) -> None:
    state = some_state()
    before = noted(state)
    copier = Copier(CPU, where)
    copied = copier.take(state, at_once=["weight"])
    copier.fence()
    spoil(state)
    assert len(differing(state, before)) >= len(state) - 1  # nothing can be changed in an empty tensor
    assert copied.ready()
    copied.wait()
    assert copied.names == tuple(state)
    assert copied.nbytes == memory.state_bytes(state)
    assert differing({name: copied[name] for name in copied.names}, before) == []
    copied.put_back(state)
    assert differing(state, before) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("at_once", [(), ("mask", "channels_last", "step", "weight", "unheard of"), ("int",)], ids=str)
def test_every_way_of_copying_keeps_every_bit(pretend: Any, where: Any, at_once: Any) -> None:
    state = some_state()
    copier = pretend(where)
    copied: Copies | None = None
    for _ in range(3):  # into fresh memory, and twice into the same
        spoil(state)
        before = noted(state)
        last, copied = copied, copier.take(state, copied, at_once=at_once)
        assert last in (None, copied)
        spoil(state)
        assert differing({name: copied[name] for name in copied.names}, before) == []
    assert copied is not None
    assert copied.nbytes == memory.state_bytes(state) <= copied.held_bytes
    copied.put_back({name: state[name] for name in ("weight", "mask", "gaps")})
    assert set(differing(state, before)).isdisjoint({"weight", "mask", "gaps"})
    assert "bf16" in differing(state, before)
    copied.put_back(state)
    assert differing(state, before) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", ["device", "host"])
def test_copies_are_cast_to_what_the_state_has_become(pretend: Any, where: Any) -> None:
    then = {"a": torch.randn(40, 20).bfloat16(), "b": torch.randn(3, 4, 2, 2).half(), "c": torch.arange(5)}
    copied = pretend(where).take(then)
    now = {
        "a": nn.Parameter(torch.zeros(40, 20)),
        "b": torch.zeros(3, 4, 2, 2).to(memory_format=torch.channels_last),
        "c": torch.zeros(5, dtype=torch.int32),
    }
    copied.put_back(now)
    assert all(torch.equal(now[name].detach(), then[name].to(now[name].dtype)) for name in then)


@pytest.mark.parametrize("pretended", [False, True])
@pytest.mark.parametrize("where", ["device", "host"])
def test_what_does_not_fit_is_named_before_anything_is_written(pretend: Any, where: Any, pretended: bool) -> None:
    state = {"first": torch.ones(3), "layers.0.weight": torch.ones(4, 2)}
    copied = (pretend(where) if pretended else Copier(CPU, where)).take(state)
    live = {"first": torch.zeros(3), "layers.0.weight": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match=r"layers\.0\.weight has shape \(4, 3\) now and had \(4, 2\)"):
        copied.put_back(live)
    with pytest.raises(KeyError, match=r"layers\.1\.weight"):
        copied.put_back({"first": live["first"], "layers.1.weight": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match="nothing was written"):
        write_back(state, live)
    with pytest.raises(KeyError, match="new"):
        write_back(state, {"first": live["first"], "new": torch.zeros(4, 2)})
    assert live["first"].tolist() == [0, 0, 0]
    write_back(state, {"first": live["first"]})
    assert live["first"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["device", "host"])
def test_memory_is_used_again_where_it_fits_and_given_up_where_not(pretend: Any, where: Any) -> None:
    for copier in (pretend(where), Copier(CPU, where)):
        state = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
        first = copier.take(state)
        place = first["a"].data_ptr()
        state["a"] = torch.ones(4)
        again = copier.take(state, first)
        assert again is first
        assert again["a"].data_ptr() == place
        assert again["a"].tolist() == [1] * 4
        state["c"] = torch.ones(1)
        other = copier.take(state, again)
        assert again.names == ()
        assert not again.ready()
        assert other.names == ("a", "b", "c")
        state["b"] = torch.full((2, 2), 2.0, dtype=torch.float64)
        last = copier.take(state, other)
        assert last["b"].dtype is torch.float64
        assert last["b"].tolist() == [[2, 2], [2, 2]]
        with pytest.raises(ProtocolError, match=r"call take\(\) first"):
            again.put_back({})


def test_memory_can_be_had_before_it_is_needed(pretend: Any) -> None:
    state = {"a": torch.ones(4)}
    for copier in (pretend("host"), pretend("device"), Copier(CPU, "host")):
        reserved = copier.reserve(state)
        assert not reserved.ready()
        with pytest.raises(ProtocolError, match=r"call take\(\) first"):
            reserved.put_back(state)
        assert copier.take(state, reserved) is reserved
        assert reserved.ready()


@pytest.mark.usefixtures("small")
def test_a_copy_to_the_host_takes_one_parcel_of_device_memory(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the state: what we hold there, training cannot use."""
    state = {f"t{i}": torch.full((100,), float(i)) for i in range(200)}
    copier, taken = pretend("host"), []
    empty = copier.image
    monkeypatch.setattr(copier, "image", lambda nbytes: taken.append(nbytes) or empty(nbytes))
    copier.take(state, at_once=[f"t{i}" for i in range(0, 200, 3)])
    assert sum(taken) <= packing._PARCEL


@pytest.mark.usefixtures("small")
def test_a_state_is_put_back_whole_if_device_memory_runs_out_on_the_way(
    pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = some_state()
    before = noted(state)
    copier = pretend("host")
    copied = copier.take(state)
    spoil(state)
    images = iter(range(100))

    def image(nbytes: int) -> Tensor:
        if next(images) >= 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(copier, "image", image)
    copied.put_back(state)
    assert next(images) > 2, "there was more than one image to make"
    assert differing(state, before) == []


def test_inference_mode_and_gradients_are_no_hindrance() -> None:
    state = {"p": nn.Parameter(torch.ones(3)), "b": torch.ones(2)}
    copier = Copier(CPU, "device")
    with torch.inference_mode():
        copied = copier.take(state)
    assert not copied["p"].is_inference()
    assert not copied["p"].requires_grad
    with torch.no_grad():
        state["p"].zero_()
    copied = copier.take(state, copied)
    copied.put_back(state)
    assert state["p"].requires_grad
    assert state["p"].is_leaf
    assert state["p"].tolist() == [0, 0, 0]


def test_a_write_is_counted_by_torch() -> None:
    """The guard's own undo goes by torch's count of writes."""
    state = {"small": torch.ones(3)}
    copied = Copier(CPU, "device").take(state)
    before = state["small"]._version
    copied.put_back(state)
    assert state["small"]._version > before


def test_a_training_run_goes_on_from_a_copy_as_it_did() -> None:
    model = TinyNet()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = make_batches(8)

    def train(some: list[Any]) -> None:
        for batch in some:
            torch.manual_seed(1)
            loss_fn(model, batch).backward()
            copier.fence()
            opt.step()
            opt.zero_grad()

    def live() -> dict[str, Tensor]:
        moments = {f"{i}.{key}": value for i, s in enumerate(opt.state.values()) for key, value in s.items()}
        return {**model.state_dict(keep_vars=True), **moments}

    copier = Copier(CPU, "host")
    train(batches[:4])
    copied = copier.take(live())
    train(batches[4:])
    end = noted(live())
    copied.put_back(live())
    assert differing(live(), end) != []
    train(batches[4:])
    assert differing(live(), end) == []


# ── Packing ──────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5000), max_size=60),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float64]),
)
def test_every_tensor_has_a_place_of_its_own(sizes: list[int], pinned: bool, dtype: torch.dtype) -> None:
    live = {f"t{i}": torch.empty(size, dtype=dtype, device="meta") for i, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_CHUNK", 4096)
        places, chunks = packing.pack(live, pinned=pinned)
    assert {place.name for place in places} == set(live)
    assert [(p.chunk, p.start) for p in places] == sorted((p.chunk, p.start) for p in places)
    for place, following in itertools.pairwise(places):
        assert following.chunk > place.chunk or following.start >= place.start + place.nbytes
    assert all(place.start % 256 == 0 and place.start + place.nbytes <= chunks[place.chunk] for place in places)
    if pinned:
        assert all(size & (size - 1) == 0 for size in chunks)


def shapes_of_a_gpt(layers: int, width: int, vocabulary: int = 50304) -> list[int]:
    return [vocabulary * width, *[n for _ in range(layers) for n in (3 * width**2, width**2, 4 * width**2, width)]]


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        pytest.param(shapes_of_a_gpt(18, 2048), 1.01, id="1B"),
        pytest.param(shapes_of_a_gpt(12, 768), 1.03, id="124M"),
        pytest.param(shapes_of_a_gpt(20, 2080), 1.04, id="a width that is no power of two"),
        pytest.param([340_000_000], 1.06, id="one large table"),
        pytest.param([17_300_000] * 40, 1.04, id="each just over half a chunk"),
        pytest.param([60_000 + 7 * i for i in range(1000)], 1.02, id="3,000 small ones"),
    ],
)
def test_pinned_chunks_waste_little(sizes: list[int], most: float) -> None:
    live = {f"{i}.{kind}": torch.empty(n, device="meta") for i, n in enumerate(sizes) for kind in "pmv"}
    places, chunks = packing.pack(live, pinned=True)
    assert sum(chunks) <= most * memory.state_bytes(live)
    assert len(chunks) < 200
    _, exact = packing.pack(live, pinned=False)
    assert sum(exact) <= 1.005 * memory.state_bytes(live)


def test_small_tensors_travel_together_and_large_ones_alone() -> None:
    sizes = [7 * MIB, 5 * MIB, *[MIB // 4] * 70]
    live = {str(i): torch.empty(size, dtype=torch.uint8, device="meta") for i, size in enumerate(sizes)}
    places, chunks = packing.pack(live, pinned=True)
    held = Copies(
        Copier(CPU, "host"), tuple(live), places, [torch.empty(c, dtype=torch.uint8, device="meta") for c in chunks], {}
    )
    parcels = held.parcels(live)
    assert sorted(place.name for parcel in parcels for place in parcel.places) == sorted(live)
    assert [len(parcel.places) for parcel in parcels if parcel.nbytes >= 4 * MIB][:2] == [1, 1]
    assert len(parcels) <= 7
    assert all(parcel.nbytes <= 8 * MIB for parcel in parcels)
    assert [len(parcel.places) for parcel in held.parcels({"10", "12"})] == [1, 1]


# ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_size_of_a_state_is_known_before_the_first_step(name: str) -> None:
    model = TinyNet(200)
    opt = OPTIMIZERS[name](model.parameters())
    named = dict(model.state_dict(keep_vars=True))
    held = {f"{i}.{k}": v for i, s in enumerate(opt.state.values()) for k, v in s.items() if torch.is_tensor(v)}
    expected = memory.expected_state_bytes([opt], {**named, **held})
    loss_fn(model, make_batches(1)[0]).backward()
    opt.step()
    held = {f"{i}.{k}": v for i, s in enumerate(opt.state.values()) for k, v in s.items() if torch.is_tensor(v)}
    actual = memory.state_bytes({**named, **held})
    assert 0 <= actual - expected <= 100  # step counters and the like
    assert memory.expected_state_bytes([opt], {**named, **held}) == actual


def test_sizes_are_said_in_words() -> None:
    sizes = [0, 1023, 1024, MIB - 1, 1288490189, 12_000_000_000, 3 << 40]
    assert [memory.human(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.2 GiB", "11.2 GiB", "3.0 TiB",
    ]  # fmt: skip


def test_what_is_free_is_asked_of_the_system(tmp_path: Path) -> None:
    on_host = memory.free_bytes("host", CPU)
    assert on_host is None or on_host > 0
    assert memory.free_bytes("device", CPU) is None or on_host is not None
    on_disk = memory.free_bytes("disk", CPU, tmp_path / "not" / "there yet")
    assert on_disk is not None
    assert on_disk > 0
    assert memory.free_bytes("device", torch.device("meta")) is None


def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    mine, root = tmp_path / "cgroup", tmp_path / "fs"
    group = root / "pod" / "box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    (root / "pod" / "memory.max").write_text("5000\n")
    (root / "pod" / "memory.current").write_text("4000\n")
    (root / "pod" / "memory.stat").write_text("anon 3000\ninactive_file 700\n")
    mine.write_text("0::/pod/box\n")
    assert memory._free_in_cgroups(mine, root) == [1700]
    old = root / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("900")
    (old / "memory.usage_in_bytes").write_text("1000")
    mine.write_text("5:cpu,cpuacct:/x\n4:memory:/not/visible/here\n")
    assert memory._free_in_cgroups(mine, root) == [0]
    assert memory._free_in_cgroups(tmp_path / "none", root) == []


@pytest.mark.parametrize(
    ("free", "sharers", "kept"),
    [
        (None, 1, 2),  # nobody says
        (12_000, 1, 2),  # a quarter holds two and the one in the making
        (11_999, 1, 1),
        (8_000, 1, 1),
        (7_999, 1, 0),  # one alone is of no use: it could never be replaced
        (0, 1, 0),
        (8 * 12_000, 8, 2),  # eight ranks of one machine each take their share
        (8 * 12_000 - 1, 8, 1),
        (8 * 12_000, 16, 0),
    ],
)
def test_the_ring_takes_a_quarter_of_what_is_free_at_most(free: int | None, sharers: int, kept: int) -> None:
    assert memory.ring_that_fits(1_000, keep=2, free=free, sharers=sharers) == kept
    if free is not None and kept:
        assert (kept + 1) * 1_000 * sharers <= free / 4


def test_a_model_of_seven_billion_parameters_has_the_same_budget() -> None:
    """fp32 weights and both moments of Adam; one snapshot is always in the making."""
    each, gib = 7_000_000_000 * 4 * 3, 1 << 30
    assert memory.ring_that_fits(each, keep=2, free=2_000 * gib) == 2
    assert memory.ring_that_fits(each, keep=2, free=700 * gib) == 1
    assert memory.ring_that_fits(each, keep=2, free=512 * gib) == 0
    assert memory.ring_that_fits(each, keep=2, free=2_000 * gib, sharers=8) == 0
    assert memory.ring_that_fits(each, keep=2, free=1_800 * gib, reserved=3 * each) == 1
    assert memory.ring_that_fits(each, keep=2, free=1_000 * gib, reserved=3 * each) == 0


def test_several_rings_of_a_process_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = memory.HostMemory.reserved()
    model = torch.nn.Linear(64, 64)
    each = 2 * memory.state_bytes(dict(model.named_parameters()))  # SGD with momentum
    monkeypatch.setattr(memory, "free_bytes", lambda *args, **kwargs: 4 * (before + 4 * each) + 4 * 4096)
    models = [copy.deepcopy(model) for _ in range(2)]
    guards = [Guard(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), precision="fp32") for m in models]
    for guard, m in zip(guards, models, strict=True):
        guard.step(lambda m, x: m(x).sum(), torch.ones(2, 64))
        assert m is guard.model
    assert guards[0].snapshots
    assert guards[1].snapshots == (), "the first has taken what there is for all"
    assert before < memory.HostMemory.reserved() <= before + 4 * each + 4096
    del guards, guard
    gc.collect()
    assert memory.HostMemory.reserved() == before


@pytest.mark.parametrize(("told", "sharers"), [("", 8), ("4", 4), ("16", 8), ("0", 8), ("many", 8)])
def test_ranks_of_other_machines_do_not_share_this_ones_memory(
    monkeypatch: pytest.MonkeyPatch, told: str, sharers: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert memory.sharers_of_host(8) == sharers


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),  # pinning
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("expected scalar type Float"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: Exception, is_so: bool) -> None:
    assert memory.is_out_of_memory(error) is is_so


def test_what_does_not_fit_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 20 << 30)
    memory.require_fit(20 << 30, "device", CPU)
    with pytest.raises(ValueError) as told:  # noqa: PT011
        memory.require_fit(36 << 30, "device", torch.device("cuda", 0), each=12 << 30, keep=2)
    assert str(told.value) == (
        "snapshots need 36.0 GiB (3 of 12.0 GiB) and 20.0 GiB are free on cuda:0: "
        "keep fewer than 2, where='host', where='disk', or none, with snapshots=None"
    )
    with pytest.raises(ValueError, match=r"are free in host memory: where='disk', or none"):
        memory.require_fit(36 << 30, "host", CPU, keep=1)
    with pytest.raises(ValueError, match=r"snapshots need 36\.0 GiB and 20\.0 GiB are free in .*x: or none"):
        memory.require_fit(36 << 30, "disk", CPU, folder=tmp_path / "x")
    monkeypatch.setattr(memory, "free_bytes", lambda *_: None)
    memory.require_fit(1 << 60, "host", CPU)


# ── On a GPU ─────────────────────────────────────────────────────────────────────────────────────────────

WAYS = ["device", "host"]


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def large_state(nbytes: int, tensors: int) -> dict[str, Tensor]:
    """One dtype, several sizes: memcpys, kernels for many, and parcels."""
    sizes = [2 ** (i % 8) for i in range(tensors)]
    unit = nbytes // 4 // sum(sizes)
    return {f"t{i}": torch.full((unit * size,), float(i), device="cuda") for i, size in enumerate(sizes)}


def busy(milliseconds: int = 50) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(1_700_000 * milliseconds))


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_a_state_of_every_kind_comes_back_to_the_bit(where: Any) -> None:
    state = some_state("cuda")
    copier = Copier(torch.device("cuda"), where)
    copied: Copies | None = None
    for _ in range(3):
        spoil(state)
        before = noted(state)
        copied = copier.take(state, copied, at_once=("mask", "channels_last"))
        copier.fence()
        spoil(state)
        copied.wait()
        assert differing({name: copied[name] for name in copied.names}, before) == []
    assert copied is not None
    copied.put_back(state)
    assert differing(state, before) == []
    assert copied["weight"].device.type == ("cuda" if where == "device" else "cpu")
    assert copied["weight"].is_pinned() == (where == "host")


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_nothing_syncs(where: Any) -> None:
    state = {**some_state("cuda"), **large_state(256 * MIB, 50)}
    state.pop("sparse")  # cloning one syncs
    before = noted(state)
    copier = Copier(torch.device("cuda"), where)
    at_once = ("mask", "channels_last", "t3")
    copied, fresh = copier.take(state), copier.reserve(state)
    copied.wait()
    busy(200)
    with syncs_are_errors():
        again = copier.take(state, copied, at_once=at_once)
        copier.fence()
        copier.take(state, fresh, at_once=at_once)
        was_ready = again.ready() or fresh.ready()
        copier.fence()
        copier.fence()
        on_device = {name: tensor for name, tensor in state.items() if tensor.is_cuda}
        again.put_back(on_device)
        fresh.put_back(on_device)
        copier.take(state)  # memory can be taken without a sync, too
    assert not was_ready, "the host has waited for the device"
    fresh.wait()
    assert differing({name: fresh[name] for name in fresh.names}, before) == []
    assert differing(state, before) == []


@pytest.mark.cuda
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("where", WAYS)
def test_gpu_the_copy_is_of_the_moment_it_was_taken(where: Any, reuse: bool) -> None:
    """What was queued before is in it; what comes after the fence is not, however slow the copy is."""
    state = large_state(2048 * MIB, 60)
    copier = Copier(torch.device("cuda"), where)
    copied = copier.reserve(state)
    for value in range(6):
        busy(20)
        for tensor in state.values():
            tensor.fill_(value)  # long after the host has called take()
        with torch.cuda.stream(copier._reader):
            busy(30)  # long after training could have gone on
        copied = copier.take(state, copied if reuse else None, at_once=("t0",))
        state["t0"].fill_(-1.0)
        copier.fence()
        for tensor in state.values():
            tensor.fill_(-1.0)
        copied.wait()
        wrong = {name: copied[name].unique().tolist() for name in copied.names if (copied[name] != value).any()}
        assert wrong == {}


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_without_the_fence_the_test_above_would_fail(where: Any) -> None:
    state = large_state(2048 * MIB, 60)
    copier = Copier(torch.device("cuda"), where)
    copied = copier.reserve(state)
    torch.cuda.synchronize()
    with torch.cuda.stream(copier._reader):
        busy(100)
    copier.take(state, copied)
    for tensor in state.values():
        tensor.fill_(-1.0)
    copied.wait()
    assert any((copied[name] == -1).any() for name in copied.names)


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_training_goes_on_from_a_copy_as_it_did(where: Any) -> None:
    model = nn.Sequential(nn.Linear(512, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 512)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    copier = Copier(torch.device("cuda"), where)
    batches = list(torch.randn(40, 64, 512, device="cuda"))
    buffers = [name for name, _ in model.named_buffers()]

    def live() -> dict[str, Tensor]:
        moments = {f"{i}.{key}": value for i, s in enumerate(opt.state.values()) for key, value in s.items()}
        return {**model.state_dict(keep_vars=True), **moments}

    def train(some: list[Tensor]) -> None:
        for batch in some:
            model(batch).square().mean().backward()
            copier.fence()
            opt.step()
            opt.zero_grad()

    train(batches[:5])
    slot: Copies | None = None
    for start in (5, 15, 25):
        then = noted(live())
        with torch.cuda.stream(copier._reader):
            busy(20)
        slot = copier.take(live(), slot, at_once=buffers)
        train(batches[start : start + 10])
        slot.wait()
        assert differing({name: slot[name] for name in slot.names}, then) == []
        end = noted(live())
        slot.put_back(live())
        assert differing(live(), then) == []
        train(batches[start : start + 10])
        assert differing(live(), end) == []


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_tensors_may_be_dropped_while_they_are_read(where: Any) -> None:
    copier = Copier(torch.device("cuda"), where)
    state = large_state(1024 * MIB, 40)
    expected = {name: float(tensor[0]) for name, tensor in state.items()}
    copied = copier.reserve(state)
    torch.cuda.synchronize()
    with torch.cuda.stream(copier._reader):
        busy(100)
    copier.take(state, copied)
    shapes = [tensor.shape for tensor in state.values()]
    state.clear()
    usurpers = [torch.full(shape, -1.0, device="cuda") for shape in shapes]
    copied.wait()
    wrong = {name: copied[name].unique().tolist() for name in copied.names if (copied[name] != expected[name]).any()}
    assert wrong == {}
    assert len(usurpers) == 40


@pytest.mark.cuda
@pytest.mark.parametrize("where", WAYS)
def test_gpu_copies_may_be_dropped_while_they_are_made(where: Any) -> None:
    copier = Copier(torch.device("cuda"), where)
    state = large_state(512 * MIB, 40)
    slot = copier.reserve(state)
    names = slot.names
    torch.cuda.synchronize()
    with torch.cuda.stream(copier._reader):
        busy(100)
    copier.take(state, slot)
    del slot
    others = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
    other = Copier(torch.device("cuda"), where).take(others)
    other.wait()
    torch.cuda.synchronize()
    assert [name for name in names if (others[name] != -1).any()] == []
    assert [name for name in names if (other[name] != -1).any()] == []


@pytest.mark.cuda
def test_gpu_two_states_on_their_way_do_not_mix() -> None:
    state = large_state(1024 * MIB, 40)
    copier = Copier(torch.device("cuda"), "host")
    slots = [copier.reserve(state) for _ in range(2)]
    for value in range(5):
        for tensor in state.values():
            tensor.fill_(value)
        slots.append(copier.take(state, slots.pop(0)))
        copier.fence()
    for value, copied in zip((3, 4), slots, strict=True):
        copied.wait()
        assert [name for name in copied.names if (copied[name] != value).any()] == []


@pytest.mark.cuda
def test_gpu_a_copy_to_the_host_needs_next_to_no_device_memory() -> None:
    state = large_state(2048 * MIB, 60)
    copier = Copier(torch.device("cuda"), "host")
    copied = copier.reserve(state)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    copier.take(state, copied, at_once=("t0", "t7"))  # t7 is the largest
    peak = torch.cuda.max_memory_allocated() - before
    copied.wait()
    assert peak <= 9 * MIB, memory.human(peak)
    copied.put_back(state)
    peak_back = torch.cuda.max_memory_allocated() - before
    assert peak_back <= 40 * MIB, memory.human(peak_back)


@pytest.mark.cuda
def test_gpu_pinned_memory_is_little_more_than_the_state() -> None:
    state = large_state(1500 * MIB, 300)
    copied = Copier(torch.device("cuda"), "host").reserve(state)
    assert copied.held_bytes <= 1.1 * copied.nbytes
    assert all(chunk.is_pinned() for chunk in copied._chunks)


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["device", "host"])
def test_gpu_copies_are_cast_to_what_the_state_has_become(where: Any) -> None:
    then = {
        "a": torch.randn(400, 20).bfloat16().cuda(),
        "b": torch.randn(9 * MIB).half().cuda(),
        "c": torch.arange(5).cuda(),
    }
    copier = Copier(torch.device("cuda"), where)
    busy()
    copied = copier.take(then)
    now = {
        "a": nn.Parameter(torch.zeros(20, 400, device="cuda").t()),
        "b": torch.zeros(9 * MIB, device="cuda"),
        "c": torch.zeros(5),  # it has moved to the CPU
    }
    copied.put_back(now)
    assert all(torch.equal(now[name].detach().cpu(), then[name].to(now[name].dtype).cpu()) for name in then)


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["device", "host"])
def test_gpu_a_state_is_not_copied_inside_a_cuda_graph(where: Any) -> None:
    state = {"a": torch.ones(4, device="cuda")}
    copier = Copier(torch.device("cuda"), where)
    copier.take(state).wait()
    copier.fence()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copier.fence()  # nothing is being read
        with pytest.raises(ProtocolError, match="while a CUDA graph is being captured"):
            copier.take(state)
        state["a"].add_(1)
    graph.replay()
    assert copier.take(state)["a"].device.type == ("cuda" if where == "device" else "cpu")


@pytest.mark.cuda
def test_gpu_what_is_free_is_known_without_waiting() -> None:
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    busy(200)
    event.record()
    with syncs_are_errors():
        free = memory.free_bytes("device", torch.device("cuda"))
    assert not event.query(), "asking for free memory has waited for the device"
    assert free is not None
    assert 0 < free <= torch.cuda.mem_get_info()[1]


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.campaign
def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "snapshot.py"
    command = [sys.executable, "-W", "ignore", str(script), "--quick", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("snapshot-cpu*.json"))) == 1
    assert "bit" in next(tmp_path.glob("snapshot-cpu*.md")).read_text()
