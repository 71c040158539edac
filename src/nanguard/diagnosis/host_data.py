"""Bad data that the host still has, if the GPU has stopped and a step cannot be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanguard.diagnosis.causes import with_remedy
from nanguard.diagnosis.data_events import is_mask
from nanguard.diagnosis.dataset_lines import read_again
from nanguard.diagnosis.evidence import Evidence, where_bad
from nanguard.diagnosis.look import look
from nanguard.diagnosis.state_faults import what_and_where
from nanguard.diagnosis.taped import TapedRun, inputs
from nanguard.records.diagnosis import Diagnosis
from nanguard.source.frames import source_of
from nanguard.state.batch_indices import FetchedBatch, indices_of, num_samples_of, whole_dataset
from nanguard.state.trees import is_float
from nanguard.step.tape import CallTape, Made, Row, TapedLoss, is_readable

_HOST = torch.device("cpu")


def bad_data(tape: CallTape, fetched: Sequence[FetchedBatch]) -> Diagnosis | None:
    """The first non-finite data that the calls on a tape were given, of those in the memory of the host. None if none.

    A mask of infinities is no such data. Never asks the device.
    """
    if not tape.rows:
        return None
    ends = TapedLoss(tuple(Made(number, 0) for number in tape.rows), (), max(tape.rows))
    run = TapedRun(tape, ends, {}, _HOST)
    for row, name, tensor in inputs(run, set()):
        is_here = tensor.device == _HOST and is_readable(tensor) and is_float(tensor)
        if is_here and not look(tensor).is_finite and not is_mask(tensor):
            return _diagnosis(row, name, tensor, fetched)
    return None


def _diagnosis(row: Row, name: str, tensor: Tensor, fetched: Sequence[FetchedBatch]) -> Diagnosis:
    evidence, source = where_bad(tensor), source_of(row.place)
    samples = _samples(tensor, evidence, fetched)
    indices = indices_of(tensor, fetched, 0, 1) if samples else ()
    found = Diagnosis(
        phase="data",
        cause="input_nonfinite",
        op=row.name,
        source=source,
        shape=tuple(tensor.shape),
        because=f"{name} holds {what_and_where(evidence)}",
        samples=samples,
        dataset_indices=tuple(indices[sample] for sample in samples) if indices else (),
        is_order_assumed=bool(indices) and any(each.is_collated for each in fetched),
        confidence="likely",
    )
    dataset = whole_dataset(fetched)
    if found.dataset_indices and dataset is not None:
        again = read_again(dataset, found.dataset_indices[0])
        found = replace(found, is_record_finite=again.is_finite)
        if again.source is not None:
            found = replace(found, source=again.source, makes_data=True)
    return with_remedy(found)


def _samples(tensor: Tensor, evidence: Evidence, fetched: Sequence[FetchedBatch]) -> tuple[int, ...]:
    """The bad rows, if a loader gave so many samples."""
    is_batch = bool(fetched) and tensor.shape[:1] == (num_samples_of(tensor, fetched),)
    return evidence.samples if is_batch else ()
