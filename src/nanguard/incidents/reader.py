"""Reads saved incidents. Everything is checked, and nothing that is read can run code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanguard.errors import BundleError
from nanguard.incidents.files import INCIDENT, check_tensors, read_all, read_document, read_tree, rng_of_tree
from nanguard.incidents.tape_reader import TAPE, modules_in, tape_of_tree
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.rebuild import built
from nanguard.records.steps import Outcome, Reading
from nanguard.records.words import reason
from nanguard.state.rng import RngState
from nanguard.step.tape import CallTape

_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
_SHAPES: dict[str, Any] = {
    "number": int,
    "step": int,
    "epoch": int,
    "time": float,
    "divisor": int,
    "capture": str,
    "captured": list,
    "eval_modules": list,
    "kept_fp32": list,
    "microbatches": list,
    "environment": dict,
    "left_out": list,
    "notes": list,
    "contents": dict,
}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A saved incident.

    ``facts`` are the contents of ``incident.json`` without the data: environment, capture, what was left out and why.
    ``history`` are the readings of the steps before. The methods read and verify ``tensors.safetensors`` and return new
    tensors. They raise ``BundleError`` if the file is damaged.
    """

    path: Path
    number: int
    outcome: Outcome
    history: tuple[Reading, ...]
    facts: dict[str, Any]
    _contents: dict[str, Any] = field(repr=False)
    _stored: Any = field(repr=False)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """None if the step was not examined."""
        return self.outcome.diagnosis

    @property
    def captured(self) -> tuple[str, ...]:
        """Which of ``batch``, ``rng``, ``samples``, ``tape`` and ``weights`` were saved."""
        return tuple(self.facts["captured"])

    def why_not(self, part: str) -> str:
        """Why a part was left out."""
        names = (part, "data and weights")
        found = [each["why"] for each in self.facts["left_out"] if each["what"] in names]
        return "; ".join(found) or "there was nothing to save"

    def batches(self, device: torch.device | None = None) -> list[Any]:
        """The data of the step, one for each micro-batch. Empty if they were left out.

        Tensors are on the CPU. With ``device``, those that were on an accelerator are moved there.
        """
        return self._trees("batch[", device)

    def rng(self) -> list[RngState]:
        """The random states before each micro-batch. Empty if they were left out."""
        trees = self._trees("rng[")
        try:
            return [rng_of_tree(tree) for tree in trees]
        except ValueError as error:
            raise BundleError(f"{self.path}: {error}") from None

    def samples(self, device: torch.device | None = None) -> Any:
        """A batch of only the samples that caused the fault. None if they are not known or were left out."""
        trees = self._trees("samples", device)
        return trees[0]["batch"] if trees and isinstance(trees[0], dict) and "batch" in trees[0] else None

    def tape(self, model: nn.Module, fit: Callable[[RngState], RngState]) -> CallTape | None:
        """The calls of the step, of this model and around it, to be made again. None if they were left out.

        ``fit`` makes random states fit this machine.
        """
        if TAPE not in self._contents:
            return None
        first = next(model.parameters(), None)
        try:
            tensors = read_all(self.path, self._stored, None if first is None else first.device)
            return tape_of_tree(self._contents[TAPE], tensors, model, fit)
        except _DAMAGE as error:
            raise BundleError(f"{self.path}: the torch calls of the step cannot be read: {_reason(error)}") from None

    @property
    def taped_modules(self) -> list[str]:
        """The names of the modules that the step calls, in order, as often as it does. ``""`` is the model itself."""
        return modules_in(self._contents.get(TAPE))

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, from before the step. Empty if they were left out."""
        names = self._contents.get("weights", [])
        if not names:
            return {}
        try:
            tensors = read_all(self.path, self._stored, None)
            return {name: tensors[f"weights.{name}"].detach() for name in names}
        except _DAMAGE as error:
            raise BundleError(f"{self.path}: the weights cannot be read: {_reason(error)}") from None

    def _trees(self, prefix: str, device: torch.device | None = None) -> list[Any]:
        names = [name for name in self._contents if name.startswith(prefix)]
        if not names:
            return []
        try:
            tensors = read_all(self.path, self._stored, device)
            return [read_tree(self._contents, name, tensors) for name in names]
        except _DAMAGE as error:
            raise BundleError(f"{self.path}: {names[0]} cannot be read: {_reason(error)}") from None


def load(path: str | Path) -> Bundle:
    """The incident in a folder or of an ``incident.json``. Raises ``BundleError`` for anything else.

    Tensors are read later, when they are needed. That their file exists and has the right size is checked now.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    file = path / INCIDENT if path.is_dir() else path
    try:
        document = read_document(file)
        return _bundle(folder, document)
    except FileNotFoundError:
        what = f"there is no {INCIDENT} in it" if path.is_dir() else "there is no such file or folder"
        raise BundleError(f"{path}: {what}. An incident is a folder, as in runs/a/incidents/0001") from None
    except _DAMAGE as error:
        raise BundleError(f"{path} cannot be read: {_reason(error)}") from None


def _bundle(folder: Path, document: dict[str, Any]) -> Bundle:
    for key, kind in _SHAPES.items():
        if key not in document:
            raise ValueError(f"{INCIDENT} is incomplete: {key!r} is missing")
        built(kind, document[key], key)
    for key in ("captured", "eval_modules", "kept_fp32", "notes"):
        built(tuple[str, ...], document[key], key)
    for each in document["left_out"]:
        if not isinstance(each, dict) or not {"what", "why"} <= each.keys():
            raise ValueError("left_out: expected what and why of each")
    stored = document.get("tensors")
    check_tensors(folder, stored)
    _check_contents(document)
    outcome = {**built(dict, document.get("outcome"), "outcome"), "diagnosis": document.get("diagnosis")}
    return Bundle(
        path=folder,
        number=document["number"],
        outcome=built(Outcome, {**outcome, "bundle": str(folder)}, "outcome"),
        history=built(tuple[Reading, ...], document.get("history", []), "history"),
        facts={key: value for key, value in document.items() if key not in ("contents", "tensors")},
        _contents=document["contents"],
        _stored=stored,
    )


def _check_contents(document: Mapping[str, Any]) -> None:
    contents, stored = document["contents"], document.get("tensors")
    index = stored.get("index") if isinstance(stored, dict) else {}
    there = {name.partition("[")[0] for name in contents}
    if there != set(document["captured"]):
        raise ValueError(f"{INCIDENT} says that {sorted(document['captured'])} were captured, but has {sorted(there)}")
    for name in built(tuple[str, ...], contents.get("weights", []), "weights"):
        if not isinstance(index, dict) or f"weights.{name}" not in index:
            raise ValueError(f"{INCIDENT} names weights that were not saved: {name!r:.60}")


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
