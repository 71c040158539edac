"""The optimizers of the program and their pilots: who is there, what they are called, what became of their steps."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.assembly import introduce
from nanguard.autopilot.census import Census
from nanguard.autopilot.crew import crew_of, has_guard, names_inside, owners, without_copies
from nanguard.autopilot.names import name_being_assigned, names_in_call, names_in_sight
from nanguard.autopilot.pilot import Pilot
from nanguard.autopilot.settings import Settings
from nanguard.diagnosis.search import Search
from nanguard.errors import NonFiniteError
from nanguard.journal import Journal
from nanguard.records import Incident

log = logging.getLogger("nanguard")

_SEAT = "_nanguard_pilot"
"""Where an optimizer keeps its pilot: torch leaves such attributes out of copies, pickles and ``state_dict``."""


class Roster:
    """Optimizers are the program's: they are let go of when it does so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._arrived: list[tuple[weakref.ref[Optimizer], dict[int, str]]] = []
        self._seats: list[tuple[weakref.ref[Pilot], Journal]] = []
        self._past: Counter[str] = Counter()
        self._past_incidents: list[Incident] = []
        self._search = Search()
        self._past_not_kept = 0
        self.census = Census()
        self.used: set[int] = set()
        """Identities of outermost modules that the program has called."""
        self.num_optimizers = 0
        """That have ever been guarded."""
        self._numbers = itertools.count(1)
        self.has_guard = False
        self.unguarded: list[str] = []

    @property
    def pilots(self) -> list[Pilot]:
        """Of optimizers that are still there."""
        pilots = [ref() for ref, _ in self._seats]
        if None in pilots:
            self._part_with(None)
        return [pilot for pilot in pilots if pilot is not None]

    def _part_with(self, whom: Pilot | None) -> None:
        """A pilot, or with None those that are gone: a program may make thousands. What became of them is kept."""
        for ref, journal in self._seats:
            if ref() is whom:
                self._past.update(journal.counts)
                self._past_incidents += journal.incidents
                self._past_not_kept += journal.num_not_kept
        self._seats = [seat for seat in self._seats if seat[0]() is not whom]

    @property
    def expects_somebody(self) -> bool:
        return bool(self._arrived)

    def expect(self, optimizer: Optimizer) -> list[nn.Module]:
        """One that the program has just made, and may not be finished; the outermost modules that it trains."""
        if pilot_of(optimizer) is not None or any(ref() is optimizer for ref, _ in self._arrived):
            return []
        params = parameters_of(optimizer)
        roots = [root for root in owners(params, self.census) if not isinstance(root, torch.jit.ScriptModule)]
        names = {**names_in_call(params, roots), **names_in_sight([*params, *roots])}
        names[id(optimizer)] = name_being_assigned()
        self._arrived.append((weakref.ref(optimizer), names))
        return roots

    def seat_next(self) -> Pilot | None:
        """The first that is expected; None where it is gone, or cannot be guarded."""
        arrived, names = self._arrived.pop(0)
        optimizer = arrived()
        if optimizer is None or not parameters_of(optimizer):
            return None
        if has_guard(optimizer):
            self.has_guard = True
            return None
        name = names_in_sight([optimizer]).get(id(optimizer)) or names[id(optimizer)] or type(optimizer).__name__
        taken = [pilot.name for pilot in self.pilots]
        return self.enroll(optimizer, name if name not in taken else f"{name} {self.num_optimizers}", names)

    def enroll(self, optimizer: Optimizer, name: str, names: Mapping[int, str]) -> Pilot | None:
        """None where the optimizer cannot be guarded, which is said once; the program goes on without.

        ``names`` are those that things had when it was made.
        """
        kind = type(optimizer).__name__
        crew, roots = self._crew(optimizer, names)
        try:
            shares = bool(self.pilots)
            pilot = Pilot(optimizer, crew, roots, self._settings, name=name, shares=shares, search=self._search)
            first = next((other for other in self.pilots if other.bench.model is crew), None)
            if first is not None:
                pilot.leave_buffers_to(first)
            pilot.open()
        except ValueError as error:
            log.warning("%s is not guarded: %s", kind, error)
            self.unguarded.append(kind)
            return None
        except Exception:
            log.exception("%s is not guarded: nanguard failed to take it in", kind)
            self.unguarded.append(kind)
            return None
        self._introduce(pilot)
        vars(optimizer)[_SEAT] = pilot
        self._seats.append((weakref.ref(pilot), pilot.bench.journal))
        return pilot

    def _crew(self, optimizer: Optimizer, names: Mapping[int, str]) -> tuple[nn.Module, list[nn.Module]]:
        """Looked for anew: the program may have wrapped its modules since."""
        params = parameters_of(optimizer)
        roots = owners(params, self.census)
        roots = without_copies(roots, self.used)
        return crew_of(params, roots, {**names, **names_in_sight([*params, *roots])}), roots

    def renew(self, pilot: Pilot) -> Pilot:
        """With the modules whose parameters the program has added; as it was where that cannot be."""
        crew, roots = self._crew(pilot.optimizer, names_inside(pilot.bench.model))
        try:
            shares = pilot.sync == "eager"
            new = Pilot(
                pilot.optimizer, crew, roots, self._settings, name=pilot.name, shares=shares, search=self._search
            )
        except Exception:
            log.exception("parameters that were added to %s are not looked after", type(pilot.optimizer).__name__)
            return pilot
        new.take_over(pilot)
        vars(pilot.optimizer)[_SEAT] = new
        self._seats = [(weakref.ref(new) if ref() is pilot else ref, journal) for ref, journal in self._seats]
        return new

    def _introduce(self, pilot: Pilot) -> None:
        is_first = not self.num_optimizers
        self.num_optimizers += 1
        pilot.bench.journal.numbers = self._numbers
        for other in self.pilots:
            other.ask_the_host()
        introduce(
            pilot.bench,
            asked_precision="the program's own",
            sync=pilot.sync,
            program={"script": self._settings.script, "argv": list(self._settings.argv)},
            joins=not is_first,
        )

    def dismiss(self, pilot: Pilot) -> None:
        vars(pilot.optimizer).pop(_SEAT, None)
        self._part_with(pilot)

    # ---- what became of them -------------------------------------------------------------------------------------

    @property
    def incidents(self) -> Sequence[Incident]:
        """Of all optimizers, as far as the host has heard, in the order in which they came."""
        found = [*self._past_incidents, *(incident for _, journal in self._seats for incident in journal.incidents)]
        return sorted(found, key=lambda incident: incident.number)

    @property
    def counts(self) -> Counter[str]:
        """Steps applied, skipped and so on, of all optimizers."""
        total = Counter(self._past)
        for _, journal in self._seats:
            total.update(journal.counts)  # adding would leave out what is zero
        return total

    @property
    def num_not_kept(self) -> int:
        """Incidents that were left out on disk."""
        return self._past_not_kept + sum(journal.num_not_kept for _, journal in self._seats)

    @property
    def refused_in_a_row(self) -> int:
        """Of the optimizer that fares worst, up to now."""
        return max((journal.refused_in_a_row for _, journal in self._seats), default=0)

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite now. Syncs."""
        for pilot in self.pilots:
            pilot.bench.last_forward.mend_in_any_case_()
        return tuple(name for pilot in self.pilots for name in pilot.steps.climber.unsound())

    def close(self) -> None:
        """Hears of what is under way, and ends the run log."""
        for pilot in self.pilots:
            try:
                pilot.close()
            except NonFiniteError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the last steps could not be looked at")
            vars(pilot.optimizer).pop(_SEAT, None)  # it is a plain one from now on, whatever is installed next


def pilot_of(optimizer: Optimizer) -> Pilot | None:
    pilot: Pilot | None = vars(optimizer).get(_SEAT)
    return pilot


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
