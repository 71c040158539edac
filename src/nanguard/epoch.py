"""One pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Epoch(Generic[T]):
    """Iterates over a loader and tells the guard where it is. Has a length where the loader has one."""

    def __init__(
        self,
        loader: Iterable[T],
        *,
        begin: Callable[[], int],
        at: Callable[[int, bool | None], None],
        end: Callable[[], None],
        leave: Callable[[int], None],
    ) -> None:
        self._loader = loader
        self._begin, self._at, self._end, self._leave = begin, at, end, leave

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        length = _length(self._loader)
        number = self._begin()
        try:
            for position, batch in enumerate(self._loader):
                self._at(position, None if length is None else position + 1 == length)
                yield batch
        except BaseException:  # the loop was left, or the loader has failed
            self._leave(number)
            raise
        self._end()


def _length(loader: Iterable[T]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a stream; a DataLoader over one has __len__ all the same
        return None
