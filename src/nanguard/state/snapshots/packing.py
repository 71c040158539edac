"""Where the copies of tensors lie: side by side in a few large chunks of memory.

torch rounds every pinned allocation up to a power of two, so that one for each tensor could cost twice the memory; and
tensors that lie side by side go to the host and back in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 256
_CHUNK = 128 << 20
"""Bytes of a chunk. A tensor that is larger gets a larger chunk, never pieces: each copy can be seen as one tensor."""

_PARCEL = 8 << 20
"""Up to this size tensors go between device and host together, from half of it on alone.

It is also the device memory that a copy to the host needs."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the copy of one tensor lies."""

    name: str
    chunk: int
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Parcel:
    """Copies that lie side by side in one chunk."""

    def __init__(self, places: list[Place], chunks: list[Tensor]) -> None:
        self.places = places
        self.start = places[0].start
        self.nbytes = _aligned(places[-1].start + places[-1].nbytes) - self.start
        """Up to where the next one could begin."""
        self.memory = chunks[places[0].chunk][self.start : self.start + self.nbytes]

    def goes_as_it_is(self, live: Mapping[str, Tensor]) -> bool:
        """Whether it is one tensor, whose bytes lie in memory just as its copy's do."""
        place, tensor = self.places[0], live[self.places[0].name]
        return len(self.places) == 1 and tensor.dtype is place.dtype and tensor.stride() == place.stride

    def pairs(self, image: Tensor, live: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each copy as it lies in ``image``, memory for this parcel alone, and the live tensor."""
        views = views_of(self.places, image, self.start)
        return [(view, live[name]) for name, view in views.items()]


def parcels_of(places: Iterable[Place], chunks: list[Tensor]) -> list[Parcel]:
    """Lots to travel by: small copies together, large ones alone."""
    lots: list[list[Place]] = []
    for place in places:
        if lots and _may_join(lots[-1], place):
            lots[-1].append(place)
        else:
            lots.append([place])
    return [Parcel(lot, chunks) for lot in lots]


def _may_join(lot: list[Place], place: Place) -> bool:
    last = lot[-1]
    return (
        place.chunk == last.chunk
        and place.start - (last.start + last.nbytes) < _ALIGN
        and place.start + place.nbytes - lot[0].start <= _PARCEL
        and max(place.nbytes, last.nbytes) < _PARCEL // 2
    )


def views_of(places: Iterable[Place], memory: Tensor, start: int = 0) -> dict[str, Tensor]:
    """The copies at these places, in memory that begins at byte ``start`` of their chunk."""
    typed: dict[torch.dtype, Tensor] = {}
    views = {}
    for place in places:
        whole = typed.get(place.dtype)
        if whole is None:
            whole = typed[place.dtype] = memory.view(place.dtype)
        offset = (place.start - start) // place.dtype.itemsize
        views[place.name] = whole.as_strided(place.shape, place.stride, offset)
    return views


def pack(live: Mapping[str, Tensor], *, pinned: bool) -> tuple[list[Place], list[int]]:
    """A place for each tensor, in order of chunk and start, and the sizes of the chunks: powers of two if pinned."""
    needs = {name: _aligned(nbytes_of(tensor)) for name, tensor in live.items()}
    rest = sorted(needs, key=needs.__getitem__, reverse=True)
    places: list[Place] = []
    sizes: list[int] = []
    while rest:
        largest, total = needs[rest[0]], sum(needs[name] for name in rest)
        sizes_to_try = _pinned_sizes(largest, total) if pinned else [max(_CHUNK, largest)]
        chosen = min((_fill(rest, needs, size) for size in sizes_to_try), key=_unused)[1]
        start = 0
        for name in chosen:
            tensor = live[name]
            stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            places.append(Place(name, len(sizes), start, nbytes_of(tensor), tensor.dtype, tensor.shape, stride))
            start += needs[name]
        sizes.append(_power_of_two(max(start, _ALIGN)) if pinned else start)
        rest = [name for name in rest if name not in chosen]
    return places, sizes


def _fill(names: list[str], needs: dict[str, int], size: int) -> tuple[int, dict[str, int]]:
    """The tensors, largest first, that go into a chunk of this size: small ones fill what large ones leave."""
    chosen: dict[str, int] = {}
    room = size
    for name in names:
        if needs[name] <= room:
            chosen[name] = needs[name]
            room -= needs[name]
    return size, chosen


def _unused(filled: tuple[int, dict[str, int]]) -> float:
    size, chosen = filled
    return 1 - sum(chosen.values()) / size


def _pinned_sizes(largest: int, total: int) -> list[int]:
    """Powers of two to try for a chunk: which one is filled best depends on the sizes of the tensors."""
    least = max(_power_of_two(largest), min(_CHUNK, _power_of_two(total + 1) // 2))
    most = max(least, min(_power_of_two(total), max(8 * _CHUNK, 4 * least)))
    return [1 << bits for bits in range(least.bit_length() - 1, most.bit_length())]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order (channels_last)."""
    if tensor.is_contiguous():
        return True
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
