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

from nanguard.autopilot.live_modules import Census
from nanguard.diagnosis.search import Search
from nanguard.errors import NonFiniteError
from nanguard.hosted.names import name_being_assigned, names_in_call, names_in_sight
from nanguard.hosted.settings import Settings
from nanguard.hosted.step import HostedStep
from nanguard.hosted.trained_modules import has_guard, names_inside, owners, trained_modules_of, without_copies
from nanguard.records.steps import Incident
from nanguard.step.journal import Journal
from nanguard.wiring import introduce

log = logging.getLogger("nanguard")

_SEAT = "_nanguard_pilot"
"""Where an optimizer keeps its pilot: torch leaves such attributes out of copies, pickles and ``state_dict``."""


class Registry:
    """Optimizers are the program's: they are let go of when it does so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._arrived: list[tuple[weakref.ref[Optimizer], dict[int, str]]] = []
        self._seats: list[tuple[weakref.ref[HostedStep], Journal]] = []
        self._past: Counter[str] = Counter()
        self._past_incidents: list[Incident] = []
        self._search = Search()
        self._past_not_kept = 0
        self.live_modules = Census()
        self.used: set[int] = set()
        """Identities of outermost modules that the program has called."""
        self.num_optimizers = 0
        """That have ever been guarded."""
        self._numbers = itertools.count(1)
        self.has_guard = False
        self.unguarded: list[str] = []

    @property
    def hosted_steps(self) -> list[HostedStep]:
        """Of optimizers that are still there."""
        hosted_steps = [ref() for ref, _ in self._seats]
        if None in hosted_steps:
            self._part_with(None)
        return [hosted for hosted in hosted_steps if hosted is not None]

    def _part_with(self, whom: HostedStep | None) -> None:
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
        if hosted_step_of(optimizer) is not None or any(ref() is optimizer for ref, _ in self._arrived):
            return []
        params = parameters_of(optimizer)
        roots = [root for root in owners(params, self.live_modules) if not isinstance(root, torch.jit.ScriptModule)]
        names = {**names_in_call(params, roots), **names_in_sight([*params, *roots])}
        names[id(optimizer)] = name_being_assigned()
        self._arrived.append((weakref.ref(optimizer), names))
        return roots

    def seat_next(self) -> HostedStep | None:
        """The first that is expected; None where it is gone, or cannot be guarded."""
        arrived, names = self._arrived.pop(0)
        optimizer = arrived()
        if optimizer is None or not parameters_of(optimizer):
            return None
        if has_guard(optimizer):
            self.has_guard = True
            return None
        name = names_in_sight([optimizer]).get(id(optimizer)) or names[id(optimizer)] or type(optimizer).__name__
        taken = [hosted.name for hosted in self.hosted_steps]
        return self.enroll(optimizer, name if name not in taken else f"{name} {self.num_optimizers}", names)

    def enroll(self, optimizer: Optimizer, name: str, names: Mapping[int, str]) -> HostedStep | None:
        """None where the optimizer cannot be guarded, which is said once; the program goes on without.

        ``names`` are those that things had when it was made.
        """
        kind = type(optimizer).__name__
        trained, roots = self._trained(optimizer, names)
        try:
            shares = bool(self.hosted_steps)
            hosted = HostedStep(
                optimizer, trained, roots, self._settings, name=name, shares=shares, search=self._search
            )
            first = next((other for other in self.hosted_steps if other.parts.state.model is trained), None)
            if first is not None:
                hosted.leave_buffers_to(first)
            hosted.open()
        except ValueError as error:
            log.warning("%s is not guarded: %s", kind, error)
            self.unguarded.append(kind)
            return None
        except Exception:
            log.exception("%s is not guarded: nanguard failed to take it in", kind)
            self.unguarded.append(kind)
            return None
        self._introduce(hosted)
        vars(optimizer)[_SEAT] = hosted
        self._seats.append((weakref.ref(hosted), hosted.parts.journal))
        return hosted

    def _trained(self, optimizer: Optimizer, names: Mapping[int, str]) -> tuple[nn.Module, list[nn.Module]]:
        """Looked for anew: the program may have wrapped its modules since."""
        params = parameters_of(optimizer)
        roots = owners(params, self.live_modules)
        roots = without_copies(roots, self.used)
        return trained_modules_of(params, roots, {**names, **names_in_sight([*params, *roots])}), roots

    def renew(self, hosted: HostedStep) -> HostedStep:
        """With the modules whose parameters the program has added; as it was where that cannot be."""
        trained, roots = self._trained(hosted.optimizer, names_inside(hosted.parts.state.model))
        try:
            shares = hosted.sync == "eager"
            new = HostedStep(
                hosted.optimizer, trained, roots, self._settings, name=hosted.name, shares=shares, search=self._search
            )
        except Exception:
            log.exception("parameters that were added to %s are not looked after", type(hosted.optimizer).__name__)
            return hosted
        new.take_over(hosted)
        vars(hosted.optimizer)[_SEAT] = new
        self._seats = [(weakref.ref(new) if ref() is hosted else ref, journal) for ref, journal in self._seats]
        return new

    def _introduce(self, hosted: HostedStep) -> None:
        is_first = not self.num_optimizers
        self.num_optimizers += 1
        hosted.parts.journal.numbers = self._numbers
        for other in self.hosted_steps:
            other.ask_the_host()
        introduce(
            hosted.parts,
            asked_precision="the program's own",
            sync=hosted.sync,
            program={"script": self._settings.script, "argv": list(self._settings.argv)},
            joins=not is_first,
        )

    def dismiss(self, hosted: HostedStep) -> None:
        vars(hosted.optimizer).pop(_SEAT, None)
        self._part_with(hosted)

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
        for hosted in self.hosted_steps:
            hosted.parts.last_forward.mend_in_any_case_()
        return tuple(name for hosted in self.hosted_steps for name in hosted.parts.state.unsound())

    def close(self) -> None:
        """Hears of what is under way, and ends the run log."""
        for hosted in self.hosted_steps:
            try:
                hosted.close()
            except NonFiniteError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the last steps could not be looked at")
            vars(hosted.optimizer).pop(_SEAT, None)  # it is a plain one from now on, whatever is installed next


def hosted_step_of(optimizer: Optimizer) -> HostedStep | None:
    hosted: HostedStep | None = vars(optimizer).get(_SEAT)
    return hosted


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
