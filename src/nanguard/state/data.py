"""The position of a run in its data, and how to go back: passes over loaders that can be repeated from any batch.

A loader with a ``state_dict`` is restored by it. Any other loader is iterated again with the random states that it
began with, and earlier batches are skipped (of torch's own loader without workers, without reading them). An iterator,
such as a generator, cannot be repeated: its batches come once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nanguard import _compat_data
from nanguard.state.batch_indices import FetchedBatch, begin_noted
from nanguard.state.rng import RngReader, RngState

log = logging.getLogger("nanguard")

END: Any = object()
_MOST_FETCHED = 63
Place = tuple[int, int]
"""A batch: the number of its pass, and its position there."""


class Pass:
    """One pass over a loader."""

    def __init__(self, loader: Iterable[Any], number: int, rng_reader: RngReader) -> None:
        self.loader: Any = loader
        self.number = number
        self.length = _length(loader)
        self._rng_reader = rng_reader
        self.begin()

    def begin(self) -> None:
        """Starts at the first batch, with the current random states."""
        self.position = 0
        self._start = _Start.of(self.loader, self._rng_reader)
        self._begin_iterator()

    def _begin_iterator(self) -> None:
        self._iterator, self._noted = begin_noted(self.loader)

    def begin_again(self) -> None:
        """Starts at the first batch again, after an earlier pass over the same loader was repeated."""
        if self._start.epoch is not None:
            _sampler(self.loader).set_epoch(self._start.epoch)
        self.begin()

    @property
    def can_go_back(self) -> bool:
        return self._iterator is not self.loader

    def fetch(self) -> Any:
        """The next batch, or ``END``."""
        batch = next(self._iterator, END)
        self.position += batch is not END
        return batch

    def fetched(self, batch: Any) -> FetchedBatch | None:
        """The records that the last batch holds; None if they are not known. Call it once per batch."""
        return None if self._noted is None else self._noted.fetched(batch, self.position)

    def mark(self) -> dict[str, Any]:
        """Everything that is needed to come back to this point, here or in another process."""
        state = copy.deepcopy(self.loader.state_dict()) if _is_stateful(self.loader) else None
        return {"number": self.number, "position": self.position, "start": self._start.as_dict(), "loader": state}

    def go_back(self, mark: dict[str, Any], device: torch.device) -> None:
        """Goes to a marked point. The random states of the process do not change."""
        before = self._rng_reader.now()
        self.number, self.position = mark["number"], mark["position"]
        self._start = _Start.from_dict(mark["start"])
        try:
            if mark["loader"] is not None:
                self.loader.load_state_dict(copy.deepcopy(mark["loader"]))
                self._begin_iterator()
            else:
                self._start.restore(self.loader, device)
                self._begin_iterator()
                _pass_over(self._iterator, self.loader, self.position)
                if self._noted is not None:
                    self._noted.pass_over(self.position)
        finally:
            before.restore(device)


@dataclass(slots=True)
class Data:
    """The passes that a snapshot may go back to, including the current one.

    ``last`` is the last batch that was given out. ``go_back`` takes effect before the next batch.
    """

    device: torch.device
    rng_reader: RngReader
    passes: list[Pass] = field(default_factory=list)
    current: Pass | None = None
    last: Any = None
    num_begun: int = 0
    fetched: list[FetchedBatch] = field(default_factory=list)
    _back: tuple[dict[str, Any], RngState] | None = None
    _saved: tuple[dict[str, Any] | None, RngState] | None = None
    _skip_next: int = 0
    _skip_between: tuple[Place, Place] | None = None

    def begin(self, loader: Iterable[Any], number: int) -> Pass:
        """Begins a new pass, or the one that a resumed run was in."""
        saved, self._saved = self._saved, None
        self.num_begun += 1
        self.current = Pass(loader, number, self.rng_reader)
        mark = None
        if saved is not None:
            mark, rng = saved
            rng.restore(self.device)
        if mark is not None:
            if self.current.can_go_back or mark["loader"] is not None:
                self.current.go_back(mark, self.device)
            else:
                log.warning("%s cannot go back to batch %d, where the run was", _kind(loader), mark["position"])
        self.passes.append(self.current)
        self._skip_next, self._skip_between = 0, None
        return self.current

    def fetch(self) -> Any:
        """The next batch that is not skipped, or ``END``."""
        assert self.current is not None
        while True:
            place = (self.current.number, self.current.position)
            batch = self.current.fetch()
            if batch is END:
                return END
            fetched = self.current.fetched(batch)
            if self._skip_next > 0:
                self._skip_next -= 1
            elif self._skip_between is None or not self._skip_between[0] <= place <= self._skip_between[1]:
                self.last = batch
                if fetched is not None:
                    self.fetched = [*self.fetched[-_MOST_FETCHED:], fetched]
                return batch

    def take_fetched(self) -> list[FetchedBatch]:
        """The batches that were given since this was last asked."""
        taken, self.fetched = self.fetched, []
        return taken

    @property
    def is_going_back(self) -> bool:
        """Whether the data go back before the next batch."""
        return self._back is not None

    def abandon(self) -> None:
        """The pass was left before its end. The rest of it will not be read."""
        self.passes.clear()
        self.current = self.last = self._back = None

    def end(self) -> bool:
        """Ends a pass. True if a later pass follows, since the run was further before it went back."""
        assert self.current is not None
        behind = self.passes[self.passes.index(self.current) + 1 :]
        if not behind:
            self.current = self.last = None
            return False
        self.current = behind[0]
        self.current.begin_again()
        return True

    def mark(self) -> dict[str, Any] | None:
        return None if self.current is None else self.current.mark()

    def resume_at(self, mark: dict[str, Any] | None, rng: RngState) -> None:
        """The next pass begins at the position of a run in another process, whatever is drawn until then."""
        self._saved = mark, rng

    def go_back(
        self,
        mark: dict[str, Any] | None,
        rng: RngState,
        *,
        over: int = 0,
        between: tuple[Place, Place] | None = None,
    ) -> str:
        """Goes back to a mark before the next batch, and skips ``over`` batches there, or those ``between`` two places.

        ``rng`` is restored then, whatever the rest of the loop's body draws. Returns what will happen, in words.
        """
        if self.current is None or mark is None:
            return "the data are not rewound"
        now = (self.current.number, self.current.position)
        then = (mark["number"], mark["position"])
        there = next((walk for walk in self.passes if walk.number == mark["number"]), None)
        if there is None or not (there.can_go_back or mark["loader"] is not None):
            self._skip_next = max(0, then[1] + over - now[1]) if now[0] == then[0] else 0
            number = self._skip_next
            several = "batch is" if number == 1 else f"{number:,} batches are"
            skipped = f"; the next {several} skipped" if number else ""
            return f"the data are not rewound, since {_kind(self.current.loader)} can be read only once{skipped}"
        self._back, self._skip_next, self._skip_between = (mark, rng), over, between
        back = f"the data go back to batch {then[1]:,} of epoch {then[0]}"
        if over:
            back += f", {_skipped(then[1], then[1] + over - 1)}"
        elif between is not None:
            back += f", {_skipped(between[0][1], between[1][1])}"
        return back

    def settle(self) -> None:
        """Goes back, if ``go_back`` was called."""
        if self._back is None:
            return
        (mark, rng), self._back = self._back, None
        self.fetched = []
        self.current = next(walk for walk in self.passes if walk.number == mark["number"])
        self.current.go_back(mark, self.device)
        rng.restore(self.device)

    def forget_before(self, number: int) -> None:
        """No snapshot goes back to passes before this one."""
        self.passes = [walk for walk in self.passes if walk.number >= number or walk is self.current]


@dataclass(frozen=True, slots=True)
class _Start:
    """What decides the order of a pass: random states, those of the loader's own generators, the sampler's epoch."""

    rng: RngState
    generators: list[torch.Tensor]
    epoch: int | None

    @classmethod
    def of(cls, loader: Iterable[Any], rng_reader: RngReader) -> _Start:
        return cls(
            rng_reader.now(), [g.get_state() for g in _generators(loader)], getattr(_sampler(loader), "epoch", None)
        )

    def restore(self, loader: Iterable[Any], device: torch.device) -> None:
        self.rng.restore(device)
        for generator, state in zip(_generators(loader), self.generators, strict=False):
            generator.set_state(state)
        if self.epoch is not None:
            _sampler(loader).set_epoch(self.epoch)

    def as_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.as_dict(), "generators": self.generators, "epoch": self.epoch}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> _Start:
        return cls(RngState.from_dict(data["rng"]), data["generators"], data["epoch"])


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of a loader, its samplers, and a loader inside it."""
    found: dict[int, torch.Generator] = {}
    for outer in (loader, getattr(loader, "loader", None), getattr(loader, "dataloader", None)):
        batch_sampler = getattr(outer, "batch_sampler", None)
        owners = (outer, getattr(outer, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        for generator in (getattr(owner, "generator", None) for owner in owners):
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def _sampler(loader: Any) -> Any:
    """The object that shuffles by ``set_epoch``, such as a ``DistributedSampler``."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), loader):
        if hasattr(owner, "set_epoch"):
            return owner
    return None


def _pass_over(iterator: Iterator[Any], loader: Iterable[Any], number: int) -> None:
    if not _compat_data.skip_batches(iterator, loader, number):
        if number > 1000:
            log.info("reading %d batches again to come back to where the snapshot was", number)
        for _ in range(number):
            next(iterator, END)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _skipped(first: int, last: int) -> str:
    return f"batch {first:,} is skipped" if first == last else f"batches {first:,} to {last:,} are skipped"


def _kind(loader: Any) -> str:
    return f"a {type(loader).__name__}"


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a stream; a DataLoader over one has __len__ all the same
        return None
