"""Saves failing steps to ``run_dir/incidents/0001/``, atomically. An error here never stops training."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from nanguard.incidents.budget import Budget
from nanguard.incidents.environment import environment
from nanguard.incidents.files import BundleDraft, tree_of_rng
from nanguard.incidents.tape_writer import RepeatableTape, add_tape
from nanguard.records.diagnosis import Diagnosis
from nanguard.records.steps import Outcome, Reading
from nanguard.run_folder import RunFolder
from nanguard.state.batch_indices import FetchedBatch, num_samples_of
from nanguard.state.batches import take
from nanguard.state.names import named_weights, plain_name, unwrapped
from nanguard.state.snapshots.files import changed_at, sync
from nanguard.state.trees import named_tensors

if TYPE_CHECKING:
    from nanguard.step.pending import Microbatch, PendingStep

log = logging.getLogger("nanguard")

CaptureLevel = Literal["none", "meta", "batch", "full"]
"""``none``: nothing. ``meta``: a description without data. ``batch``: also the data and random states of the step,
and the torch calls around the model.
``full``: also the weights from before the step."""

BATCH_LIMIT = 256 << 20
WEIGHTS_LIMIT = 1 << 30
SAMPLES_LIMIT = 16 << 20
TAPE_LIMIT = 64 << 20
"""Limits in bytes. Larger parts are left out, and ``incident.json`` says so."""

MOST = 100
"""How many bundles a run may have. Beyond it the first of a kind is still saved, without data, up to twice as many."""

TOTAL_LIMIT = 2 << 30
"""Limit in bytes for all bundles of a run. Data beyond it are left out."""

_MOST_SAMPLES, _MOST_TENSORS, _MOST_READINGS = 8, 64, 64
_DAY_S = 86_400.0
_NAME = re.compile(r"([0-9]{4,})(?:-rank([0-9]+))?")
_PASSING = re.compile(r"writing-[0-9]+-[0-9a-f]{8}")


def folders(run_dir: str | Path) -> list[Path]:
    """The incident folders of a run, in order, found by name in ``run_dir/incidents``. Empty if there are none."""
    found = []
    for path in _entries(Path(run_dir) / "incidents"):
        if match := _NAME.fullmatch(path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


@dataclass(frozen=True, slots=True)
class Kept:
    """What will be written about a step once its outcome is known."""

    draft: BundleDraft
    facts: dict[str, Any]


class Bundles:
    """Writes the incidents of one run on one rank. In an existing ``run_dir``, numbers continue.

    Rank 0 writes ``incidents/0001``, rank 3 ``incidents/0001-rank3``: each rank saves its own data. No folder is made
    before the first incident.
    """

    def __init__(
        self,
        run_dir: str | Path | RunFolder,
        capture: CaptureLevel = "batch",
        *,
        precision: str = "fp32",
        rank: int = 0,
        world_size: int = 1,
        batch_limit: int = BATCH_LIMIT,
        weights_limit: int = WEIGHTS_LIMIT,
        total_limit: int = TOTAL_LIMIT,
        most: int = MOST,
    ) -> None:
        if capture not in get_args(CaptureLevel):
            raise ValueError(f"capture must be one of {', '.join(map(repr, get_args(CaptureLevel)))}, got {capture!r}")
        limits = {"batch_limit": batch_limit, "weights_limit": weights_limit, "total_limit": total_limit, "most": most}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number, 0 or more, got {value!r}")
        self._run_dir = run_dir if isinstance(run_dir, RunFolder) else RunFolder(run_dir)
        self.capture = capture
        self._precision, self._rank, self._world_size = precision, rank, world_size
        self._batch_limit, self._weights_limit, self._most = batch_limit, weights_limit, most
        self._has_failed = False
        self._budget = Budget(lambda: folders(self._run_dir.path), most=most, size_limit=total_limit)

    @property
    def num_left_out(self) -> int:
        """How many incidents were not saved because there are enough of their kind or enough in total."""
        return self._budget.num_left_out

    @property
    def folder(self) -> Path:
        """The folder of all incidents. It may still change until the run writes something."""
        return self._run_dir.path / "incidents"

    def keep(
        self,
        number: int,
        *,
        outcome: Outcome,
        pending: PendingStep | None,
        history: Iterable[Reading],
        model: nn.Module,
        precision: str | None = None,
        kept_fp32: Sequence[str] = (),
    ) -> Path | None:
        """Writes one incident and returns its folder; None if it is over the budget or could not be written.

        Call it while the training state is as it was before the failing step. ``number`` is that of the incident in
        its run; the folder gets the next free number. ``precision`` is that of the step, if it has changed during the
        run; ``kept_fp32`` are the modules that ran in fp32. Syncs. Errors, such as a full disk or a batch that cannot
        be read, are logged as warnings and never raised.
        """
        kept = self.gather(
            outcome.diagnosis,
            pending,
            history,
            model,
            precision=precision,
            kept_fp32=kept_fp32,
            found=outcome.verdict.reading.found,
        )
        return None if kept is None else self.write(number, outcome, kept)

    def gather(
        self,
        diagnosis: Diagnosis | None,
        pending: PendingStep | None,
        history: Iterable[Reading],
        model: nn.Module,
        *,
        precision: str | None = None,
        kept_fp32: Sequence[str] = (),
        found: Sequence[str] = (),
        in_any_case: bool = False,
        repeatable: RepeatableTape | None = None,
    ) -> Kept | None:
        """The first half of ``keep``: collects the data before the step is handled.

        None if enough incidents of the same kind are saved, by ``found`` and the diagnosis. ``in_any_case`` treats it
        as the first of its kind. ``repeatable`` gives the tape of the step, if there is one.
        """
        if self.capture == "none":
            return None
        try:
            allowed = self._budget.allows(_kind(diagnosis, found), in_any_case=in_any_case)
            if allowed == "none":
                return None
            self._run_dir.make()
            capture = self.capture if allowed == "data" else "meta"
            draft = BundleDraft()
            facts = self._facts(diagnosis, pending, history, model, precision, kept_fp32)
            facts["capture"] = capture
            facts["microbatches"] = [] if pending is None else [_described(m, capture) for m in pending.microbatches]
            self._gather(draft, capture, diagnosis, pending, model)
            if repeatable is not None and capture != "meta":
                limit = min(TAPE_LIMIT, self._batch_limit, self._budget.room() - draft.size)
                add_tape(draft, repeatable, model, limit)
            facts["captured"] = sorted({name.partition("[")[0] for name in draft.trees})
            return Kept(draft, facts)
        except Exception as error:
            self._give_up(-1 if pending is None else pending.step, error)
            return None

    def write(self, number: int, outcome: Outcome, kept: Kept) -> Path | None:
        """The second half of ``keep``: writes the collected data and the outcome to disk."""
        reading = outcome.verdict.reading
        told = {
            "number": number,
            "step": reading.step,
            "epoch": reading.epoch,
            "batch": reading.batch,
            "outcome": replace(outcome, diagnosis=None, bundle="").as_dict(),
        }
        try:
            return self._write(kept.draft, {**told, **kept.facts}, max([number, *(n + 1 for n in self._numbers())]))
        except Exception as error:
            self._give_up(reading.step, error)
            return None

    def _give_up(self, step: int, error: Exception) -> None:
        # As text: a log record that holds the error would keep its frames alive, and with them a whole batch.
        why = f"{type(error).__name__}: {error}"
        self._budget.failed()
        level, self._has_failed = logging.INFO if self._has_failed else logging.WARNING, True
        told = "step %d: the incident could not be saved to %s (%s); the run goes on, and tells this only once"
        log.log(level, told, step, self.folder, why)

    # ---- collecting ----------------------------------------------------------------------------------------------

    def _facts(
        self,
        diagnosis: Diagnosis | None,
        pending: PendingStep | None,
        history: Iterable[Reading],
        model: nn.Module,
        precision: str | None,
        kept_fp32: Sequence[str],
    ) -> dict[str, Any]:
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        return {
            "time": time.time(),
            "diagnosis": None if diagnosis is None else diagnosis.as_dict(),
            "environment": environment(
                device=device,
                precision=precision or self._precision,
                rank=self._rank,
                world_size=self._world_size,
            ),
            "history": [_brief(each) for each in list(history)[-_MOST_READINGS:]],
            "divisor": 1 if pending is None else pending.divisor,
            "eval_modules": _in_eval(pending, model),
            "kept_fp32": list(kept_fp32),
        }

    def _gather(
        self,
        draft: BundleDraft,
        capture: CaptureLevel,
        diagnosis: Diagnosis | None,
        pending: PendingStep | None,
        model: nn.Module,
    ) -> None:
        if capture == "meta":
            draft.leave_out("data and weights", "no data are saved with capture='meta'")
            if self.capture != "meta":
                draft.notes.append(
                    f"capture={self.capture!r} was asked for, but {self._most} bundles already hold data"
                )
            return
        room = self._budget.room()
        if room < self._batch_limit:
            draft.notes.append(f"only {room:,} bytes were left of the limit for all incidents of a run")
        batches = [] if pending is None else pending.batches
        if all(batch is None for batch in batches):
            draft.leave_out("batch", "the guard did not see the data of the step: iterate over guard.epoch(loader)")
        else:
            draft.add("batch", {f"batch[{i}]": batch for i, batch in enumerate(batches)}, min(self._batch_limit, room))
            fetched = [] if pending is None else pending.fetched
            self._add_samples(draft, diagnosis, batches, fetched, min(SAMPLES_LIMIT, room - draft.size))
        states = [] if pending is None else [micro.rng for micro in pending.microbatches]
        if not states or any(state is None for state in states):
            draft.leave_out("rng", "the guard did not call the loss function itself")
        else:
            trees = {f"rng[{i}]": tree_of_rng(state) for i, state in enumerate(states) if state is not None}
            draft.add("rng", trees, min(self._batch_limit, room - draft.size))
        if capture == "full":
            draft.add_named("weights", named_weights(model), min(self._weights_limit, room - draft.size))
        else:
            draft.leave_out("weights", "they are saved only with capture='full', or nanguard run --capture full")

    def _add_samples(
        self,
        draft: BundleDraft,
        diagnosis: Diagnosis | None,
        batches: list[Any],
        fetched: Sequence[FetchedBatch],
        limit: int,
    ) -> None:
        """Adds the samples that caused the fault. They are small, so they are saved even if the batch is too large."""
        if diagnosis is None or not diagnosis.samples:
            return
        place = diagnosis.microbatch or 0
        batch = batches[place] if place < len(batches) else None
        try:
            num = num_samples_of(batch, fetched) or 0
            samples = [i for i in diagnosis.samples if 0 <= i < num][:_MOST_SAMPLES]
            some = take(batch, samples, num) if samples else None
        except Exception as error:  # a batch may be of any class
            draft.leave_out("samples", f"samples cannot be taken from the batch: {type(error).__name__}: {error}")
            return
        if not samples:
            return
        draft.add("samples", {"samples": {"of": place, "indices": samples, "batch": some}}, limit)

    # ---- writing -------------------------------------------------------------------------------------------------

    def _write(self, draft: BundleDraft, facts: dict[str, Any], number: int) -> Path:
        self._tidy()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"writing-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            draft.write(path, facts)
            while True:
                final = self.folder / f"{number:04d}{f'-rank{self._rank}' if self._rank else ''}"
                if not os.path.lexists(final):
                    os.rename(path, final)
                    break
                number += 1
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        sync(self.folder)
        return final

    def _numbers(self) -> list[int]:
        matches = (_NAME.fullmatch(path.name) for path in _entries(self.folder))
        return [int(match[1]) for match in matches if match and int(match[2] or 0) == self._rank]

    def _tidy(self) -> None:
        """Removes half-written folders of dead processes: those that are a day old."""
        for path in _entries(self.folder):
            if _PASSING.fullmatch(path.name) and time.time() - changed_at(path) > _DAY_S:
                shutil.rmtree(path, ignore_errors=True)


def _kind(diagnosis: Diagnosis | None, found: Sequence[str]) -> tuple[Any, ...]:
    """A key that is equal for incidents with the same fault."""
    if diagnosis is None:
        return tuple(found)
    place = diagnosis.source and (diagnosis.source.file, diagnosis.source.line)
    return diagnosis.cause, diagnosis.phase, diagnosis.module, diagnosis.op, place


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _described(micro: Microbatch, capture: CaptureLevel) -> dict[str, Any]:
    """Types and shapes of the tensors in a batch, and their names if data may be saved: keys may be data."""
    enabled, dtype = micro.autocast
    try:
        named = list(islice(named_tensors(micro.batch), _MOST_TENSORS))
    except Exception:  # a batch may be of any class and may contain itself
        log.debug("the tensors of a batch cannot be listed", exc_info=True)
        named = []
    tensors = [
        {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "device": str(t.device)}
        for name, t in named
    ]
    if capture == "meta":
        tensors = [{key: value for key, value in each.items() if key != "name"} for each in tensors]
    return {"autocast": [enabled, str(dtype).removeprefix("torch.")], "tensors": tensors}


def _brief(reading: Reading) -> dict[str, Any]:
    """The reading without fields that have their default value."""
    usual = {f.name: f.default for f in fields(reading)}
    return {key: value for key, value in asdict(reading).items() if value != usual[key]}


def _in_eval(pending: PendingStep | None, model: nn.Module) -> list[str]:
    """Names of the modules that were not in training mode when the step began."""
    modes = {} if pending is None else pending.training.by_identity()
    named = unwrapped(model).named_modules()
    return [plain_name(name) for name, module in named if not modes.get(id(module), module.training)]
