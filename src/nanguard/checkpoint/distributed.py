"""Reads a checkpoint of ``torch.distributed.checkpoint``: ``.metadata`` and its shards.

torch reads ``.metadata`` with plain pickle, which can run any code. The unpickler here accepts only a dozen names and
returns inert records for them.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from nanguard.checkpoint.source import Entry, OpenedFile, Unreadable
from nanguard.checkpoint.torchfile import load

_METADATA_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MEM_FORMAT_ENCODING",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_StoragePrefix",
}
_METADATA_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # torch before 2.3
}


class _Record:
    """Replaces any class of the metadata and keeps its fields."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def get(self, field: str) -> Any:
        return self.__dict__.get(field)


class _MetadataUnpickler(pickle.Unpickler):
    """Never imports, and calls only the constructors below."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES and name in _METADATA_CLASSES:
            # A new class each time, so that a file cannot change the class for other files.
            return type(name, (_Record,), {"kind": name})
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _nothing
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return _nothing
        raise Unreadable(
            f".metadata asks for {module}.{name}, which no checkpoint of torch.distributed.checkpoint needs, and which "
            "could run any code. nanguard did not run it. Do not load this checkpoint unless you trust its origin"
        )


def _size(*args: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in args[0]) if args else ()


def _nothing(*_: Any) -> None:
    return None


def metadata_files(folder: Path) -> list[Path]:
    """One file for all ranks, or one for each. Empty if this is no such checkpoint or it is incomplete."""
    shared = folder / ".metadata"
    return [shared] if shared.is_file() else sorted(folder.glob("__*.metadata"))


def open_distributed(folder: Path) -> OpenedFile:
    """Reads small objects at once, and each shard of a tensor when it is needed."""
    source = OpenedFile(format="torch.distributed.checkpoint")
    files = metadata_files(folder)
    if not files:
        raise Unreadable("has no .metadata, which is written last: the checkpoint was not completely saved")
    parts: dict[str, list[Callable[[], Tensor]]] = {}
    described: dict[str, _Record] = {}
    for file in files:
        tensors, stored = _read_metadata(file)
        described |= tensors
        for name, place in stored:
            shard = _open_shard(folder, place)
            if name in tensors:
                parts.setdefault(name, []).append(partial(_tensor, shard))
                continue
            try:
                with shard() as piece:
                    source.add(load(piece), name)
            except (OSError, Unreadable) as error:
                source.problems.append(f"{name}: {error}")
    for name, record in described.items():
        shape, chunks = record.get("size"), record.get("chunks")
        shape = shape if isinstance(shape, tuple) else ()
        found = parts.get(name, [])
        if isinstance(chunks, list) and len(found) < len(chunks):
            source.problems.append(f"{name}: {len(found)} of its {len(chunks)} shards are stored")
        source.entries.append(Entry(name=name, num_values=prod(shape), shape=shape, parts=found))
    return source


def _read_metadata(file: Path) -> tuple[dict[str, _Record], list[tuple[str, _Record]]]:
    """The tensors by name, and where each thing is stored."""
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        tensors = {
            str(name): record
            for name, record in metadata.get("state_dict_metadata").items()
            if record.kind == "TensorStorageMetadata"
        }
        stored = [(str(index.get("fqn")), place) for index, place in metadata.get("storage_data").items()]
    except (OSError, Unreadable):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise Unreadable(f"{file.name} is truncated or damaged ({type(error).__name__})") from None
    return tensors, stored


def _open_shard(folder: Path, place: Any) -> Callable[[], IO[bytes]]:
    """A function that opens the part of a file that contains a shard."""

    def shard() -> IO[bytes]:
        try:
            path, offset, length = Path(place.get("relative_path")), int(place.get("offset")), int(place.get("length"))
        except (AttributeError, TypeError, ValueError):
            raise Unreadable(".metadata does not say where it is stored") from None
        if place.get("transform_descriptors"):
            raise Unreadable(f"stored with {place.get('transform_descriptors')}, which nanguard does not read")
        if not is_inside(folder, path):
            raise Unreadable(f"stored outside of the checkpoint, in {path}")
        file = folder / path
        if not file.is_file():
            raise Unreadable(f"its shard {path} is missing")
        size = file.stat().st_size
        if not 0 <= offset <= offset + length <= size:
            raise Unreadable(f"its shard {path} is truncated: {size:,} bytes instead of {offset + length:,}")
        return cast(IO[bytes], io.BufferedReader(_Slice(file, offset, length), 1 << 20))

    return shard


def _tensor(shard: Callable[[], IO[bytes]]) -> Tensor:
    with shard() as file:
        value = load(file)
    if not isinstance(value, Tensor):
        raise Unreadable(f"its shard contains {type(value).__name__}, but .metadata says it is a tensor")
    return value


def is_inside(folder: Path, relative: Path) -> bool:
    """Whether a path from a file stays inside its folder. Symbolic links are allowed."""
    return not relative.is_absolute() and ".." not in relative.parts


class _Slice(io.RawIOBase):
    """A part of a file as a file object, so that a shard can be read without a copy."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset, self._length, self._at = offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, to + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view) or 0
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
