"""What the program calls the tensors of its batch."""

from __future__ import annotations

import ast
import re

from nanguard.diagnosis import authorship
from nanguard.diagnosis.exam import Exam
from nanguard.diagnosis.taped import TapedRun
from nanguard.step.calls import Call


def in_words(exam: Exam, origin: str) -> str:
    """What the program calls data: its expressions on a tape, and the place in a call of the model."""
    micros = exam.pending.microbatches
    if micros and isinstance(micros[exam.run.microbatch].loss_fn, TapedRun):
        key = re.search(r"""\[('.*'|".*")\]$""", origin)
        return origin if key is None else re.sub(r" \(\d+\)$", "", ast.literal_eval(key[1]))  # made unique by a number
    given = re.search(r"\.(?:args\[(\d+)\]|kwargs\['(\w+)'\])(.*)", origin) if isinstance(exam.batch(), Call) else None
    return origin if given is None else f"argument {given[1] or given[2]}{given[3]} of the model"


def names_of(exam: Exam, origin: str) -> tuple[list[str], int | None, int]:
    """The names of a tensor of the batch in the program, its index in the batch, and the length of the batch."""
    names = [key or attribute for key, attribute in re.findall(r"\['([^']+)'\]|\.(\w+)", origin)][::-1]
    texts = [name.removeprefix("an entry of ") for name in names if not name.isidentifier()]
    names += [each for text in texts for each in re.findall(r"[A-Za-z_]\w*", text)]
    places = re.findall(r"\[(\d+)\]", origin)
    if places and not names and exam.pending.microbatches:
        loss_fn = exam.pending.microbatches[exam.run.microbatch].loss_fn
        names += authorship.names_in_unpacking(loss_fn, int(places[0]))
    batch = exam.pending.microbatches[exam.run.microbatch].batch if exam.pending.microbatches else None
    if isinstance(batch, (list, tuple)) and len(places) == 1:
        return names, int(places[0]), len(batch)
    return names, None, 0
