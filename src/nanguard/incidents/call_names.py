"""Names of the torch functions that a saved tape may call. The table is made from torch, never from what is read."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions

from nanguard.state.warned import as_warned_before
from nanguard.step.tape import name_of, words
from nanguard.step.tape_kinds import DRAWS, MAKES, PROPERTIES, ROW, kind_of

PLAIN_ARGUMENTS = frozenset((type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size))
"""Types of arguments that are written as they are."""

_NAMESPACES: dict[str, Any] = {
    "torch.Tensor": Tensor,
    "torch": torch,
    "torch.nn.functional": functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
}

_NEVER = words(
    "set_ apply_ map_ map2_ module_load pin_memory backward resize resize_ resize_as resize_as_ resize_as_sparse_ "
    "const_data_ptr from_file load save storage_type retain_grad autocast empty_quantized __setstate__ __array__ "
    "__array_wrap__ __dlpack__ __dlpack_device__ __reduce_ex__ __deepcopy__"
)
"""They call what they are given, or reach for memory or files: no part of a forward pass needs them."""

_NEVER_BEGINNINGS = ("_", "unsafe_", "fbgemm_", "quantized_", "miopen_", "cudnn_", "mkldnn_", "mps_", "sym_", "sparse_")


def function_named(name: Any) -> Any:
    """The torch function of this name. Raises ``ValueError`` for any other name."""
    found = _functions().get(name) if type(name) is str else None
    if found is None:
        raise ValueError(f"{name!r:.80} is not a torch function that a tape can hold: nothing is run")
    return found


def name_of_function(function: Any) -> str | None:
    """The name by which ``function_named`` finds it; None if there is none."""
    try:
        return _names().get(function)
    except TypeError:  # something of the program's that cannot be a key
        return None


@functools.cache
def _functions() -> dict[str, Any]:
    may_be_taped = {each for each in _overridable() if kind_of(each) & ROW}
    table: dict[str, Any] = {}
    for space, owner in _NAMESPACES.items():
        for name in dir(owner):
            value = getattr(owner, name, None)
            if _is_allowed(name) and _is_function(value) and (value in may_be_taped or _is_like_them(name, value)):
                table[f"{space}.{name}"] = value
    for name in sorted(PROPERTIES):
        for access in ("__get__", "__set__") if name in ("data", "real", "imag") else ("__get__",):
            table[f"torch.Tensor.{name}.{access}"] = getattr(getattr(Tensor, name), access)
    table["torch.autograd.grad"] = torch.autograd.grad
    table["torch.Tensor.requires_grad.__set__"] = getattr(Tensor.requires_grad, "__set__")  # noqa: B009
    return table


@functools.cache
def _names() -> dict[Any, str]:
    return {function: name for name, function in reversed(_functions().items())}


@as_warned_before()
def _overridable() -> set[Any]:
    return {each for space in get_overridable_functions().values() for each in space if _is_function(each)}


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, ModuleType)) and value.__hash__ is not None


def _is_allowed(name: str) -> bool:
    is_operator = name.startswith("__") and name.endswith("__")
    return name not in _NEVER and (is_operator or not name.startswith(_NEVER_BEGINNINGS))


def _is_like_them(name: str, value: Any) -> bool:
    """Functions that torch does not list though its modes are told of them."""
    is_write = name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name)
    is_of_torch = type(value) in (type(torch.add), type(Tensor.add)) and name_of(value) == name
    draws_or_makes = kind_of(value) & (DRAWS | MAKES) or (name.startswith("new_") and hasattr(Tensor, name))
    return bool(is_of_torch and kind_of(value) & ROW and (is_write or draws_or_makes))
