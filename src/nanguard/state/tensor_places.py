"""Where the parameters and buffers of a model are: found by one walk through its modules, for several questions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from nanguard import _compat
from nanguard.state.names import plain_name


class TensorPlace(NamedTuple):
    """A parameter or buffer that ``owner`` registers under ``key``; None if it is not there."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor | None
    is_buffer: bool


Places = list[TensorPlace]


def tensor_places(module: nn.Module, prefix: str) -> Places:
    """All parameters and buffers; one that has two names has two places."""
    places = []
    for path, owner in module.named_modules():
        parameters, buffers = _compat.parameters_of(owner), _compat.buffers_of(owner)
        if parameters or buffers:
            start = plain_name(f"{prefix}.{path}")
            for key, parameter in parameters.items():
                places.append(TensorPlace(f"{start}.{key}", owner, key, parameter, False))
            for key, buffer in buffers.items():
                places.append(TensorPlace(f"{start}.{key}", owner, key, buffer, True))
    return places


def tensors_in(places: Iterable[TensorPlace]) -> dict[str, Tensor]:
    """By name, those that are there; one that has two places once."""
    found, seen = {}, set()
    for place in places:
        if place.tensor is not None and id(place.tensor) not in seen:
            seen.add(id(place.tensor))
            found[place.name] = place.tensor
    return found


def buffers_in(places: Places) -> set[str]:
    """Names in ``tensors_in`` of buffers."""
    return set(tensors_in(place for place in places if place.is_buffer))


def shapes_in(places: Places) -> dict[str, list[int]]:
    """Of the parameters, by all their names."""
    return {name: list(tensor.shape) for name, _, _, tensor, is_buffer in places if not (tensor is None or is_buffer)}
