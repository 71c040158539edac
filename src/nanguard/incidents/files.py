"""One incident on disk: a folder with ``incident.json`` and, if data were captured, ``tensors.safetensors``.

``incident.json`` is for people and programs. Its ``contents`` are trees in the format of ``trees``, and its ``tensors``
are size, checksum and types of the other file, which any reader of safetensors can open. Complex numbers are stored as
pairs, and types that safetensors does not know as bytes. Nothing in either file can run code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanguard.incidents.trees import flatten, restore
from nanguard.records.plain import plain
from nanguard.records.words import reason
from nanguard.state.rng import RngState
from nanguard.state.snapshots.codec import DTYPES, unfit_tensor
from nanguard.state.snapshots.files import flush, read_tensors, sync, write_tensors
from nanguard.state.snapshots.packing import nbytes_of

SCHEMA = 1
INCIDENT, TENSORS = "incident.json", "tensors.safetensors"


@dataclass(slots=True)
class BundleDraft:
    """What will be written: trees, the tensors they refer to, and what was left out, with the reason."""

    trees: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append({"what": what, "why": why})

    def add(self, what: str, trees: Mapping[str, Any], limit: int) -> bool:
        """Adds trees by name, all or none. If none, the reason is noted. ``what`` names them together."""
        data: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        notes: list[str] = []
        size = 0
        try:
            for name, tree in trees.items():
                data[name], members, told = flatten(tree, name)
                tensors.update((f"{name}.{number}", tensor) for number, tensor in members.items())
                notes += told
                size += len(json.dumps(data[name], allow_nan=False))
        except Exception as error:  # a batch may be of any class, and reading it may do anything
            self.leave_out(what, f"it cannot be written: {reason(error)}")
            return False
        fits = self._fits(what, tensors, limit, size)
        if fits:
            is_told = what in ("samples", "tape") and "batch[0]" in self.trees
            self.trees.update(data)
            self.tensors.update(tensors)
            self.notes += [] if is_told else notes
        return fits

    def add_named(self, what: str, tensors: Mapping[str, Tensor], limit: int) -> None:
        """Adds copies of tensors by their own names, all or none."""
        for name, tensor in tensors.items():
            if trouble := unfit_tensor(tensor):
                self.leave_out(what, f"{name}: {trouble} cannot be saved")
                return
        if self._fits(what, tensors, limit):
            self.trees[what] = list(tensors)
            self.tensors.update((f"{what}.{name}", _copied(tensor)) for name, tensor in tensors.items())

    @property
    def size(self) -> int:
        """The size of its tensors in bytes."""
        return sum(map(nbytes_of, self.tensors.values()))

    def _fits(self, what: str, tensors: Mapping[str, Tensor], limit: int, size: int = 0) -> bool:
        size += sum(map(nbytes_of, tensors.values()))
        if size > limit:
            self.leave_out(what, f"{_in_words(size)} is over the limit of {_in_words(max(0, limit))}")
        return size <= limit

    def write(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Writes to ``folder``, which must not exist, and flushes it to disk. Syncs."""
        folder.mkdir()
        stored = None
        if self.tensors:
            entries = {name: _traits(tensor) for name, tensor in self.tensors.items()}
            written = write_tensors(folder / TENSORS, {name: _real(tensor) for name, tensor in self.tensors.items()})
            stored = {**written, "index": {name: {**e, **entries[name]} for name, e in written["index"].items()}}
        document = {"schema": SCHEMA, **facts, "left_out": self.left_out, "notes": self.notes}
        text = json.dumps({**plain(document), "contents": self.trees, "tensors": stored}, allow_nan=False, indent=1)
        with (folder / INCIDENT).open("xb") as file:
            file.write(text.encode("ascii"))
            flush(file)
        sync(folder)


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)


def _traits(tensor: Tensor) -> dict[str, Any]:
    """Properties that the bytes do not show. Default values are left out."""
    traits: dict[str, Any] = {}
    if tensor.is_complex():
        traits["complex"] = True
    if tensor.requires_grad:
        traits["requires_grad"] = True
    if tensor.device.type != "cpu":
        traits["device"] = str(tensor.device)
    return traits


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def read_document(path: Path) -> dict[str, Any]:
    """``incident.json``, checked for JSON and schema only. Raises ``OSError`` or ``ValueError``."""
    raw = path.read_bytes()
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is incomplete, or not JSON that nanguard wrote ({reason(error)})") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{path.name} was not written by nanguard: it has no schema")
    if document["schema"] != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {document['schema']!r:.20}, and this nanguard reads schema {SCHEMA}: use the "
            "nanguard that wrote it, or a newer one"
        )
    return document


def check_tensors(folder: Path, stored: Any) -> None:
    """Checks the entries for tensors in ``incident.json``, and that their file is complete. Raises ``ValueError``."""
    if stored is None:
        return
    if not isinstance(stored, dict) or not isinstance(stored.get("index"), dict):
        raise ValueError(f"{INCIDENT} does not say what its tensors are")
    sound = all(isinstance(stored.get(key), int) and stored[key] >= 0 for key in ("size", "header"))
    if not sound or not isinstance(stored.get("tensors_sha256"), str):
        raise ValueError(f"{INCIDENT} does not say how large {TENSORS} is")
    for name, entry in stored["index"].items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"{INCIDENT} has an invalid entry for a tensor: {name!r:.60}")
        if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
            raise ValueError(f"{INCIDENT} names a dtype that this torch does not have: {entry.get('dtype')!r:.60}")
    try:
        size = os.stat(folder / TENSORS).st_size
    except FileNotFoundError:
        raise ValueError(f"{TENSORS} is missing") from None
    if size != stored["size"]:
        raise ValueError(f"{TENSORS} has {size:,} bytes instead of {stored['size']:,}: it is incomplete or was changed")


def read_all(folder: Path, stored: Any, device: torch.device | None) -> dict[str, Tensor]:
    """Every tensor, verified. With ``device``, tensors that were on an accelerator are moved there."""
    check_tensors(folder, stored)
    if stored is None:
        return {}
    tensors = read_tensors(folder / TENSORS, stored)
    for name, tensor in tensors.items():
        traits = stored["index"][name]
        if traits.get("complex"):
            tensor = torch.view_as_complex(tensor)
        if device is not None and "device" in traits:
            tensor = tensor.to(device)
        tensors[name] = tensor.requires_grad_() if traits.get("requires_grad") else tensor
    return tensors


def read_tree(contents: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> Any:
    """One of the trees, with its tensors."""
    prefix = f"{name}."
    mine = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    return restore(contents[name], mine)


def tree_of_rng(state: RngState) -> dict[str, Any]:
    """Random states. Python's 625 numbers become a tensor so that ``incident.json`` stays readable."""
    told = state.as_dict()
    if told["host"] is not None:
        (version, numbers, gauss), numpy = told["host"]
        told["host"] = ((version, torch.tensor(numbers, dtype=torch.int64), gauss), numpy)
    return told


def rng_of_tree(tree: Any) -> RngState:
    """The inverse of ``tree_of_rng``. Raises ``ValueError`` for anything else."""
    try:
        host, cuda = tree["host"], tree["cuda"]
        if host is not None:
            (version, numbers, gauss), numpy = host
            host = ((version, tuple(numbers.tolist()), gauss), numpy)
        if not isinstance(tree["cpu"], Tensor) or not (
            cuda is None or (len(cuda) == 2 and {*map(type, cuda)} == {int})
        ):
            raise TypeError("not a state of torch's generators")
        return RngState(tree["cpu"], cuda, host)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a random state that nanguard wrote ({reason(error)})") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}")


def _in_words(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size:,} bytes"
