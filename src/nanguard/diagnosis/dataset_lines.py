"""Find the line of a dataset that makes a record non-finite: the record is read again, and each line is watched.

Only after a bad step, and only for one record. What the program draws random numbers from is put back, also generators
that the dataset holds, and attributes that it sets while it reads, such as a file that it opens, are set on a copy.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanguard.diagnosis.slicing import risk_of
from nanguard.records.diagnosis import Source
from nanguard.source.frames import is_users_file, source_at
from nanguard.source.statements import simple_statement_at
from nanguard.state.trees import PLAIN, leaves

log = logging.getLogger("nanguard")

_LONGEST = 2.0
"""In seconds: the record is read no further."""

_LARGEST = 1 << 22
"""Larger arrays are not looked at."""

_MOST_ENTRIES = 32


class _TooLong(BaseException):
    """Ends the reading. Not an ``Exception``: the dataset may catch all of those."""


class RecordReadAgain(NamedTuple):
    """Whether the record is finite now, as one may be that the dataset draws; and the line that made it non-finite.

    ``held`` are the attributes of the dataset that held the bad values already, such as those that ``__init__`` made.
    """

    is_finite: bool = False
    source: Source | None = None
    held: tuple[str, ...] = ()


def read_again(dataset: Any, index: int) -> RecordReadAgain:
    """The line is the one after which a value of the record is non-finite for the first time, if it computes it.

    None if the line only picks or loads it, if a debugger is watching, or if the record cannot be read.
    """
    if sys.gettrace() is not None or not hasattr(dataset, "__dict__"):  # a list runs no line of the program
        return RecordReadAgain()
    watch = _Watch()
    try:
        with _random_states_kept(dataset), _quiet_arrays():
            again = copy.copy(dataset)
            sys.settrace(watch.begin)
            try:
                record = again[index]
            finally:
                sys.settrace(None)
    except (_TooLong, Exception):
        log.debug("record %d could not be read again", index, exc_info=True)
        return RecordReadAgain()
    if not _is_bad(record):
        return RecordReadAgain(is_finite=_has_numbers(record))
    if watch.found is None:
        return RecordReadAgain()
    file, line = watch.found
    statement = simple_statement_at(file, line)
    if statement is None:
        return RecordReadAgain()
    if held := tuple(_held(dataset, index, statement)):
        return RecordReadAgain(held=held)
    return RecordReadAgain(source=source_at(file, line) if _computes(statement) else None)


def _held(dataset: Any, index: int, statement: ast.stmt) -> Iterator[str]:
    """The attributes that a statement reads and that are non-finite: at this index, if they have an entry for each."""
    names = dict.fromkeys(each.attr for each in ast.walk(statement) if isinstance(each, ast.Attribute))
    for name in names:
        value = vars(dataset).get(name)
        with contextlib.suppress(Exception):  # an object of the program's own class
            if hasattr(value, "__len__") and len(value) == len(dataset):
                value = value[index]
            if _is_bad(value):
                yield name


def _computes(statement: ast.stmt) -> bool:
    """True if a statement may make NaN or Inf of finite values; not if it loads, picks or converts them."""
    if isinstance(statement, ast.AugAssign):
        return True
    return risk_of(statement) > 0


@dataclass(slots=True)
class _Watch:
    """What the lines of the program have made so far. ``found`` is the first bad line: file and number.

    The frame that it ran in is held until the end: a later function may get the identity of one that has returned.
    """

    found: tuple[str, int] | None = None
    began: float = field(default_factory=time.monotonic)
    _found_in: FrameType | None = None

    def begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Called with each function that is called."""
        if not is_users_file(frame.f_code.co_filename):
            return None
        given = {name for name, value in frame.f_locals.items() if _is_bad(value)}
        last = frame.f_lineno

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if time.monotonic() - self.began > _LONGEST:
                raise _TooLong
            if event in ("line", "return"):
                bad = {name for name, value in frame.f_locals.items() if _is_bad(value)} - given
                if event == "return" and arg is not None and not given and _is_bad(arg):
                    bad.add("")
                self._see(frame, last, is_bad=bool(bad))
                last = frame.f_lineno
            return follow

        return follow

    def _see(self, frame: FrameType, line: int, *, is_bad: bool) -> None:
        if is_bad and self.found is None:
            self.found, self._found_in = (frame.f_code.co_filename, line), frame
        elif not is_bad and self.found is not None and self._found_in is frame:
            self.found = None  # the function has removed it again


@contextlib.contextmanager
def _random_states_kept(dataset: Any) -> Iterator[None]:
    python, drawn = random.getstate(), torch.get_rng_state()
    numpy = _numpy()
    of_numpy = None if numpy is None else numpy.random.get_state()
    undo = [_putting_back(value) for value in vars(dataset).values()]
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(drawn)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for put_back in undo:
            if put_back is not None:
                put_back()


def _putting_back(generator: Any) -> Callable[[], Any] | None:
    """Puts the state of a random generator back to what it is now; None if this is no generator."""
    numpy = _numpy()
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return None


def _quiet_arrays() -> contextlib.AbstractContextManager[Any]:
    """NumPy has warned already."""
    numpy = _numpy()
    return contextlib.nullcontext() if numpy is None else numpy.errstate(all="ignore")


def _numpy() -> ModuleType | None:
    """If the program has imported it."""
    return sys.modules.get("numpy")


def _has_numbers(record: Any) -> bool:
    """Whether ``_is_bad`` has seen all of it: not an object of the program's own class."""
    numpy = _numpy()
    arrays = (Tensor,) if numpy is None else (Tensor, numpy.ndarray, numpy.generic)
    return all(type(each) in PLAIN or isinstance(each, arrays) for each in leaves(record))


def _is_bad(value: Any, depth: int = 2) -> bool:
    """True for NaN or Inf in a number, an array or a tensor, also inside lists, tuples and dicts."""
    numpy = _numpy()
    if type(value) is float:
        return value != value or value in (float("inf"), float("-inf"))
    if type(value) is Tensor:
        return value.is_floating_point() and value.numel() <= _LARGEST and not bool(torch.isfinite(value).all())
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.floating)):
        return value.dtype.kind == "f" and value.size <= _LARGEST and not bool(numpy.isfinite(value).all())
    if depth and type(value) in (list, tuple, dict):
        entries = list(value.values() if type(value) is dict else value)[:_MOST_ENTRIES]
        return any(_is_bad(each, depth - 1) for each in entries)
    return False
