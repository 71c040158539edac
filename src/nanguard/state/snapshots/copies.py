"""Copies of a training state, made without delaying training, and put back.

On a GPU the state is read on a stream of its own while forward and backward passes go on. Only a write to what is being
read has to wait, and ``fence`` makes it wait on the device. A copy to host memory goes there directly. It needs a few
MiB of device memory and no more: whatever we held there would be missing when training needs nearly all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanguard import _compat
from nanguard.errors import ProtocolError
from nanguard.state.snapshots.bulk import copy_all
from nanguard.state.snapshots.packing import Parcel, Place, flat, nbytes_of, pack, parcels_of, views_of

Where = Literal["device", "host"]


class Copies:
    """A state as it was at ``take``. Made by ``Copier``."""

    def __init__(
        self,
        copier: Copier,
        names: tuple[str, ...],
        places: list[Place],
        chunks: list[Tensor],
        loose: dict[str, Tensor],
    ) -> None:
        self.names = names
        self._copier = copier
        self._places = {place.name: place for place in places}
        self._chunks = chunks
        self._views: dict[str, Tensor] = {}
        for chunk, inside in itertools.groupby(places, key=lambda place: place.chunk):
            self._views |= views_of(inside, chunks[chunk])
        self._parcels: dict[frozenset[str], list[Parcel]] = {}
        self._loose = loose
        self._done: Any = None
        self._is_taken = False

    @property
    def where(self) -> Where:
        return self._copier.where

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(map(nbytes_of, (*self._views.values(), *self._loose.values())))

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory they lie in: a little more."""
        return sum(map(nbytes_of, (*self._chunks, *self._loose.values())))

    def ready(self) -> bool:
        """Whether the copies are complete. Does not sync."""
        return self._is_taken and (self._done is None or bool(self._done.query()))

    def wait(self) -> None:
        """Makes the host wait until the copies are complete."""
        if self._done is not None:
            self._done.synchronize()

    def __getitem__(self, name: str) -> Tensor:
        """One copy, to be read after ``wait`` and never written to. Gone when its memory is taken for another state."""
        view = self._views.get(name)
        return self._loose[name] if view is None else view

    @torch.inference_mode(False)
    @torch.no_grad()
    def put_back(self, live: Mapping[str, Tensor]) -> None:
        """Writes the copies of these names into ``live``, on the current stream; casts if the dtype has changed.

        ``KeyError`` for a name that was not copied, ``ValueError`` for a shape that differs, before anything is
        written. Does not sync, unless a tensor has moved to another device.
        """
        if not self._is_taken:
            raise ProtocolError("put_back() was called on memory that no state was copied into: call take() first")
        _check(self, live)
        copier = self._copier
        here = {name: live[name] for name in self._places if name in live and copier.packs(live[name])}
        if self._done is not None:
            copier.fence()
            torch.cuda.current_stream(copier.device).wait_event(self._done)
            if self.where == "device":
                copy_all((tensor, self._views[name]) for name, tensor in here.items())
            else:
                self._from_host(here)
        elsewhere = {name: live[name] for name in live if name not in here}
        if not elsewhere.keys() <= self._loose.keys():
            self.wait()
        copy_all((tensor, self[name]) for name, tensor in elsewhere.items())

    def _from_host(self, live: dict[str, Tensor]) -> None:
        for parcel in self.parcels(live):
            # Anything else by way of the device: on the host torch would cast and reorder without waiting for `_done`.
            if parcel.goes_as_it_is(live):
                name = parcel.places[0].name
                flat(live[name]).copy_(flat(self._views[name]), non_blocking=True)
                continue
            try:
                image = self._copier.image(parcel.nbytes)
            except torch.OutOfMemoryError:
                self.wait()  # the host waits, and tensors go one by one: a state must not be put back by halves
                copy_all((live[place.name], self._views[place.name]) for place in parcel.places)
                continue
            image.copy_(parcel.memory, non_blocking=True)
            copy_all((tensor, view) for view, tensor in parcel.pairs(image, live))

    def parcels(self, names: Collection[str]) -> list[Parcel]:
        """The copies of ``names`` in lots to travel by."""
        asked = frozenset(names)
        found = self._parcels.get(asked)
        if found is None:
            if len(self._parcels) == 4:  # a state is copied in two sets of names, always the same
                self._parcels.clear()
            places = [place for place in self._places.values() if place.name in asked]
            found = self._parcels[asked] = parcels_of(places, self._chunks)
        return found

    def fits(self, live: Mapping[str, Tensor], copier: Copier) -> bool:
        """Whether ``live`` can be copied into this memory as it is."""
        if copier is not self._copier or live.keys() != set(self.names):
            return False
        places = self._places
        for name, tensor in live.items():
            place = places.get(name)
            if copier.packs(tensor) != (place is not None):
                return False
            if place is not None and not (tensor.dtype is place.dtype and tensor.shape == place.shape):
                return False
        return True

    def drop(self) -> None:
        """Lets go of the memory: it goes back to torch, which waits for copies under way before it is used again."""
        self.names, self._places, self._chunks, self._views, self._loose = (), {}, [], {}, {}
        self._parcels, self._done, self._is_taken = {}, None, False

    def keep_loose(self, live: Mapping[str, Tensor]) -> None:
        """Copies at once what is not packed."""
        pairs = []
        for name, tensor in live.items():
            if name not in self._views:
                old = self._loose.get(name)
                if old is not None and _alike(old, tensor):
                    pairs.append((old, tensor))
                else:
                    self._loose[name] = tensor.detach().clone()
        copy_all(pairs)

    def finish(self, done: Any) -> None:
        self._done, self._is_taken = done, True


class Copier:
    """Copies the tensors of one device, next to where they are or to host memory.

    Tensors that lie elsewhere, such as step counters on the CPU, and those that are no plain tensors are copied at once
    and stay on their device.
    """

    def __init__(self, device: torch.device, where: Where) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.where: Where = where
        self._reader: Any = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._read: Any = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def reserve(self, live: Mapping[str, Tensor]) -> Copies:
        """Memory for a state like ``live``, to be given to ``take``: pinning memory of the host takes a while."""
        packed = {name: tensor for name, tensor in live.items() if self.packs(tensor)}
        on_host = self.where == "host"
        places, sizes = pack(packed, pinned=on_host)
        chunks = [_pinned(size) if on_host else self.image(size) for size in sizes]
        if not on_host:
            for chunk in chunks:
                chunk.record_stream(self._reader)
        return Copies(self, tuple(live), places, chunks, {})

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, live: Mapping[str, Tensor], into: Copies | None = None, *, at_once: Collection[str] = ()) -> Copies:
        """Starts copying ``live`` as it is now. Does not sync.

        From here on these tensors may be written to after a ``fence`` only; those ``at_once`` at any time, since they
        are copied on the current stream itself (buffers, which a forward pass writes to). ``into`` gives its memory,
        and its content is gone.
        """
        self._refuse_capture("take")
        if into is not None and into.fits(live, self):
            copies = into
        else:
            if into is not None:
                into.drop()
            copies = self.reserve(live)
        try:
            copies.keep_loose(live)
            copies.finish(self._begin(copies, live, at_once) if self._on_cuda else None)
        except RuntimeError as error:
            if _compat.stops_device(error):
                _compat.never_free([copies])  # pinned memory
            raise
        return copies

    def _begin(self, copies: Copies, live: Mapping[str, Tensor], at_once: Collection[str]) -> Any:
        """Starts copying what is packed. Returns the event that tells when that is done."""
        packed = [place.name for place in copies._places.values()]
        now = {name for name in at_once if name in copies._places}
        later = {name: live[name] for name in packed if name not in now}
        copy = self._to_device if self.where == "device" else self._to_host
        done = copy(copies, {name: live[name] for name in now}, later)
        for tensor in later.values():
            tensor.record_stream(self._reader)  # its owner may drop it before it was read
        return done

    def fence(self) -> None:
        """Makes the current stream wait, on the device, until what was taken may be written to. Does not sync.

        Call it right before the optimizers step. Does nothing if nothing is being read.
        """
        if self._read is not None:
            self._refuse_capture("fence")
            torch.cuda.current_stream(self.device).wait_event(self._read)
            self._read = None

    @property
    def is_reading(self) -> bool:
        """Whether the device may still read what was taken: ``fence`` has an effect."""
        return self._read is not None

    def packs(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor on this GPU, which can be copied while training goes on."""
        return (
            self._on_cuda
            and tensor.device == self.device
            and type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )

    def _to_device(self, copies: Copies, now: dict[str, Tensor], later: dict[str, Tensor]) -> Any:
        views = copies._views
        copy_all((views[name], tensor) for name, tensor in now.items())
        self._reader.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._reader):
            copy_all((views[name], tensor) for name, tensor in later.items())
            self._read = _event(self._reader)
        return self._read

    def _to_host(self, copies: Copies, now: dict[str, Tensor], later: dict[str, Tensor]) -> Any:
        current = torch.cuda.current_stream(self.device)
        if copies._done is not None:  # the host memory may still be on its way to hold the state before
            current.wait_event(copies._done)
        early, rest = copies.parcels(now), copies.parcels(later)
        gathered = [parcel.nbytes for parcel in early if not parcel.goes_as_it_is(now)]
        gathered += [parcel.nbytes for parcel in rest if not parcel.goes_as_it_is(later)]
        scratch = self.image(max(gathered, default=0))  # memory of the reader's own would stay with that stream
        _send(copies, early, now, scratch)
        self._reader.wait_stream(current)
        with torch.cuda.stream(self._reader):
            _send(copies, rest, later, scratch)
            self._read = _event(self._reader)
        scratch.record_stream(self._reader)
        return self._read

    def image(self, nbytes: int) -> Tensor:
        """Memory on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _refuse_capture(self, call: str) -> None:
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise ProtocolError(
                f"{call}() was called while a CUDA graph is being captured: copy states between replays, not in them"
            )


def _send(copies: Copies, parcels: list[Parcel], live: dict[str, Tensor], scratch: Tensor) -> None:
    """To the host on the current stream; small tensors are gathered first, each time in the same memory."""
    for parcel in parcels:
        if parcel.goes_as_it_is(live):
            name = parcel.places[0].name
            flat(copies._views[name]).copy_(flat(live[name]), non_blocking=True)
        else:
            image = scratch[: parcel.nbytes]
            copy_all(parcel.pairs(image, live))
            parcel.memory.copy_(image, non_blocking=True)


@torch.inference_mode(False)
@torch.no_grad()
def write_back(saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """``Copies.put_back`` for tensors that came from elsewhere, such as a file. Syncs if they change devices."""
    _check(saved, live)
    copy_all((tensor, saved[name]) for name, tensor in live.items())


def _check(saved: Mapping[str, Tensor] | Copies, live: Mapping[str, Tensor]) -> None:
    for name, tensor in live.items():
        if saved[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} now and had {tuple(saved[name].shape)} when it was copied: it "
                "cannot be put back, and nothing was written"
            )


def _alike(a: Tensor, b: Tensor) -> bool:
    is_plain = a.layout is torch.strided and b.layout is torch.strided
    return is_plain and type(a) is type(b) and a.dtype is b.dtype and a.shape == b.shape and a.device == b.device


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _event(stream: Any) -> Any:
    """An event right here on ``stream``; a thread that waits for it sleeps."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
