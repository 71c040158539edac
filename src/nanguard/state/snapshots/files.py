"""One snapshot: a folder of ``tensors.safetensors`` and ``facts.json``, written through to the disk and verified.

``facts.json`` begins with its format and a checksum of all that follows. It holds the size and checksum of the other
file, and what is where in it; its ``facts`` are as ``codec`` writes them. The checksums are against accidents, not
against someone who means harm: but nothing that is read here is ever run.

The tensors are written here rather than by the library of that format, for its older versions copy everything first,
and none takes tensors that share memory. That library reads the file like any other.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nanguard.state.snapshots.codec import DTYPES, decode, encode, unfit_tensor

FORMAT = 2
TENSORS, FACTS = "tensors.safetensors", "facts.json"

_CHUNK = 4 << 20
_SEAL = re.compile(rb'\{"format": ([0-9]+), "sha256": "([0-9a-f]{64})", ')
# What any reader of safetensors knows; all else is written as its bytes, with one more dimension.
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot as it was written. Its tensors are new ones on the CPU; those that shared memory share it again."""

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Draft:
    """All of a snapshot that is known before anything is written. Raises ``ValueError`` for what cannot be kept."""

    facts: Any
    contents: dict[str, Tensor]
    places: dict[str, dict[str, str]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Draft:
        encoded, of_facts = encode(dict(facts))
        return cls(encoded, *_arranged(tensors, of_facts))

    def write(self, folder: Path, step: int) -> None:
        """Writes it to ``folder``, which is new. When this returns it is on the disk."""
        folder.mkdir()
        document = {"step": step, "time": time.time(), **write_tensors(folder / TENSORS, self.contents)}
        _write_facts(folder / FACTS, {**document, **self.places, "facts": self.facts})
        sync(folder)


def _arranged(
    tensors: Mapping[str, Tensor], of_facts: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their name in the file, each once, and under which name to look for which."""
    contents: dict[str, Tensor] = {}
    names: dict[Any, str] = {}
    places: dict[str, dict[str, str]] = {"tensors": {}, "facts_tensors": {}}
    for group, prefix, members in (("tensors", "", tensors), ("facts_tensors", "facts/", of_facts)):
        for name, tensor in members.items():
            if type(name) is not str or not isinstance(tensor, Tensor):
                raise ValueError(f"tensors must be tensors by name, got {name!r}: {type(tensor).__name__}")
            if trouble := unfit_tensor(tensor):
                raise ValueError(f"{name}: {trouble} cannot be kept in a snapshot; accepted are dense tensors")
            same: Any = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            same = (*same, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else object()
            if same not in names:
                names[same] = prefix + name
                while names[same] in contents or names[same] == "__metadata__":  # the latter is not a tensor's to use
                    names[same] += "'"
                contents[names[same]] = tensor.detach()
            places[group][name] = names[same]
    return contents, places


def write_tensors(path: Path, contents: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes a safetensors file tensor by tensor and returns what it takes to read and verify it."""
    # The widest first, as others who write this format do: then each is aligned for those who map the file.
    ordered = sorted(contents.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        known = _SAFETENSORS.get(tensor.dtype)
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape] if known else [*tensor.shape, tensor.element_size()]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (memoryview(len(text).to_bytes(8, "little")), memoryview(text)):
            file.write(part)
            digest.update(part)
        for _, tensor in ordered:
            whole = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            for part in _chunks(_memory(whole)):
                file.write(part)
                digest.update(part)
        flush(file)
    index = {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": [*t.shape]} for name, t in ordered}
    return {"size": 8 + len(text) + end, "header": 8 + len(text), "tensors_sha256": digest.hexdigest(), "index": index}


def _write_facts(path: Path, document: Mapping[str, Any]) -> None:
    rest = json.dumps(document, allow_nan=False).encode("ascii").removeprefix(b"{")
    seal = f'{{"format": {FORMAT}, "sha256": "{hashlib.sha256(rest).hexdigest()}", '
    with path.open("xb") as file:
        file.write(seal.encode("ascii") + rest)
        flush(file)


def read(path: Path, step: int) -> Stored:
    """The snapshot in this folder, verified byte by byte. Raises one of many things if it is not that of ``step``."""
    raw = (path / FACTS).read_bytes()
    seal = _SEAL.match(raw)
    if seal is None:
        raise ValueError(f"{FACTS} is incomplete or was changed")
    if int(seal[1]) != FORMAT:
        raise ValueError(f"it has format {int(seal[1])}, and this nanguard reads format {FORMAT}")
    if hashlib.sha256(raw[seal.end() :]).hexdigest().encode("ascii") != seal[2]:
        raise ValueError(f"{FACTS} is incomplete or was changed")
    document = json.loads(raw)
    if document["step"] != step:
        raise ValueError(f"{FACTS} is one of step {document['step']}")
    contents = read_tensors(path / TENSORS, document)
    tensors = {name: contents[place] for name, place in document["tensors"].items()}
    facts = decode(document["facts"], {name: contents[place] for name, place in document["facts_tensors"].items()})
    return Stored(step, tensors, dict(facts))


def read_tensors(path: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    shapes = {name: (DTYPES[entry["dtype"]], entry["shape"]) for name, entry in document["index"].items()}
    if any(length < 0 for _, shape in shapes.values() for length in shape):
        raise ValueError(f"{FACTS} describes tensors that cannot exist")
    expected = document["header"] + sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    digest = hashlib.sha256()
    contents: dict[str, Tensor] = {}
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if not size == document["size"] == expected:  # before memory is taken for what is not there
            raise ValueError(f"{TENSORS} has {size:,} bytes instead of {document['size']:,}")
        _fill(file, memoryview(bytearray(document["header"])), digest)
        for name, (dtype, shape) in shapes.items():
            raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
            _fill(file, _memory(raw), digest)
            contents[name] = raw.view(dtype).reshape(shape)
    if digest.hexdigest() != document["tensors_sha256"]:
        raise ValueError(f"{TENSORS} is not what was written: its checksum differs")
    return contents


def _fill(file: BinaryIO, memory: memoryview, digest: Any) -> None:
    for part in _chunks(memory):
        done = 0
        while done < len(part):
            got = file.readinto(part[done:])  # type: ignore[attr-defined]
            if not got:
                raise ValueError(f"{TENSORS} ends too early")
            done += got
        digest.update(part)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, themselves; the tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b"").cast("B")


def _chunks(memory: memoryview) -> Iterator[memoryview]:
    return (memory[begin : begin + _CHUNK] for begin in range(0, len(memory), _CHUNK))


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Returns when the names in ``folder`` are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot be asked to
            raise
    finally:
        os.close(file)


def changed_at(path: Path) -> float:
    """When it was last written to; never, if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf
