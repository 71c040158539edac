"""From half precision to fp32 in the middle of training: as if all had been loaded in fp32, with every object kept."""

from __future__ import annotations

import copy
import datetime
import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

from helpers import TinyNet, differences, everything, make_batches
from nanguard.state.schedule import Schedule
from nanguard.state.training_state import TrainingState

COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it imports its compiler

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, amsgrad=True, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, fused=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-2, history_size=3),
}


def train(model: nn.Module, optimizer: Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Steps in the dtype of the model's parameters."""
    dtype = next(model.parameters()).dtype
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(dtype)), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def loaded_in_fp32(
    model: nn.Module, optimizer: Optimizer, make: Callable[[Any], Optimizer]
) -> tuple[nn.Module, Optimizer]:
    """Another model and optimizer with the same values, made in fp32."""
    other = TinyNet()
    other.load_state_dict(model.state_dict())
    other_optimizer = make(other.parameters())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, other_optimizer


def to_fp32_(model: nn.Module, optimizers: list[Optimizer], ema: nn.Module | None = None) -> tuple[str, ...]:
    """Casts what a run with these parts consists of; the names of what was cast."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    schedule = Schedule(tuple(optimizers), (), "step")
    return TrainingState(model, tuple(optimizers), device=device, schedule=schedule, ema=ema).cast_to_fp32_()


def dtypes(state: dict[str, Any]) -> set[torch.dtype]:
    return {t.dtype for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()}


# ---- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("half", "name"),
    [(torch.bfloat16, name) for name in OPTIMIZERS]
    + [(torch.float16, name) for name in OPTIMIZERS if name != "LBFGS"],  # whose search overflows in fp16
    ids=str,
)
def test_training_goes_on_as_if_all_had_been_loaded_in_fp32(half: torch.dtype, name: str, device: str) -> None:
    make = OPTIMIZERS[name]
    batches = make_batches(8, device=device)
    model = TinyNet().to(device, half)
    optimizer = make(model.parameters())
    train(model, optimizer, batches[:4])
    other, other_optimizer = loaded_in_fp32(model, optimizer, make)
    other.to(device)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    parameters = [*model.parameters()]
    assert to_fp32_(model, [optimizer])
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in parameters)
    assert dtypes(everything(model, [optimizer])) == {torch.float32}
    assert differences(everything(model, [optimizer]), everything(other, [other_optimizer])) == []
    for one, optim in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(1)  # for dropout
        train(one, optim, batches[4:])
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in parameters)
    assert all(p.isfinite().all() for p in parameters), "or nothing could be compared"
    assert differences(everything(model, [optimizer]), everything(other, [other_optimizer])) == []


@COMPILES
def test_everything_cast_is_named() -> None:
    model = TinyNet().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, make_batches(1))
    weights = ["inp.weight", "inp.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    statistics = ["norm.running_mean", "norm.running_var"]
    tensors = [f"model.{name}" for name in (*weights[:4], *statistics, *weights[4:])]
    moments = [f"optimizer.0.{name}.momentum_buffer" for name in weights]
    assert to_fp32_(torch.compile(model), [optimizer]) == (*tensors, *moments)


def test_what_is_in_fp32_already_is_left_alone() -> None:
    model = TinyNet()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, make_batches(1))
    pointers = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    assert to_fp32_(model, [optimizer]) == ()
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_gradients_of_a_model_in_two_types_are_dropped_together() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert to_fp32_(model, []) == ("model.1.weight", "model.1.bias")
    assert all(p.grad is None for p in model.parameters())


class Odd(nn.Module):
    """Tied weights, a shared buffer, and tensors of every type."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False).bfloat16()
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("table", torch.ones(2, dtype=torch.float16))
        self.b.register_buffer("table", self.table)
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex32))
        self.register_buffer("count", torch.ones(2, dtype=torch.int32))
        self.register_buffer("none", None)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tied_tensors_are_cast_once_and_other_types_stay() -> None:
    model = Odd()
    assert to_fp32_(model, []) == ("model.table", "model.waves", "model.a.weight")
    assert model.a.weight is model.b.weight
    assert model.b.get_buffer("table") is model.get_buffer("table")
    found = {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert found == {
        "a.weight": torch.float32,
        "exact": torch.float64,
        "table": torch.float32,
        "waves": torch.complex64,
        "count": torch.int32,
    }


class Master(torch.optim.SGD):
    """Keeps copies of its own, deep in its state, and one that belongs to no parameter."""

    def fill(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["nested"] = {"pair": [p.detach().clone(), (p.detach().clone(), 3, None)], "step": 7}
        self.state["shared"]["scale"] = torch.ones((), dtype=torch.float16)  # type: ignore[index]


def test_state_is_found_wherever_an_optimizer_puts_it() -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    stranger = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = Master([model.weight, stranger], lr=0.1)
    optimizer.fill()
    held = optimizer.state[model.weight]["nested"]["pair"][0]
    assert to_fp32_(model, [optimizer]) == (
        "model.weight",
        "outside.0.1",
        "optimizer.0.weight.nested.pair.0",
        "optimizer.0.weight.nested.pair.1.0",
        "optimizer.0.outside.0.1.nested.pair.0",
        "optimizer.0.outside.0.1.nested.pair.1.0",
        "optimizer.0.'shared'.scale",
    )
    assert held.dtype is torch.float32
    assert optimizer.state[model.weight]["nested"]["pair"][0] is held
    assert stranger.dtype is torch.float32


def test_averages_are_cast_with_the_model() -> None:
    model = TinyNet().bfloat16()
    average = AveragedModel(model, use_buffers=True)
    names = to_fp32_(model, [], average)
    assert "ema.module.inp.weight" in names
    assert dtypes(average.state_dict()) == {torch.float32}
    average.update_parameters(model)


def test_schedules_go_on() -> None:
    model = TinyNet().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = CosineAnnealingLR(optimizer, 10)
    for step in range(6):
        train(model, optimizer, make_batches(1))
        schedule.step()
        if step == 2:
            to_fp32_(model, [optimizer])
    fresh = CosineAnnealingLR(plain := torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-2), 10)
    for _ in range(6):
        plain.step()
        fresh.step()
    assert schedule.get_last_lr() == fresh.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_hooks_stay_even_where_an_old_gradient_accumulator_is_alive() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    told: list[tuple[str, torch.dtype]] = []
    weight.register_hook(lambda gradient: told.append(("gradient", gradient.dtype)))
    weight.register_post_accumulate_grad_hook(lambda p: told.append(("accumulated", p.grad.dtype)))  # type: ignore[union-attr]
    graph = weight.expand_as(weight)  # holds the accumulator, as DDP does for ever
    (weight * 1.3).sum().backward()
    to_fp32_(model, [])
    (weight * 1.3).sum().backward()
    half, full = torch.bfloat16, torch.float32
    assert told == [("gradient", half), ("accumulated", half), ("gradient", full), ("accumulated", full)]
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 1.3))
    del graph


@COMPILES
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_compiles_anew(backend: str) -> None:
    torch.compiler.reset()
    model = TinyNet().bfloat16()
    model.drop.p = 0.0
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = make_batches(6)
    train(compiled, optimizer, batches[:3])
    other, other_optimizer = loaded_in_fp32(model, optimizer, lambda p: torch.optim.AdamW(p, lr=1e-2))
    other.drop.p = 0.0
    to_fp32_(compiled, [optimizer])
    assert compiled(batches[0][0]).dtype is torch.float32
    other(batches[0][0])  # BatchNorm notes it
    train(compiled, optimizer, batches[3:])
    train(other, other_optimizer, batches[3:])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype is torch.float32
        if backend == "inductor":  # fuses, and so rounds otherwise
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(mine, theirs)
    torch.compiler.reset()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_recurrent_weights_are_in_one_piece_again(device: str) -> None:
    rnn = nn.GRU(4, 4, num_layers=2).to(device, torch.bfloat16)
    x = torch.randn(3, 2, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cuDNN has no such pieces for bf16, and says so
        rnn(x.bfloat16())[0].sum().backward()
    other = copy.deepcopy(rnn).float()
    to_fp32_(rnn, [])
    rnn(x)[0].sum().backward()  # cuDNN would warn, which is an error here
    other(x)[0].sum().backward()
    for mine, theirs in zip(rnn.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


# ---- DDP, in two processes -----------------------------------------------------------------------------------------

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients as views of buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True, "unused": True},
    "many buckets": {"bucket_cap_mb": 0.0001},
    "a communication hook": {"hook": "python"},
    "a built-in communication hook": {"hook": "builtin"},
    "accumulating": {"accumulate": True},
    "compiled inside": {"compiled": "inside"},
    "compiled outside": {"compiled": "outside"},
    "cast without a new reducer": {"naive": True},
}


class Wide(TinyNet):
    """Has a layer nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.0
        self.unused = nn.Linear(3, 3)


def wrapped(model: nn.Module, hook: str = "", compiled: str = "", **options: Any) -> tuple[nn.Module, Any]:
    """What is called, and the DDP in it."""
    inside = torch.compile(model, backend="aot_eager") if compiled == "inside" else model
    ddp = DistributedDataParallel(inside, **options)
    if hook == "python":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "builtin":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    return (torch.compile(ddp, backend="aot_eager") if compiled == "outside" else ddp), ddp


def run_on(called: nn.Module, ddp: Any, optimizer: Optimizer, rank: int, steps: range, accumulate: bool) -> None:
    """Each rank has data of its own."""
    batches = make_batches(40, seed=rank + 1)
    for step in steps:
        if accumulate:
            with ddp.no_sync():
                backward(called, batches[20 + step])
        backward(called, batches[step])
        optimizer.step()
        last = step == steps[-1]
        if not last:
            optimizer.zero_grad()


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    dtype = next(model.parameters()).dtype
    F.cross_entropy(model(batch[0].to(dtype)), batch[1]).backward()  # type: ignore[no-untyped-call]


def in_a_world(
    rank: int, *, naive: bool = False, accumulate: bool = False, unused: bool = False, **options: Any
) -> dict[str, Any]:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    torch.manual_seed(0)
    model = Wide().bfloat16()
    if not unused:
        model.unused.requires_grad_(False)
    called, ddp = wrapped(model, **options)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    run_on(called, ddp, optimizer, rank, range(3), accumulate)

    other = copy.deepcopy(model).float()
    for p in other.parameters():
        p.grad = None
    other_called, other_ddp = wrapped(other, **options)
    other_optimizer = make([p for p in other.parameters() if p.requires_grad])
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    if naive:
        names = []
        for p in model.parameters():
            p.grad, p.data = None, p.data.float()
        to_fp32_(nn.Module(), [optimizer])
        to_fp32_(model, [])
    else:
        names = list(to_fp32_(called, [optimizer]))
    run_on(called, ddp, optimizer, rank, range(3, 7), accumulate)
    run_on(other_called, other_ddp, other_optimizer, rank, range(3, 7), accumulate)

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    flat = torch.cat([gradient.flatten().float() for gradient in gradients.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return {
        "names": names,
        "types": sorted({str(gradient.dtype) for gradient in gradients.values()}),
        "agree": all(torch.equal(one, flat) for one in everyone),
        "differences": differences(everything(model, [optimizer]), everything(other, [other_optimizer])),
        "hook": ddp._get_ddp_logging_data().get("comm_hook"),
        "hook of the other": other_ddp._get_ddp_logging_data().get("comm_hook"),
    }


def be_a_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for number, (world, options) in enumerate(WORLDS.items()):
        store = f"file://{folder}/{number}.store"
        patience = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
        result = in_a_world(rank, **options)
        (folder / f"{world}.rank{rank}.json").write_text(json.dumps(result))
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        torch.compiler.reset()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks have to say of every world. All share a launch, since starting takes seconds."""
    folder = tmp_path_factory.mktemp("worlds")
    mp.spawn(be_a_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    return {
        world: [json.loads((folder / f"{world}.rank{rank}.json").read_text()) for rank in range(2)] for world in WORLDS
    }


@needs_gloo
@pytest.mark.parametrize("world", [world for world in WORLDS if "without" not in world])
def test_ranks_stay_together(worlds: dict[str, list[dict[str, Any]]], world: str) -> None:
    for result in worlds[world]:
        assert result["agree"], "gradients are the same on both ranks"
        assert result["types"] == ["torch.float32"]
        assert {"model.inp.weight", "model.norm.running_mean", "optimizer.0.inp.weight.exp_avg"} <= set(result["names"])
        assert result["differences"] == []
        assert result["hook"] == result["hook of the other"]


@needs_gloo
def test_that_without_a_new_reducer_they_would_not(worlds: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(result["agree"] for result in worlds["cast without a new reducer"])


@needs_gloo
def test_ddp_that_casts_by_itself_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2).bfloat16())
        model.mixed_precision = object()  # its real one needs a GPU
        with pytest.raises(ValueError, match="mixed_precision of its own"):
            to_fp32_(model, [])
        assert model.module.weight.dtype is torch.bfloat16
    finally:
        dist.destroy_process_group()


def test_sharded_parameters_are_refused() -> None:
    model = nn.Linear(2, 2).bfloat16()
    model.weight._local_tensor = model.weight.data  # type: ignore[attr-defined]  # as of a DTensor
    with pytest.raises(ValueError, match="sharded over ranks"):
        to_fp32_(model, [])
    assert model.weight.dtype is torch.bfloat16
