"""Detects the format of a checkpoint by its contents, not its name, and checks every tensor in it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch, fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from nanguard.checkpoint.distributed import is_inside, metadata_files, open_distributed
from nanguard.checkpoint.findings import CheckReport, FileReport, NumberReport, TensorReport
from nanguard.checkpoint.source import Entry, OpenedFile, Unreadable
from nanguard.checkpoint.torchfile import PICKLE, ZIP, open_torch
from nanguard.checkpoint.values import count, local, num_values, skip_reason

OnProgress = Callable[[str, int, int], None]
"""Called with the path of a file, the number of values done, and the total."""

_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
_INDEX = ".index.json"
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors format; the bytes of JSON read as a number exceed it
_WITHOUT_NAN = {"F4", "F6_E2M3", "F6_E3M2"}  # dtypes of safetensors that cannot hold NaN or Inf; torch may lack them
# Trainers save these next to the weights: settings and random states as objects that need code to be read.
_NO_WEIGHTS = ("training_args.bin", "rng_state*.pth", "random_states_*")
# Files of a saved incident. Its batch is expected to be non-finite.
_INCIDENT, _KEPT = "incident.json", "tensors.safetensors"


def check(
    path: str | os.PathLike[str], *, allow: Iterable[str] = (), progress: OnProgress | None = None
) -> CheckReport:
    """Looks for NaN and Inf in the checkpoint at ``path``: a file, an index of shards, or a folder of these.

    Never runs code from a file, and never raises because of its contents: what cannot be read is in the report. Tensors
    whose names match a pattern of ``allow`` (as in ``"*.mask"``) may contain non-finite values.
    """
    if isinstance(allow, str):
        raise ValueError(f"allow={allow!r}: a list of patterns is accepted, as in allow=[{allow!r}]")
    patterns = tuple(allow)
    paths, passed_over = _find(Path(path))
    files = tuple(_check_file(file, patterns, progress or (lambda path, done, total: None)) for file in paths)
    return CheckReport(path=str(path), files=files, passed_over=tuple(str(p) for p in passed_over))


def _find(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to check at this path, and those that are not checked."""
    if not path.is_dir() or _is_distributed(path):
        return [path], []
    found: list[Path] = []
    passed_over: list[Path] = []
    for folder, folders, names in os.walk(path, onerror=lambda error: found.append(Path(error.filename))):
        here = Path(folder)
        found.extend(here / name for name in folders if _is_distributed(here / name))
        folders[:] = [n for n in folders if not n.startswith(".") and not _is_distributed(here / n)]
        passed_over.extend(here / n for n in names if any(fnmatch(n, pattern) for pattern in _NO_WEIGHTS))
        if here != path and {_INCIDENT, _KEPT} <= set(names):
            passed_over.append(here / _KEPT)
        indexes = [here / name for name in names if name.endswith(_INDEX)]
        shards = {shard for index in indexes for shard in _shards_of(index)}
        files = [here / name for name in names if Path(name).suffix in _SUFFIXES]
        found.extend(indexes + [file for file in files if file not in shards and file not in passed_over])
    return sorted(found) or [path], sorted(passed_over)


def _is_distributed(folder: Path) -> bool:
    return bool(metadata_files(folder)) or any(folder.glob("*.distcp"))


def _shards_of(index: Path) -> set[Path]:
    try:
        return {index.parent / shard for shard in _weight_map(index).values()}
    except (OSError, Unreadable):
        return set()


# ---- one file --------------------------------------------------------------------------------------------------------


def _check_file(path: Path, allow: Sequence[str], progress: OnProgress) -> FileReport:
    """Opens a file or its shards one by one, so that only one is in memory."""
    kind = ""
    tensors: list[TensorReport] = []
    numbers: list[NumberReport] = []
    problems: list[str] = []
    try:
        for source in _open(path):
            kind = source.format
            problems += source.problems
            numbers += [
                NumberReport(name=name, value=value, allowed=_matches(name, allow)) for name, value in source.numbers
            ]
            meter = _Meter(path, source, progress)
            for entry in source.entries:
                try:
                    tensors.append(_look(entry, allow, meter.tick))
                except (OSError, Unreadable) as error:
                    problems.append(f"{entry.name}: {_reason(error)}")
    except (OSError, Unreadable) as error:
        problems.append(_reason(error))
    except Exception as error:  # a hostile file can raise anything
        problems.append(f"damaged or malicious ({type(error).__name__}: {error})")
    return FileReport(
        path=str(path),
        format=kind or "unknown",
        tensors=tuple(tensors),
        numbers=tuple(numbers),
        problems=tuple(problems),
    )


class _Meter:
    """Sums up the values done and reports them."""

    def __init__(self, path: Path, source: OpenedFile, progress: OnProgress) -> None:
        self._path, self._progress = str(path), progress
        self._done, self._total = 0, sum(entry.num_values for entry in source.entries)

    def tick(self, values: int) -> None:
        self._done += values
        self._progress(self._path, self._done, self._total)


def _look(entry: Entry, allow: Sequence[str], tick: Callable[[int], None]) -> TensorReport:
    counts: Counter[str] = Counter()
    shape, skipped, dtype = entry.shape, entry.skipped, entry.dtype
    for fetch in entry.parts:
        tensor = local(fetch())
        dtype = str(tensor.dtype).removeprefix("torch.")
        if shape is None:
            shape = () if tensor.is_nested else tuple(tensor.shape)
        skipped = skip_reason(tensor)
        try:
            counts += Counter(num_values=num_values(tensor)) if skipped else count(tensor, tick)
        except Exception as error:  # most operations do not support some kinds of tensors
            raise Unreadable(f"cannot be checked ({type(error).__name__}: {error})") from None
    if not entry.parts:
        counts["num_values"] = entry.num_values
    return TensorReport(
        name=entry.name,
        dtype=dtype,
        shape=shape or (),
        skipped=skipped,
        allowed=_matches(entry.name, allow),
        **{"num_values": 0, **counts},
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _reason(error: OSError | Unreadable) -> str:
    return f"cannot be opened: {error.strerror or error}" if isinstance(error, OSError) else str(error)


# ---- formats ---------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Iterator[OpenedFile]:
    if path.is_dir():
        os.listdir(path)  # raises if the folder may not be read
        if not _is_distributed(path):
            suffixes = ", ".join(sorted(_SUFFIXES))
            raise Unreadable(
                f"no checkpoint in this folder: no file ends in {suffixes}. Saved incidents, settings and random "
                "states are not checked unless you name them"
            )
        yield open_distributed(path)
    elif path.name == ".metadata" and path.is_file():
        yield open_distributed(path.parent)
    elif not path.exists():
        raise Unreadable("no such file")
    elif not path.is_file():
        raise Unreadable("neither a file nor a folder")
    elif path.suffix == ".distcp":
        raise Unreadable("one shard of a torch.distributed.checkpoint. Check its folder instead")
    else:
        yield from _open_file(path)


def _open_file(path: Path) -> Iterator[OpenedFile]:
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise Unreadable("empty: 0 bytes")
    # Safetensors first: its leading length may look like the first bytes of another format.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LONGEST_HEADER:
        yield _open_safetensors(path)
    elif head.startswith((ZIP, PICKLE)):
        yield open_torch(path)
    elif head.startswith(b"version https://git-lfs"):
        raise Unreadable("a Git LFS pointer, not the file itself. Fetch it with: git lfs pull")
    elif head.lstrip().startswith(b"{"):
        yield from _open_index(path)
    elif path.suffix == ".safetensors":
        raise Unreadable("truncated or damaged: it does not begin as a safetensors file does")
    else:
        raise Unreadable("not a checkpoint format that nanguard knows, or damaged")


def _open_safetensors(path: Path) -> OpenedFile:
    from safetensors import SafetensorError, safe_open

    source = OpenedFile(format="safetensors")
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise Unreadable(f"truncated or damaged ({error})") from None

    def fetch(name: str) -> Any:
        try:
            return file.get_tensor(name)
        except Exception as error:  # an unknown dtype raises different errors
            raise Unreadable(f"cannot be read by this torch ({type(error).__name__}: {error})") from None

    for name in file.keys():  # noqa: SIM118, this is no dict
        piece = file.get_slice(name)
        shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
        tiny = dtype in _WITHOUT_NAN
        source.entries.append(
            Entry(
                name=name,
                num_values=prod(shape),
                shape=shape,
                dtype=dtype,
                parts=[] if tiny else [partial(fetch, name)],
                skipped=f"{dtype} has no NaN or Inf" if tiny else None,
            )
        )
    return source


def _open_index(path: Path) -> Iterator[OpenedFile]:
    """The shards of a Hugging Face index, one by one."""
    shards: dict[str, set[str]] = {}
    for name, shard in _weight_map(path).items():
        shards.setdefault(shard, set()).add(name)
    for shard, names in sorted(shards.items()):
        try:
            if not is_inside(path.parent, Path(shard)):
                raise Unreadable("outside of the checkpoint's folder")
            file = path.parent / shard
            if not file.is_file():
                raise Unreadable("missing")
            (source,) = _open_file(file)
        except (OSError, Unreadable, ValueError) as error:
            yield OpenedFile(format="index", problems=[f"its shard {shard}: {error}"])
            continue
        source.format = f"{source.format}, {len(shards)} shards"
        absent = sorted(names - {entry.name for entry in source.entries})
        source.problems += [f"{name}: not in its shard {shard}" for name in absent]
        yield source


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable('JSON, but not an index of shards: it has no "weight_map", or is damaged') from None
