"""Norms and clipping against float64 references, over the whole range of numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import INF, NAN
from nanguard.numerics.clip import AGC, NormWindow, ZScore, clip_units_, coefficient, like_torch, scale_
from nanguard.numerics.finite import nonfinite, raise_flag_, zero_if_
from nanguard.numerics.norm import NormWriter, are_alike, combine_, joint_norm, tensor_norms, torch_norm

LOW = {torch.float16: 6e-8, torch.bfloat16: 1e-40, torch.float32: 1e-45, torch.float64: 5e-324}
HIGH = {torch.float16: 65504.0, torch.bfloat16: 3.3e38, torch.float32: 3.4e38, torch.float64: 1e308}


@st.composite
def tensors(draw: Any, dtypes: Any = tuple(LOW)) -> Tensor:
    dtype = draw(st.sampled_from(dtypes))
    exponents = st.floats(math.log10(LOW[dtype]), math.log10(HIGH[dtype]) - 1)
    values = draw(st.lists(st.tuples(exponents, st.sampled_from([-1.0, 0.0, 1.0])), max_size=8))
    return torch.tensor([sign * 10.0**e for e, sign in values], dtype=torch.float64).to(dtype)


def combine(groups: list[Tensor]) -> Tensor:
    norms = torch.zeros(len(groups), dtype=torch.float64)
    combine_(norms, norms.unbind(), groups, alike=True)
    return norms


def reference(*parts: Tensor) -> float:
    return math.hypot(*(v for part in parts for v in part.double().tolist()))


@settings(max_examples=300, deadline=None)
@given(st.lists(tensors(), max_size=6))
def test_norms_are_right_from_the_smallest_number_to_the_largest(parts: list[Tensor]) -> None:
    for part, norm in zip(parts, tensor_norms(parts), strict=True):
        assert norm.dtype is torch.float64
        assert norm.item() == pytest.approx(reference(part), rel=1e-12, abs=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors((torch.float32, torch.bfloat16, torch.float16)), min_size=1, max_size=6), st.integers(1, 6))
def test_norms_of_groups_are_right_whatever_the_members(parts: list[Tensor], num_groups: int) -> None:
    groups = [parts[i::num_groups] for i in range(num_groups)]
    norms = combine([torch.stack([*tensor_norms(g), torch.zeros((), dtype=torch.float64)]) for g in groups])
    for group, norm in zip(groups, norms.tolist(), strict=True):
        assert norm == pytest.approx(reference(*group), rel=1e-12, abs=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=5), st.sampled_from([None, NAN, INF, -INF]), st.integers(0, 4))
def test_a_norm_is_finite_exactly_when_its_tensor_is(parts: list[Tensor], bad: float | None, place: int) -> None:
    place %= len(parts)
    if bad is not None:
        parts[place] = torch.cat([parts[place], torch.tensor([bad], dtype=parts[place].dtype)])
    finite = [bool(torch.isfinite(norm)) for norm in tensor_norms(parts)]
    assert finite == [not (bad is not None and i == place) for i in range(len(parts))]
    assert nonfinite(parts, torch.device("cpu")).item() == float(bad is not None)


@pytest.mark.parametrize("sizes", [[3, 0, 1, 7, 2], [3, 5000, 1, 7, 4096, 2], [5000, 70_000], [5000, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_are_written_together_are_those_of_each_tensor(sizes: list[int], dtype: torch.dtype) -> None:
    parts = [torch.randn(size).to(dtype) * 1e30 for size in sizes]
    writer, out = NormWriter(), torch.full((len(sizes),), NAN, dtype=torch.float64)
    for bad in (None, NAN, INF, -INF, None):
        held = parts[-1][0].clone()
        if bad is not None:
            parts[-1][0] = bad
        writer.write_(out, parts)
        apart = torch.stack(list(tensor_norms(parts)))
        assert (
            torch.isfinite(out).tolist() == torch.isfinite(apart).tolist() == [True] * (len(sizes) - 1) + [bad is None]
        )
        assert out[:-1].tolist() == pytest.approx(apart[:-1].tolist(), rel=1e-6)
        together = joint_norm(parts)
        assert math.isfinite(together) is (bad is None), "finite exactly when every element is"
        if bad is None:
            assert together == pytest.approx(math.hypot(*apart.tolist()), rel=1e-6)
        parts[-1][0] = held


def test_largest_absolute_values_take_empty_tensors_and_nan() -> None:
    parts = [torch.tensor([]), torch.tensor([-3.0, 2.0]), torch.tensor([NAN, 1.0])]
    peaks = [norm.item() for norm in tensor_norms(parts, INF)]
    assert peaks[:2] == [0.0, 3.0]
    assert math.isnan(peaks[2])


def test_sparse_and_complex_tensors_have_norms() -> None:
    places, values = torch.tensor([[0, 2, 2]]), torch.tensor([3.0, 2.0, 2.0])
    sparse = torch.sparse_coo_tensor(places, values, (4,), check_invariants=True)
    norms = tensor_norms([sparse, torch.tensor([3 + 4j])])
    assert [norm.item() for norm in norms] == [5.0, 5.0]
    assert not are_alike([sparse])
    assert not are_alike([torch.tensor([3 + 4j])])
    assert not are_alike([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
    assert are_alike([])


@settings(max_examples=300, deadline=None)
@given(st.lists(tensors((torch.float32,)).filter(lambda t: t.numel() > 0), min_size=1, max_size=5), st.floats(1e-3, 10))
def test_clipping_keeps_the_limit_and_the_direction(parts: list[Tensor], max_norm: float) -> None:
    norm = combine([torch.stack(list(tensor_norms(parts)))])
    before = reference(*parts)
    assume(before / max_norm < 1e37)  # the coefficient itself is an fp32 number
    clipped = [part.clone() for part in parts]
    scale_(clipped, coefficient(norm, torch.tensor(max_norm, dtype=torch.float64))[0])
    assert reference(*clipped) <= min(before, max_norm) * (1 + 1e-5)
    if max_norm / max(before, max_norm) > 1e-30:  # else the result is below the smallest fp32 number
        assert reference(*clipped) == pytest.approx(min(before, max_norm), rel=1e-4, abs=1e-36)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(1e-6, 1e6), st.floats(1e-4, 100), st.sampled_from([torch.float32, torch.float64])
)
def test_global_clipping_is_torchs_to_the_bit(seed: int, size: float, max_norm: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (5,), (3, 2, 2), ()]
    params = [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=dtype) * size
    ours = [p.grad.clone() for p in params if p.grad is not None]
    norm = combine([torch.stack(list(tensor_norms(ours)))])[0]
    exact, alike = coefficient(norm, torch.tensor(max_norm, dtype=torch.float64)), are_alike(ours)
    factor = like_torch(exact, max_norm, ours, alike=alike)
    assert torch.equal(factor, like_torch(exact, max_norm, ours)), "the short way gives the same"
    scale_(ours, factor, alike=alike)
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, params, strict=True) if p.grad is not None)


@pytest.mark.parametrize("value", [3e19, 1e30, 1e-25, 1e-40])
def test_global_clipping_is_right_where_torchs_overflows_or_underflows(value: float) -> None:
    grads = [torch.full((2,), value)]
    norm = combine([torch.stack(list(tensor_norms(grads)))])[0]
    exact = coefficient(norm, torch.tensor(value / 10, dtype=torch.float64))
    scale_(grads, like_torch(exact, value / 10, grads, alike=True))
    assert reference(*grads) == pytest.approx(value / 10, rel=1e-3)


def test_torchs_norm_is_not_taken_where_it_rounds() -> None:
    assert torch_norm([torch.ones(300, dtype=torch.bfloat16)]) is None
    assert torch_norm([torch.ones(300, dtype=torch.bfloat16)], alike=True) is None
    assert torch_norm([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]) is None


@settings(max_examples=100, deadline=None)
@given(tensors(), st.booleans(), st.booleans())
def test_zeroing_leaves_no_bit_and_sparing_changes_none(tensor: Tensor, poison: bool, zero: bool) -> None:
    tensor = torch.cat([tensor, torch.tensor([NAN, INF, -0.0] if poison else [-0.0], dtype=tensor.dtype)])
    before = tensor.clone()
    zero_if_([tensor], torch.tensor(float(zero)))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    expected = torch.zeros_like(before) if zero else before
    assert torch.equal(tensor.view(bits), expected.view(bits))


def test_a_raised_flag_stays_up() -> None:
    flag = torch.zeros(())
    raise_flag_(flag, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert flag.item() == 0
    raise_flag_(flag, torch.tensor([1.0, NAN], dtype=torch.float64))
    assert flag.item() == 1
    raise_flag_(flag, torch.tensor([1.0], dtype=torch.float64))
    assert flag.item() == 1


def test_agc_holds_every_unit_to_its_weights() -> None:
    torch.manual_seed(0)
    options = AGC()
    weight, bias, filters = torch.randn(4, 3), torch.zeros(4), torch.randn(2, 3, 5, 5)
    grads = [torch.randn_like(t) * 10 for t in (weight, bias, filters)]
    small = grads[0][1].mul_(1e-6).clone()
    clip_units_([weight, bias, filters], grads, options)
    limit = weight.norm(dim=1).clamp(min=options.eps) * options.factor
    assert torch.all(grads[0].norm(dim=1) <= limit * 1.0001)
    assert torch.equal(grads[0][1], small), "a unit within its limit is left alone"
    assert grads[1].norm().item() == pytest.approx(1e-3 * 0.01, rel=1e-4)
    assert torch.all(grads[2].flatten(1).norm(dim=1) <= filters.flatten(1).norm(dim=1) * 0.01 * 1.0001)


def test_the_zscore_window_learns_a_limit_that_neither_nan_nor_outliers_move() -> None:
    window = NormWindow(ZScore(threshold=2.0, window=8, warmup=4), 1, torch.device("cpu"))
    assert window.limits(None).item() == INF
    assert window.limits(5.0).item() == 5.0
    values = [1.0, 2.0, 3.0, 2.0, 1.0, 2.0]
    for value in values:
        window.add_(torch.tensor([value], dtype=torch.float64))
    expected = torch.tensor(values).mean().item() + 2 * torch.tensor(values).std().item()
    assert window.limits(None).item() == pytest.approx(expected)
    for bad in (NAN, INF):
        window.add_(torch.tensor([bad], dtype=torch.float64))
    window.add_(torch.tensor([1e9], dtype=torch.float64), skip=torch.ones(()))
    assert window.limits(None).item() == pytest.approx(expected)
    assert window.limits(0.1).item() == pytest.approx(0.1)
    for _ in range(20):
        window.add_(torch.tensor([7.0], dtype=torch.float64))
    assert window.limits(None).item() == pytest.approx(7.0), "old norms leave the window"
