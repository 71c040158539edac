"""Half precision to fp32, in place, in the middle of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanguard import _compat

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def to_fp32_(models: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Casts those of ``tensors`` that are in half precision, and returns their names. ``models`` hold some of them."""
    modules = [module for model in models for module in model.modules()]
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if any(_compat.is_sharded(model) for model in models):
        raise ValueError("the parameters are sharded over ranks (FSDP or DTensor) and cannot be cast in place")
    if any(_compat.ddp_casts_itself(wrapper) for wrapper in wrappers):
        raise ValueError(
            "DistributedDataParallel with a mixed_precision of its own cannot be cast: use autocast instead"
        )

    halves: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _WIDER:
            halves.setdefault(id(tensor), (name, tensor))
    if not halves:
        return ()
    for tensor in tensors.values():
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            tensor.grad = None
    for _, tensor in halves.values():
        tensor.data = tensor.data.to(_WIDER[tensor.dtype])
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the weights in one piece of memory
    for wrapper in wrappers:
        _compat.reduce_anew(wrapper)
    return tuple(name for name, _ in halves.values())


def has_half_weights(model: nn.Module) -> bool:
    return any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
