"""A whole model and its optimizers from half precision to fp32, in the middle of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanguard import _compat
from nanguard.state.names import plain_name, unwrapped
from nanguard.state.trees import named_tensors, with_dots

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def to_fp32_(
    model: nn.Module, optimizers: Iterable[Optimizer], extra_modules: Sequence[nn.Module] = ()
) -> tuple[str, ...]:
    """Casts all that is in fp16 or bf16 to fp32, in place, and returns the names of what was cast.

    That is parameters, buffers and optimizer state: ``"fc.weight"``, ``"fc.weight.exp_avg"``. Every tensor stays the
    object it was, so optimizers, schedules, averages and DDP go on as they are, as if all had been loaded in fp32. fp64
    stays fp64. Gradients are dropped. Where all is in fp32 already, nothing changes and the names are none.

    Call it between steps, on all ranks alike: no graph of the old parameters may be alive. Compiled code compiles
    anew; recorded CUDA graphs have to be recorded again. Hooks on parameters stay. Sharded parameters, and DDP with
    a ``mixed_precision`` of its own, are a ``ValueError``, and nothing changes.
    """
    optimizers = tuple(optimizers)
    wholes = (model, *extra_modules)
    modules = [module for whole in wholes for module in whole.modules()]
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if any(_compat.is_sharded(whole) for whole in wholes):
        raise ValueError("the parameters are sharded over ranks (FSDP or DTensor) and cannot be cast in place")
    if any(_compat.ddp_casts_itself(wrapper) for wrapper in wrappers):
        raise ValueError(
            "DistributedDataParallel with a mixed_precision of its own cannot be cast: use autocast instead"
        )

    halves = _halves(wholes, optimizers)
    if not halves:
        return ()
    for parameter in _parameters(wholes, optimizers):
        parameter.grad = None
    for _, tensor in halves:
        tensor.data = tensor.data.to(_WIDER[tensor.dtype])
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # the weights lay in one piece for cuDNN, and do no more
    for wrapper in wrappers:
        _compat.reduce_anew(wrapper)
    return tuple(name for name, _ in halves)


def _parameters(wholes: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    yield from (parameter for whole in wholes for parameter in whole.parameters())
    yield from (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _halves(wholes: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> list[tuple[str, Tensor]]:
    """Every tensor that is to be cast, once, with its name."""
    named: list[tuple[str, Any]] = []
    for number, whole in enumerate(wholes):
        prefix = f"extra_modules.{number - 1}." if number else ""
        inner = unwrapped(whole)
        named += [(prefix + plain_name(name), t) for name, t in (*inner.named_parameters(), *inner.named_buffers())]
    names: dict[int, str] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), name)
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.setdefault(id(parameter), f"optimizers.{number}.{place}")
            named.append((name, parameter))
        for key, state in optimizer.state.items():
            named += named_tensors(state, names.get(id(key), str(key)), with_dots)
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        if tensor.dtype in _WIDER:
            unique.setdefault(id(tensor), (name, tensor))
    return list(unique.values())
