"""A module kept in fp32 does what it would do in fp32 alone, wherever and however the model around it runs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from helpers import TinyNet, same
from nanguard.state.islands import Islands

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it imports its compiler
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


class Attention(nn.Module):
    """Written out, so that its products are there to overflow."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed: Tensor = self.out(torch.softmax(scale * (q @ k.transpose(-2, -1)), dim=-1) @ v)
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        return x + self.attn(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Echo(nn.Module):
    """Notes what it was given, and gives it back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.autocasts = torch.is_autocast_enabled("cpu")
        return args[0] if len(args) == 1 and not kwargs else (args, kwargs)


def x_of(dtype: torch.dtype = FP32, *shape: int, device: str = "cpu") -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(*(shape or (2, 5, 8)), generator=g).to(device, dtype).requires_grad_()


def gradients(*things: Any) -> list[Tensor | None]:
    tensors = [t for thing in things for t in (thing.parameters() if isinstance(thing, nn.Module) else [thing])]
    found = [None if t.grad is None else t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    return found


def autocast(dtype: torch.dtype = BF16, device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, dtype)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- names ---------------------------------------------------------------------------------------------------------


def test_modules_are_kept_by_name_and_by_pattern_in_model_order() -> None:
    islands = Islands(Net(), "cpu")
    assert islands.names == ()
    assert islands.keep("head", "layers.*.attn") == ("layers.0.attn", "layers.1.attn", "head")
    assert islands.keep("layers.1.attn", "layers.0.mlp.0") == ("layers.0.mlp.0",)
    assert islands.keep("layers.0.attn.qkv") == ("layers.0.attn.qkv",)
    assert islands.keep() == ()
    assert islands.release("layers.0.*") == ("layers.0.attn", "layers.0.attn.qkv", "layers.0.mlp.0")
    assert islands.release("layers.0.attn") == ()
    assert islands.names == ("layers.1.attn", "head")
    assert islands.release() == ("layers.1.attn", "head")
    assert islands.names == ()


def test_the_model_itself_and_modules_can_be_given() -> None:
    model = Net()
    islands = Islands(model, "cpu")
    assert islands.keep("") == islands.release(model) == islands.keep(model) == ("",)
    assert islands.keep(model.head) == ("head",)
    assert "" not in Islands(Net(), "cpu").keep("*")


@pytest.mark.parametrize("wrap", [torch.compile, lambda m: m], ids=["compiled", "plain"])
@COMPILES
def test_names_are_the_users(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    model.layers[0] = torch.compile(model.layers[0])
    islands = Islands(wrap(model), "cpu")
    assert islands.keep("layers.0", "layers.0.attn") == ("layers.0", "layers.0.attn")
    with pytest.raises(ValueError, match="_orig_mod"):
        islands.keep("_orig_mod.head")


def test_a_shared_module_is_listed_once_and_found_under_both_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    islands = Islands(model, "cpu")
    assert islands.keep("b") == ("a",)
    assert islands.keep("*") == ()
    assert islands.release("b") == ("a",)


@pytest.mark.parametrize("act", ["keep", "release"])
def test_a_pattern_that_matches_nothing_is_an_error_with_what_is_close(act: str) -> None:
    islands = Islands(Net(), "cpu")
    islands.keep("head")
    with pytest.raises(ValueError, match=r"'layers\.0\.atn'.*'layers\.0\.attn'"):
        getattr(islands, act)("head", "layers.0.atn", "layers.1.attn")
    with pytest.raises(ValueError, match="'dec\\*'"):
        getattr(islands, act)("dec*")
    with pytest.raises(ValueError, match="is this Linear"):
        getattr(islands, act)(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"'layers' has no forward.*'layers\.\*'"):
        getattr(islands, act)("layers")
    assert islands.names == ("head",)


def test_state_goes_from_one_run_to_the_next() -> None:
    first, second = Islands(Net(), "cpu"), Islands(Net(), "cpu")
    first.keep("layers.*.attn", "")
    second.keep("head", "layers.1.attn")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == ["", "layers.0.attn", "layers.1.attn"]
    for wrong in (["head", "tail"], ["head", "layers"], ["layers.*"]):
        with pytest.raises(ValueError, match=r"tail|layers"):
            second.load_state_dict(wrong)
        assert second.state_dict() == first.state_dict()
    second.load_state_dict([])
    assert second.names == ()


def test_data_parallel_may_be_there_but_has_no_islands() -> None:
    islands = Islands(DataParallel(Net()), "cpu")
    islands.load_state_dict(islands.state_dict())
    with pytest.raises(ValueError, match="DataParallel"):
        islands.keep("head")
    assert islands.names == ()


# ---- what is cast --------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    tensor: Tensor
    name: str = "x"


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face has it: a mapping whose items are attributes too, both of which are to be in step."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def everything_in(half: Tensor) -> dict[str, Any]:
    return {
        "tensor": half,
        "list": [half, 1, None],
        "tuple": (half, (half,)),
        "namedtuple": Pair(half, "right"),
        "dict": {"a": {"b": half}, "c": 3},
        "mapping": ModelOutput(logits=half, past=(half,)),
        "frozen": types.MappingProxyType({"a": half}),
        "record": Record(half),
        "structseq": torch.max(half, dim=-1),
    }


def dtypes_in(tree: Any) -> list[torch.dtype]:
    if isinstance(tree, Tensor):
        return [tree.dtype]
    if isinstance(tree, Record):
        return [tree.tensor.dtype]
    children = tree.values() if hasattr(tree, "values") and hasattr(tree, "keys") else tree
    return [dtype for c in children if not isinstance(c, (str, int, type(None))) for dtype in dtypes_in(c)]


@pytest.mark.parametrize("how", everything_in(x_of()))
@pytest.mark.parametrize("by_keyword", [False, True])
def test_tensors_are_found_in_any_container(how: str, by_keyword: bool) -> None:
    echo = Echo()
    Islands(echo, "cpu").keep("")
    given = everything_in(x_of(BF16))[how]
    with autocast():
        output = echo(key=given)[1]["key"] if by_keyword else echo(given)
    inside = echo.kwargs["key"] if by_keyword else echo.args[0]
    integers = [torch.int64] if how == "structseq" else []
    halves = [dtype for dtype in dtypes_in(given) if dtype is BF16]
    assert not echo.autocasts
    assert dtypes_in(inside) == [FP32] * len(halves) + integers
    assert dtypes_in(output) == [BF16] * len(halves) + integers
    assert type(inside) is type(output) is type(given)
    if how == "mapping":
        assert (inside.logits.dtype, output.logits.dtype, given.logits.dtype) == (FP32, BF16, BF16)
        assert inside.logits is inside["logits"]


@pytest.mark.parametrize(
    ("inputs", "autocasts", "outputs"),
    [
        ((BF16,), True, BF16),
        ((FP16,), True, FP16),
        ((FP16, BF16), True, BF16),
        ((FP32,), True, FP32),
        ((FP32, FP16), True, FP32),  # a residual stream in fp32 must not overflow by the way
        ((FP32, FP16), False, FP16),  # without autocast the next module could not take fp32
        ((BF16,), False, BF16),
        ((FP32,), False, FP32),
        ((torch.int64,), True, FP32),
        ((FP64, BF16), True, BF16),
    ],
    ids=str,
)
def test_outputs_have_the_half_type_of_the_inputs_back(
    inputs: tuple[torch.dtype, ...], autocasts: bool, outputs: torch.dtype
) -> None:
    class Sum(nn.Module):
        def forward(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
            assert not torch.is_autocast_enabled("cpu")
            assert not any(x.dtype in (BF16, FP16) for x in xs)
            total = torch.stack([x.to(FP32) for x in xs]).sum(0)
            return total, total.sum()

    module = Sum()
    Islands(module, "cpu").keep("")
    with torch.autocast("cpu", BF16, enabled=autocasts):
        total, loss = module(*(torch.ones(3).to(dtype) for dtype in inputs))
    assert total.dtype is outputs
    assert loss.dtype is FP32, "a loss is not rounded"


def test_other_types_are_left_alone() -> None:
    echo = Echo()
    Islands(echo, "cpu").keep("")
    others = (torch.ones(2, dtype=FP64), torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64))
    with autocast():
        (back, _) = echo(*others, x_of(BF16))
    assert all(inside is given for inside, given in zip(echo.args, others, strict=False))
    assert all(after is given for after, given in zip(back, others, strict=False))


def test_a_tensor_given_twice_is_one_tensor_inside_and_outside() -> None:
    echo = Echo()
    Islands(echo, "cpu").keep("")
    x = x_of(BF16)
    with autocast():
        (first, (second,)), kwargs = echo(x, [x], key=x)
    assert echo.args[0] is echo.args[1][0] is echo.kwargs["key"]
    assert first is second is kwargs["key"]


def test_nothing_is_copied_without_need() -> None:
    echo = Echo()
    Islands(echo, "cpu").keep("")
    given = [x_of(), {"a": x_of()}]
    assert echo(given) is given is echo.args[0]
    with autocast():
        assert echo(given) is given is echo.args[0]


# ---- as in fp32 alone ----------------------------------------------------------------------------------------------


def lstm(**options: Any) -> nn.Module:
    return nn.LSTM(8, 8, num_layers=2, batch_first=True, **options)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any]]] = {
    "linear": (lambda: nn.Linear(8, 8), lambda m, x: m(x)),
    "attention": (Attention, lambda m, x: m(x, scale=0.5)),
    "convolution": (lambda: nn.Conv1d(5, 4, 3), lambda m, x: m(x)),
    "normalisation": (lambda: nn.BatchNorm1d(5), lambda m, x: m(x)),
    "multihead": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m(query=x, key=x, value=x, need_weights=False),
    ),
    "multihead, weights": (lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, value=x)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, x: m(x, src_mask=torch.zeros(5, 5, dtype=torch.bool, device=x.device)),
    ),
    "LSTM": (lstm, lambda m, x: m(x)),
    "LSTM, with a state": (lstm, lambda m, x: m(x, (x.new_ones(2, 2, 8), x.new_ones(2, 2, 8)))),
    "GRU": (lambda: nn.GRU(8, 8, bidirectional=True), lambda m, x: m(x)),
    "twice": (Attention, lambda m, x: m(m(x))),
}


def copied(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    if isinstance(other, nn.RNNBase):
        other.flatten_parameters()  # of which cuDNN would remind us
    return other


def flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for each in tree if each is not None for tensor in flat(each)]


def run(module: nn.Module, call: Callable[[nn.Module, Tensor], Any], x: Tensor, context: Any = None) -> Any:
    """The outputs, all gradients and the buffers. The loss is the same for outputs in half and in fp32."""
    with context or contextlib.nullcontext():
        outputs = flat(call(module, x))
    sum(
        (each.float() * torch.linspace(-1, 1, each.numel(), device=x.device).view_as(each)).sum() for each in outputs
    ).backward()  # type: ignore[union-attr]
    return [each.detach() for each in outputs], gradients(module, x), [b.clone() for b in module.buffers()]


@DEVICES
@pytest.mark.parametrize("name", MODULES)
def test_an_island_is_the_module_in_fp32_bit_for_bit(name: str, device: str) -> None:
    """From half to half. The gradient of a rounded output is rounded, so all of it is done by hand here."""
    make, call = MODULES[name]
    module = make().to(device)
    other, untouched = copied(module), copied(module)
    Islands(module, device).keep("")

    def by_hand(m: nn.Module, x: Tensor) -> Any:
        if name == "twice":
            return m(m(x.float()).bfloat16().float()).bfloat16()
        return [each.bfloat16() for each in flat(call(m, x.float()))]

    got = run(module, call, x_of(BF16, device=device), autocast(device=device))
    assert same(got, run(other, by_hand, x_of(BF16, device=device)))
    if name not in ("LSTM", "LSTM, with a state", "GRU", "normalisation"):  # which a CPU may run in fp32 anyway
        assert not same(got, run(untouched, call, x_of(BF16, device=device), autocast(device=device)))


@DEVICES
@pytest.mark.parametrize("name", MODULES)
def test_fp32_goes_in_and_comes_out_without_any_rounding(name: str, device: str) -> None:
    make, call = MODULES[name]
    module = make().to(device)
    other = copied(module)
    Islands(module, device).keep("")
    got = run(module, call, x_of(device=device), autocast(device=device))
    assert same(got, run(other, call, x_of(device=device)))


@DEVICES
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("half", [BF16, FP16], ids=str)
def test_half_parameters_take_part_as_fp32_copies(name: str, half: torch.dtype, device: str) -> None:
    make, call = MODULES[name]
    module = make().to(device, half)
    other = copy.deepcopy(module).float()
    Islands(module, device).keep("")
    x = x_of(FP32, device=device)
    expected, got = run(other, call, x), run(module, call, x)
    assert same(got[0], expected[0])
    assert {g.dtype for g in got[1][:-1]} == {half}
    rounded = [g.to(half) for g in expected[1][:-1]]
    if name != "twice":  # then two gradients are rounded, and summed in half
        assert same(got[1][:-1], rounded)
    assert same(got[2], [b.to(half) if b.is_floating_point() else b for b in expected[2]])
    assert all(p.dtype is half and isinstance(p, nn.Parameter) for p in module.parameters())


def test_the_next_module_of_a_half_model_gets_half() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    Islands(model, "cpu").keep("0", "2")
    out = model(torch.tensor([1, 2]))
    out.sum().backward()
    assert out.dtype is BF16
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}


class Counting(nn.Module):
    """Writes to one buffer, replaces another, reads a third."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "replaced", "read"):
            self.register_buffer(name, torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        return x * self.weight * self.read


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_writes_to_half_buffers_arrive(backend: str) -> None:
    model = nn.Sequential(Counting()).bfloat16()
    Islands(model, "cpu").keep("0")
    written, read = model[0].written, model[0].read
    called = model if backend == "none" else torch.compile(model, backend=backend)
    for _ in range(3):
        called(x_of(BF16, 2)).sum().backward()
    assert model[0].written is written
    assert model[0].read is read
    assert written.tolist() == model[0].replaced.tolist() == [4, 4]
    assert model[0].replaced.dtype is written.dtype is BF16
    assert set(dict(model.named_buffers())) == {"0.written", "0.replaced", "0.read"}


def test_a_buffer_that_is_only_read_may_be_in_a_graph() -> None:
    model = Counting().bfloat16()
    Islands(model, "cpu").keep("")
    before = model.read * model.weight  # saved for backward
    (model(x_of(BF16, 2)) + before).sum().backward()


def test_tied_half_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            assert self.a.weight is self.b.weight
            assert self.a.weight.dtype is FP32
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model = Tied().bfloat16()
    other = copy.deepcopy(model).float()
    Islands(model, "cpu").keep("")
    x = x_of(FP32, 3, 4)
    model(x).sum().backward()
    other(x).sum().backward()
    assert model.a.weight is model.b.weight
    assert other.a.weight.grad is not None
    assert same(model.a.weight.grad, other.a.weight.grad.bfloat16())


def test_packed_sequences() -> None:
    module = nn.LSTM(8, 8)
    other = copy.deepcopy(module)
    Islands(module, "cpu").keep("")
    packed = pack_padded_sequence(x_of(BF16).detach(), torch.tensor([5, 3]), batch_first=True)
    with autocast():
        output, _ = module(packed)
    assert isinstance(output, PackedSequence)
    expected, _ = other(packed.to(FP32))
    assert same(output.data, expected.data.bfloat16())


def test_the_fast_path_of_attention_in_evaluation() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    other = copy.deepcopy(module)
    Islands(module, "cpu").keep("")
    x = x_of(BF16).detach()
    with torch.no_grad(), autocast():
        output, weights = module(query=x, key=x, value=x)
    with torch.no_grad():
        expected, expected_weights = other(x.float(), x.float(), x.float())
    assert same(output, expected.bfloat16())
    assert same(weights, expected_weights.bfloat16())


def test_validation_in_fp32_is_as_ever() -> None:
    model = Net()
    expected = model(x_of())
    Islands(model, "cpu").keep("*", "")
    with torch.no_grad():
        assert same(model(x_of()), expected.detach())
    with torch.inference_mode(), autocast():
        assert model(x_of()).isfinite().all()


# ---- what it is for ------------------------------------------------------------------------------------------------


def overflowing() -> tuple[Net, Tensor]:
    """Every number is harmless, in and out; the products of queries and keys are beyond fp16."""
    model = Net()
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.qkv.weight.mul_(300)
            layer.attn.out.weight.mul_(0.003)
    return model, 4 * x_of().detach()


@DEVICES
def test_an_overflow_of_fp16_is_gone(device: str) -> None:
    model, x = overflowing()
    model, x = model.to(device), x.to(device)

    def passes() -> tuple[Tensor, list[Tensor | None]]:
        with autocast(FP16, device):
            output = model(x)
        output.float().pow(2).mean().backward()
        return output, gradients(model)

    output, grads = passes()
    assert not output.isfinite().all()
    islands = Islands(model, device)
    islands.keep("layers.*.attn")
    output, grads = passes()
    assert output.isfinite().all()
    assert all(g.isfinite().all() for g in grads if g is not None)
    assert sum(g is not None for g in grads) == len(grads) - 4, "all but the norms, which are not used"
    islands.release()
    assert not passes()[0].isfinite().all()


# ---- however the model runs ----------------------------------------------------------------------------------------


def outputs_and_gradients(called: nn.Module, model: nn.Module) -> Any:
    x = x_of()
    with autocast():
        output = called(x)
    output.float().pow(2).sum().backward()
    return output.detach(), gradients(model, x)


def assert_equal(got: Any, expected: Any) -> None:
    """Outputs to the bit. Gradients nearly: compiled, they are computed by other kernels even without an island."""
    assert same(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=2e-2, atol=2e-2)


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "name"),
    [("eager", name) for name in ("", "layers.0", "layers.1.attn", "layers.0.mlp.0", "layers.0.mlp", "head")]
    + [("aot_eager", "layers.1.attn"), ("aot_eager", "head")],
)
def test_compiled_code_takes_changes_up(name: str, backend: str) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    plain = outputs_and_gradients(reference, reference)
    Islands(reference, "cpu").keep(name)
    kept = outputs_and_gradients(reference, reference)
    assert not same(plain[0], kept[0])

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_equal(outputs_and_gradients(compiled, model), plain)
    islands = Islands(compiled, "cpu")
    for _ in range(2):
        islands.keep(name)
        assert_equal(outputs_and_gradients(compiled, model), kept)
        islands.release()
        assert_equal(outputs_and_gradients(compiled, model), plain)
    islands.keep(name)
    torch.compiler.reset()
    assert_equal(outputs_and_gradients(torch.compile(model, backend=backend, fullgraph=True), model), kept)


@COMPILES
@DEVICES
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, between two compiled modules
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch's own advice
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("wrap", "backend"), [pytest.param("model", "inductor", marks=pytest.mark.campaign), ("layers", "aot_eager")]
)
def test_compiled_or_not_an_overflow_is_gone(wrap: str, backend: str, device: str) -> None:
    model, x = overflowing()
    model, x = model.to(device), x.to(device)
    islands = Islands(model, device)
    called = torch.compile(model, backend=backend) if wrap == "model" else model
    if wrap == "layers":
        for layer in model.layers:
            layer.compile(backend=backend)

    def is_finite() -> bool:
        with autocast(FP16, device):
            output = called(x)
        output.float().pow(2).mean().backward()
        found = [output, *(g for g in gradients(model) if g is not None)]
        return all(bool(t.isfinite().all()) for t in found)

    for finite in (False, True, False, True):
        if finite:
            islands.keep("layers.*.attn")
        else:
            islands.release()
        assert is_finite() == finite


@COMPILES
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("half", [False, True])
def test_an_island_does_not_break_the_graph(half: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.norm, self.attn = nn.Linear(8, 8), nn.BatchNorm1d(5), nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.inp(x))
            return self.attn(query=y, key=y, value=y)[0]  # type: ignore[no-any-return]

    model = Mixed().bfloat16() if half else Mixed()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, context = x_of(BF16 if half else FP32), torch.autocast("cpu", BF16, enabled=not half)
    assert same(run(compiled, nn.Module.__call__, x, context)[0], run(reference, nn.Module.__call__, x, context)[0])
    for each in (model, reference):
        assert Islands(each, "cpu").keep("inp", "norm", "attn") == ("inp", "norm", "attn")
    got, expected = (run(each, nn.Module.__call__, x, context) for each in (compiled, reference))
    assert_equal(got, expected)
    assert same(got[2], expected[2])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints(use_reentrant: bool, half: bool, inside: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, net: Net, on: bool) -> None:
            super().__init__()
            self.net, self.on = net, on

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.net.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant) if self.on else layer(x)
            return self.net.head(x)  # type: ignore[no-any-return]

    net = Net().bfloat16() if half else Net()
    Islands(net, "cpu").keep("layers.0.attn" if inside else "layers.0")
    plain, checkpointed = Checkpointed(net, False), Checkpointed(net, True)

    def passes(model: nn.Module) -> Any:
        x = x_of(BF16 if half else FP32)
        with torch.autocast("cpu", BF16, enabled=not half):
            output = model(x)
        output.float().pow(2).sum().backward()
        return output.detach(), gradients(model, x)

    assert same(passes(plain), passes(checkpointed))


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("half", [False, True])
def test_ddp(tmp_path: Path, half: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Net().bfloat16() if half else Net()
        for layer in model.layers:
            layer.norm.requires_grad_(False)
        other = copy.deepcopy(model)
        ddp = DistributedDataParallel(model)
        assert Islands(ddp, "cpu").keep("layers.*.attn", "") == ("", "layers.0.attn", "layers.1.attn")
        Islands(other, "cpu").keep("layers.*.attn", "")
        for _ in range(3):
            assert same(outputs_and_gradients(ddp, model), outputs_and_gradients(other, other))
    finally:
        dist.destroy_process_group()


# ---- the model stays the user's ------------------------------------------------------------------------------------


def test_the_model_looks_as_before() -> None:
    model = Net()
    modules, state = dict(model.named_modules()), list(model.state_dict())
    parameters = list(model.named_parameters())
    attributes = {name: dict(module.__dict__) for name, module in modules.items()}
    signature = inspect.signature(model.layers[0].attn.forward)
    islands = Islands(model, "cpu")
    islands.keep("*", "")
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in parameters]
    assert inspect.signature(model.layers[0].attn.forward) == signature
    outputs_and_gradients(model, model)
    islands.release()
    assert {name: dict(module.__dict__) for name, module in modules.items()} == attributes


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_islands_of_their_own(how: str, half: bool) -> None:
    model = nn.ModuleDict({"net": Net(), "rnn": nn.LSTM(8, 8)})
    if half:
        model.bfloat16()
    Islands(model, "cpu").keep("net.layers.0.attn", "rnn")
    x = x_of(BF16)

    def passes(model: Any) -> Any:
        with torch.autocast("cpu", BF16, enabled=not half):
            output = model["rnn"](model["net"].layers[0](x))[0]
        output.float().pow(2).sum().backward()
        return output.detach(), gradients(model)

    expected = passes(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert Islands(other, "cpu").names == ("net.layers.0.attn", "rnn")
    assert same(passes(other), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert same(passes(other), expected), "its weights are its own"
    assert all(g is None for g in gradients(model))
    assert Islands(other, "cpu").release() == ("net.layers.0.attn", "rnn")
    assert "forward" not in other["rnn"].__dict__
    assert "forward" in model["rnn"].__dict__


def wrapped_forward(module: nn.Module, told: list[str]) -> Any:
    """As accelerate does it."""
    old = module.forward

    @wraps(old)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        told.append(str(args[0].dtype))
        return old(*args, **kwargs)

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    return module.forward


@pytest.mark.parametrize("way", ["method", "partial"])
def test_a_forward_that_others_patched_is_run_and_put_back(way: str) -> None:
    model, told = Net(), list[str]()
    head = model.head
    patched = wrapped_forward(head, told)
    if way == "partial":
        head.forward = patched = partial(patched)  # type: ignore[method-assign]
    islands = Islands(model, "cpu")
    islands.keep("head")
    outputs_and_gradients(model, model)
    assert told == ["torch.float32"]
    assert islands.release() == ("head",)
    assert head.__dict__["forward"] is patched
    outputs_and_gradients(model, model)
    assert told == ["torch.float32", "torch.bfloat16"]


def test_an_island_that_others_wrapped_can_be_released_and_kept_again() -> None:
    model, reference, told = Net(), Net(), list[str]()
    reference.load_state_dict(model.state_dict())
    plain = outputs_and_gradients(reference, reference)
    Islands(reference, "cpu").keep("head")
    kept = outputs_and_gradients(reference, reference)
    islands = Islands(model, "cpu")
    islands.keep("head")
    wrapper = wrapped_forward(model.head, told)
    assert same(outputs_and_gradients(model, model), kept)
    islands.release()
    assert model.head.__dict__["forward"] is wrapper
    assert same(outputs_and_gradients(model, model), plain)
    islands.keep("head")
    assert same(outputs_and_gradients(model, model), kept)
    assert told == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize("half", [False, True])
def test_hooks_run_once_and_see_what_they_saw(half: bool) -> None:
    model, told = (Net().bfloat16() if half else Net()), list[str]()
    head = model.head
    head.register_forward_pre_hook(lambda m, args: told.append(f"before {args[0].dtype}"))
    head.register_forward_hook(lambda m, args, out: told.append(f"after {out.dtype}"))
    head.register_full_backward_hook(lambda m, gin, gout: told.append("backward"))
    Islands(model, "cpu").keep("head")
    x = x_of(BF16 if half else FP32)
    with torch.autocast("cpu", BF16, enabled=not half):
        model(x).float().sum().backward()
    assert told == ["before torch.bfloat16", "after torch.bfloat16", "backward"]


def test_autocast_is_on_again_after_an_island_and_after_an_error_in_it() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    model = nn.ModuleDict({"good": nn.Linear(8, 8), "bad": Failing()})
    Islands(model, "cpu").keep("*")
    with autocast():
        model["good"](x_of())
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError, match="on purpose"):
            model["bad"](x_of())
        assert torch.is_autocast_enabled("cpu")


def test_a_kept_module_inside_a_kept_one_does_no_work_of_its_own() -> None:
    model = Net()
    inner = copy.deepcopy(model)
    Islands(model, "cpu").keep("layers.0")
    Islands(inner, "cpu").keep("layers.0", "layers.0.*")
    assert same(outputs_and_gradients(model, model), outputs_and_gradients(inner, inner))


def test_training_with_islands_learns() -> None:
    """The whole of it once: fp16 autocast, an optimizer, BatchNorm, and a change halfway."""
    model = TinyNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    islands = Islands(model, "cpu")
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    losses = []
    for step in range(60):
        if step == 20:
            islands.keep("inp", "norm")
        if step == 40:
            islands.release("inp")
        with autocast(BF16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_name_in_a_model_without_modules_is_refused_plainly() -> None:
    with pytest.raises(ValueError, match=r"no module of the model is called 'x'; it has no modules inside$"):
        Islands(nn.Linear(2, 1), "cpu").keep("x")
