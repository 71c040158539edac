"""What ``guard.epoch`` returns: one pass over the data, or more if the run goes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from nanguard.errors import ProtocolError
from nanguard.state.data import END, Data

T = TypeVar("T")


class Course(Protocol):
    """What the guard does as the data go by."""

    data: Data

    def begin_epoch(self, loader: Iterable[object]) -> int: ...

    def hear(self) -> None:
        """Between two batches: processes readings that are due. The run may go back."""

    def end_epoch(self) -> bool:
        """After the last batch of a pass. True if another pass follows."""

    def leave_epoch(self, number: int) -> None:
        """The loop was left before the end."""


class Epoch(Generic[T]):
    """Iterates over a loader and tells the guard where it is. Has a length if the loader has one."""

    def __init__(self, loader: Iterable[T], course: Course) -> None:
        self._loader = loader
        self._course = course

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        course = self._course
        number = course.begin_epoch(self._loader)
        begun = course.data.num_begun
        try:
            goes_on = True
            while goes_on:
                while (batch := course.data.fetch()) is not END:
                    yield batch
                    if course.data.num_begun != begun:
                        raise ProtocolError(
                            "another guard.epoch() was begun inside this one: it is for training data, one pass at a "
                            "time. Iterate over validation data, or a second loader, directly"
                        )
                    course.hear()
                goes_on = course.end_epoch()
        except BaseException:  # the loop was left, or the loader has failed
            course.leave_epoch(number)
            raise
