"""The inputs of an examination, and small helpers that all its parts use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from nanguard import _compat
from nanguard.diagnosis.dataset_lines import RecordReadAgain, read_again
from nanguard.diagnosis.plans import MEMORY
from nanguard.diagnosis.provenance import Leaf, Note, TraceEvent
from nanguard.diagnosis.replay import Replay
from nanguard.diagnosis.taped import holds_samples
from nanguard.diagnosis.trace import Trace
from nanguard.diagnosis.watched import WatchedRun
from nanguard.records.diagnosis import Link, Operand, Stretch
from nanguard.records.steps import Reading
from nanguard.source.frames import source_of, user_files
from nanguard.state.batch_indices import FetchedBatch, indices_of, num_samples_of, whole_dataset
from nanguard.state.held import held_by_module
from nanguard.state.parameter_sizes import ParameterSizes
from nanguard.state.trees import tensors
from nanguard.step.parts import StepParts
from nanguard.step.pending import PendingStep

OlderWeights = Callable[[], AbstractContextManager[bool]]

_MOST_STRETCHES, _STRETCHES_BEHIND = 64, 2
_LAYERS = frozenset(("addmm", "mm", "mv", "convolution"))
_DULL = frozenset(("to_copy", "clone", "copy", "unsafe_view", "view", "cat", "stack"))


class NotRepeatable(Exception):
    """The step ran again, but not from what it began with the first time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What the guard remembers: readings of earlier healthy steps, and the weights of the oldest good snapshot.

    ``first_sizes`` are those of the parameters when the guard was made; it has seen ``num_applied`` steps since.
    """

    readings: Sequence[Reading] = ()
    older_weights: OlderWeights | None = None
    oldest_step: int | None = None
    first_sizes: ParameterSizes | None = None
    num_applied: int = 0


@dataclass(slots=True)
class Exam:
    """The examination of one step: how it ran, and its ``replay``, None if it cannot be run again.

    ``is_from_loader`` says that the samples may be those of a loader's batch. ``bad_data`` is the memory of the data
    that are non-finite, if the fault is in the data.
    """

    parts: StepParts
    pending: PendingStep
    run: WatchedRun
    past: Past
    replay: Replay | None
    is_from_loader: bool = True
    bad_data: int | None = None

    def files(self, *others: object) -> list[str]:
        """Of the user's program: where loss functions, modules and the classes of ``others`` are defined, and what ran.

        A cell of a notebook is a file, too.
        """
        functions = (micro.loss_fn for micro in self.pending.microbatches)
        files = user_files([*functions, *map(type, others), *map(type, self.parts.state.own_model.modules())])
        ran = dict.fromkeys(note.place[0] for note in self.run.trace.notes if note.place is not None)
        known = set(map(os.path.abspath, files))  # a program may be run by a relative path
        return [*files, *(file for file in ran if os.path.abspath(file) not in known)]

    def batch(self) -> Any:
        """The batch that failed, as far as it is known."""
        micros = self.pending.microbatches
        return micros[self.run.microbatch].batch if micros else self.pending.last_seen

    def samples_of(self, event: TraceEvent) -> tuple[int, ...]:
        """The bad indices of the first dimension; empty if that is not the batch dimension.

        One of size 1 may be that of the layers, as in the hidden state of an LSTM, if no loader has given the batch.
        """
        fetched, shape = self._fetched_with(event.storage), event.note.shape
        has_none = has_no_samples(self.run.trace, self.parts, self.pending)
        num = None if has_none else num_samples_of(self.batch(), fetched)
        is_batch = num is not None and shape[:1] == (num,) and (num > 1 or bool(fetched))
        micros = self.pending.microbatches
        if is_batch and num is not None and micros:
            is_batch = holds_samples(micros[self.run.microbatch], num, is_fetched=bool(fetched))
        return event.evidence.samples if is_batch else ()

    def dataset_indices(self, samples: Sequence[int]) -> tuple[int, ...]:
        """The indices of samples of the batch in the dataset, empty if they are not known."""
        fetched = self._fetched_with(self.bad_data)
        if not samples or not fetched or not self.is_from_loader:
            return ()
        num = max(1, len(self.pending.microbatches))
        indices = indices_of(self.batch(), fetched, self.run.microbatch, num)
        return tuple(indices[sample] for sample in samples) if indices else ()

    def record_read_again(self, samples: Sequence[int]) -> RecordReadAgain:
        """The first of these samples: whether it is finite now, and the line of the dataset that made it non-finite."""
        indices, dataset = self.dataset_indices(samples[:1]), self.dataset
        return read_again(dataset, indices[0]) if indices and dataset is not None else RecordReadAgain()

    @property
    def dataset(self) -> Any:
        """The dataset that the batch is of; None if it is not known."""
        return whole_dataset(self._fetched_with(self.bad_data))

    def _fetched_with(self, storage: int | None) -> Sequence[FetchedBatch]:
        """The batches that came for this step; only those with this memory, if there are any: of one of two loaders."""
        fetched = self.pending.fetched
        return [each for each in fetched if storage is not None and each.shares_memory({storage})] or fetched

    def may_be_from_loader(self, event: TraceEvent) -> bool:
        """False if a loader gave other tensors of the batch, and the one of this event is no copy of one either."""
        keys = {_compat.storage_key(tensor) for tensor in tensors(self.batch())}
        given = [each for each in self.pending.fetched if each.shares_memory(keys)]
        if event.storage is None or not given:
            return True
        num = math.prod(event.note.shape)
        return any(each.shares_memory({event.storage}) or each.may_be_copied(keys, num) for each in given)

    def trail(self, birth: TraceEvent) -> tuple[Stretch, ...]:
        """The range of values in each module of the forward pass, in the order in which the modules ran.

        Infinities from before the fault, such as those of a mask, are not wrong.
        """
        largest: dict[str, Note] = {}
        bad: set[str] = set()
        for note in self.run.trace.notes:
            if note.phase != "forward" or not note.dtype or note.op in MEMORY:
                continue
            if not note.look.is_finite:
                largest.setdefault(note.module, note)
                if note.index >= birth.note.index:
                    bad.add(note.module)
                if len(bad) > _STRETCHES_BEHIND:
                    break
                continue
            best = largest.get(note.module)
            if best is None or not best.look.is_finite or size_of(note) > size_of(best):
                largest[note.module] = note
        stretches = [
            Stretch(
                module=name,
                kind=type(self.parts.state.module(name)).__name__,
                op=note.op,
                low=note.look.low if note.look.is_finite else None,
                high=note.look.high if note.look.is_finite else None,
                dtype=plain_dtype(note.dtype),
                is_finite=name not in bad,
            )
            for name, note in largest.items()
        ]
        return tuple(stretches[-_MOST_STRETCHES:])


def has_no_samples(trace: Trace, parts: StepParts, pending: PendingStep) -> bool:
    """True if the first dimension of the data may not be that of samples: it may be time, if no loader gave them."""
    is_time_first = any(getattr(module, "batch_first", None) is False for module in parts.modules)
    return (is_time_first and not pending.fetched) or is_one_sample(trace)


def is_one_sample(trace: Trace) -> bool:
    """True if bad data are one sample without a batch dimension: torch adds one of size 1 for a layer.

    Also if the program makes a batch of single samples, as they come from a replay buffer.
    """
    uses = [(event.note, parent.note) for event in trace.events for parent in event.parents if parent.kind == "outside"]
    return any(
        (use.op in _LAYERS and (use.op == "mv" or use.shape[:1] == (1,)) and data.shape[:1] > (1,))
        or (use.op == "cat" and data.shape[:1] == (1,) and use.shape[:1] > (1,))
        or (use.op == "stack" and len(use.shape) > len(data.shape))
        for use, data in uses
    )


def link_of(event: TraceEvent) -> Link:
    note = event.note
    return Link(
        op=note.name or event.origin,
        phase=note.phase,
        module=note.module,
        source=source_of(note.place),
        dtype=plain_dtype(note.dtype),
        became="NaN" if event.has_nan else "Inf",
    )


def links_of(events: Sequence[TraceEvent]) -> tuple[Link, ...]:
    """A chain without the casts, copies and views between its ends. The middle of a long chain is left out."""
    telling = [e for e in events if e.note.op not in _DULL or e in (events[0], events[-1])]
    kept = telling if len(telling) <= 12 else [*telling[:8], *telling[-4:]]
    return tuple(link_of(event) for event in kept)


def operands_of(event: TraceEvent) -> tuple[Operand, ...]:
    output = event.evidence.output
    return event.evidence.operands + (() if output is None else (output,))


def size_of(value: Note | Leaf) -> float:
    """The largest absolute value, 0 if it is not finite."""
    low, high = value.look.low, value.look.high
    return max(abs(low), abs(high)) if math.isfinite(low) and math.isfinite(high) else 0.0


def parameter_behind(parent: Note | Leaf) -> Leaf | None:
    """The parameter that a value is, or was cast from. None if it is not a parameter."""
    for _ in range(3):
        if isinstance(parent, Leaf):
            return parent if parent.name.startswith("parameter ") else None
        if parent.op not in ("to_copy", "clone") or not parent.parents:
            return None
        parent = parent.parents[0]
    return None


def module_of_untrained(note: Note | None) -> str:
    """The module of a network that no optimizer trains, if an op is given a parameter of it. Looks at all objects."""
    unknown = [p.storage for p in note.parents if isinstance(p, Leaf) and p.storage] if note is not None else []
    found = (held_by_module(storage) for storage in unknown)
    return next((held.module for held in found if held is not None and held.kind == "parameter"), "")


def parameters_in(note: Note) -> Iterable[str]:
    """The names of the parameters among the operands of an op."""
    return [leaf.name.partition(" ")[2] for leaf in map(parameter_behind, note.parents) if leaf is not None]


def plain_dtype(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
