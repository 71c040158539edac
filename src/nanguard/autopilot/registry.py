"""The optimizers of the program and their hosted steps: which there are, their names, counts and incidents."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.autopilot.averages import unsound_averages
from nanguard.autopilot.live_modules import LiveModules
from nanguard.errors import NonFiniteError
from nanguard.hosted.joining import CLAIMED, Program, is_claimed
from nanguard.hosted.loop import HostedLoop
from nanguard.hosted.names import name_being_assigned, names_in_call, names_in_sight
from nanguard.hosted.settings import Settings
from nanguard.hosted.shared import Shared
from nanguard.hosted.step import HostedStep
from nanguard.hosted.trained_modules import (
    TrainedModules,
    is_same,
    names_inside,
    owners,
    trained_modules_of,
    without_copies,
)
from nanguard.records.steps import Incident, Incidents
from nanguard.source.frames import Place, calling_line
from nanguard.state.names import unwrapped
from nanguard.step.journal import Journal
from nanguard.step.optimizers import has_guard
from nanguard.step.parts import StepParts
from nanguard.wiring import introduce

log = logging.getLogger("nanguard")

_ATTRIBUTE = "_nanguard_hosted_step"
"""Of the optimizer: torch leaves such attributes out of copies, pickles and ``state_dict``."""

_MOST_READ = 16
"""So many optimizers have the line read that makes them; some programs make thousands."""


@dataclass(frozen=True, slots=True, eq=False)
class NewOptimizer:
    """The program has made it; it has no hosted step yet."""

    ref: weakref.ref[Optimizer]
    names: dict[int, str]
    """Of what it trains."""
    models: set[int]
    """Identities of the outermost modules that it trains."""
    place: Place | None
    """Where it was made."""


class Registry:
    """Does not keep optimizers alive: they belong to the program."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.new: list[NewOptimizer] = []
        """Until they have a hosted step: other threads may use them, and wait as long as they are here."""
        self._num_expected = 0
        self.entries: list[tuple[weakref.ref[HostedStep], Journal]] = []
        self._changing = threading.RLock()
        self._past: Counter[str] = Counter()
        self._past_incidents: list[Incident] = []
        self._shared = Shared()
        self._past_not_kept = self._past_refused = 0
        self._past_unsound: tuple[str, ...] = ()
        self._loops: list[HostedLoop] = []
        self.live_modules = LiveModules()
        self.used: set[int] = set()
        """Identities of outermost modules that the program has called."""
        self.num_optimizers = 0
        """How many have been guarded, including those that no longer exist."""
        self._networks: weakref.WeakKeyDictionary[HostedStep, str] = weakref.WeakKeyDictionary()
        self.has_guard = False
        self.unguarded: list[str] = []

    @property
    def hosted_steps(self) -> list[HostedStep]:
        """Of optimizers that still exist, but for those that loops of frameworks guard."""
        own = []
        for ref, _ in self.entries:
            hosted = ref()
            if hosted is not None and CLAIMED not in vars(hosted.optimizer):
                own.append(hosted)
        if len(own) < len(self.entries):
            self._forget(None)
            self.has_guard = self.has_guard or len(own) < len(self.entries)
        return own

    def _forget(self, which: HostedStep | None) -> None:
        """Removes one, or with None those that no longer exist: a program may make thousands. The counts are kept."""
        with self._changing:
            for entry in [entry for entry in self.entries if entry[0]() is which]:
                self.entries.remove(entry)
                self._past.update(entry[1].counts)
                self._past_incidents += entry[1].incidents
                self._past_not_kept += entry[1].num_not_kept

    @property
    def has_hosted_steps(self) -> bool:
        """Whether there are ``hosted_steps``, or were a moment ago."""
        return bool(self.entries)

    def expect(self, optimizer: Optimizer) -> list[nn.Module]:
        """Notes an optimizer that the program is making. Returns the outermost modules that it trains."""
        if hosted_step_of(optimizer) is not None or any(new.ref() is optimizer for new in self.new):
            return []
        params = parameters_of(optimizer)
        roots = [root for root in owners(params, self.live_modules) if not isinstance(root, torch.jit.ScriptModule)]
        self._num_expected += 1
        by_call = names_in_call(params, roots, also_alone=self._num_expected <= _MOST_READ)
        names = {**by_call, **names_in_sight([*params, *roots])}
        names[id(optimizer)] = name_being_assigned()
        self.new.append(NewOptimizer(weakref.ref(optimizer), names, _identities(roots), calling_line()))
        return roots

    def misses_parameters(self) -> bool:
        """Whether the modules of a new optimizer do not hold its parameters, as in ``torch.func.functional_call``."""
        with_modules = [new.ref() for new in self.new if new.models]
        return any(not owners(parameters_of(each), self.live_modules) for each in with_modules if each is not None)

    def guard_next(self) -> HostedStep | None:
        """Guards the first of the new optimizers; None if it no longer exists, or cannot be guarded."""
        new = self.new[0]
        try:
            hosted = self._guard_new(new.ref(), new.names)
            if hosted is not None:
                hosted.parts.optimizer_made_at = new.place
            return hosted
        finally:
            if new in self.new:  # else a framework's loop guards it
                self.new.remove(new)

    def _guard_new(self, optimizer: Optimizer | None, names: Mapping[int, str]) -> HostedStep | None:
        if optimizer is None or not parameters_of(optimizer):
            return None
        if has_guard(optimizer) or is_claimed(optimizer):
            self.has_guard = True
            return None
        name = names_in_sight([optimizer]).get(id(optimizer)) or names[id(optimizer)] or type(optimizer).__name__
        taken = [hosted.name for hosted in self.hosted_steps]
        return self.guard(optimizer, name if name not in taken else f"{name} {self.num_optimizers}", names)

    def guard(self, optimizer: Optimizer, name: str, names: Mapping[int, str]) -> HostedStep | None:
        """None if the optimizer cannot be guarded, which is logged; the program goes on without.

        ``names`` are those that modules and tensors had when it was made.
        """
        kind = type(optimizer).__name__
        trained, roots = self._trained(optimizer, names, among_others=self._trains_one_of_several(optimizer))
        try:
            hosted = self._make(optimizer, trained, roots, name=name, shares=bool(self.hosted_steps))
            first = next((other for other in self.hosted_steps if is_same(other.parts.state.model, trained)), None)
            if first is not None:
                hosted.share_buffers_of(first)
            hosted.open()
        except ValueError as error:
            log.warning("%s is not guarded: %s", kind, error)
            self.unguarded.append(kind)
            return None
        except Exception:
            log.exception("%s is not guarded: nanguard failed to set it up", kind)
            self.unguarded.append(kind)
            return None
        self._introduce(hosted)
        vars(optimizer)[_ATTRIBUTE] = hosted
        self._networks[hosted] = _network_name(hosted, names)
        with self._changing:
            self.entries.append((weakref.ref(hosted), hosted.parts.journal))
        self._tell_networks()
        return hosted

    def _tell_networks(self) -> None:
        """If there are several optimizers, each is told which network it trains, and of the others."""
        hosted_steps = self.hosted_steps
        for hosted in hosted_steps if len(hosted_steps) > 1 else ():
            hosted.parts.network = f"{self._networks.get(hosted, '')}, trained by {hosted.name}".removeprefix(", ")
            hosted.parts.other_parts = functools.partial(self._others, weakref.ref(hosted))

    def _others(self, ref: weakref.ref[HostedStep]) -> list[StepParts]:
        """But for those that other threads train: they may be at work now."""
        this = ref()
        others = [each for each in self.hosted_steps if each is not this]
        return [each.parts for each in others if this is None or each.thread in (None, this.thread)]

    def _make(
        self, optimizer: Optimizer, trained: nn.Module, roots: list[nn.Module], *, name: str, shares: bool
    ) -> HostedStep:
        return HostedStep(
            optimizer,
            trained,
            roots,
            self._settings,
            name=name,
            shares=shares,
            shared=self._shared,
        )

    def _trains_one_of_several(self, optimizer: Optimizer) -> bool:
        """Whether other optimizers train other modules, so that names must say which one is meant."""
        own = _identities(owners(parameters_of(optimizer), self.live_modules))
        new = [new.models for new in self.new if new.ref() is not optimizer]
        return any(other - own for other in [*new, *(_identities(hosted.roots) for hosted in self.hosted_steps)])

    def _trained(
        self, optimizer: Optimizer, names: Mapping[int, str], *, among_others: bool
    ) -> tuple[nn.Module, list[nn.Module]]:
        """What it trains now: the program may have wrapped its modules since it made the optimizer."""
        params = parameters_of(optimizer)
        roots = owners(params, self.live_modules)
        roots = without_copies(roots, self.used)
        called = {**names, **names_in_sight([*params, *roots])}
        return trained_modules_of(params, roots, called, among_others=among_others), roots

    def renew(self, hosted: HostedStep) -> HostedStep:
        """A new hosted step that knows the parameters that the program has added; the old one if that fails."""
        model = hosted.parts.state.model
        names, is_named = names_inside(model), isinstance(model, TrainedModules)
        trained, roots = self._trained(hosted.optimizer, names, among_others=is_named)
        try:
            new = self._make(hosted.optimizer, trained, roots, name=hosted.name, shares=hosted.sync == "eager")
        except Exception:
            log.exception("parameters that were added to %s are not guarded", type(hosted.optimizer).__name__)
            return hosted
        new.take_over(hosted)
        new.parts.optimizer_made_at = hosted.parts.optimizer_made_at
        self._networks[new] = self._networks.get(hosted, "")
        vars(hosted.optimizer)[_ATTRIBUTE] = new
        with self._changing:
            self.entries = [(weakref.ref(new) if ref() is hosted else ref, journal) for ref, journal in self.entries]
        self._tell_networks()
        return new

    def _introduce(self, hosted: HostedStep) -> None:
        """Before it is one of ``hosted_steps``: the others have to ask the host from now on, and so has it then."""
        is_first = not self.num_optimizers
        self.num_optimizers += 1
        for other in self.hosted_steps:
            other.ask_the_host()
        introduce(
            hosted.parts,
            asked_precision="the program's own",
            sync=hosted.sync,
            program=self._settings.program(),
            joins=not is_first,
        )

    # ---- loops of frameworks, which adapters guard -----------------------------------------------------------------

    @property
    def program(self) -> Program:
        """For loops that are made by adapters."""
        return Program(
            settings=self._settings,
            shared=self._shared,
            adopt=self._adopt,
            release=self._release,
        )

    def _adopt(self, loop: HostedLoop) -> bool:
        """A loop begins. Its optimizers are not guarded here. Returns whether it is the first of the program."""
        is_first, self.has_guard = not self.num_optimizers, True
        self.num_optimizers += len(loop.optimizers)
        self._loops.append(loop)
        for new in [new for new in self.new if _is_in(new.ref(), loop.optimizers)]:
            self.new.remove(new)
        return is_first

    def _release(self, loop: HostedLoop) -> None:
        """It has ended. Its counts are kept, but not what it trained."""
        self._loops.remove(loop)
        self._past.update(loop.counts)
        self._past_incidents += loop.incidents
        self._past_not_kept += loop.num_not_kept
        self._past_refused = loop.refused_in_a_row
        self._past_unsound = loop.unsound()

    def remove(self, hosted: HostedStep) -> None:
        """The program goes on with a plain optimizer."""
        vars(hosted.optimizer).pop(_ATTRIBUTE, None)
        self._forget(hosted)

    # ---- counts and incidents --------------------------------------------------------------------------------------

    @property
    def incidents(self) -> Incidents:
        """Of all optimizers, as far as the host knows, in the order in which they happened."""
        found = [*self._past_incidents, *(incident for _, journal in self.entries for incident in journal.incidents)]
        found += [incident for loop in self._loops for incident in loop.incidents]
        return Incidents(sorted(found, key=lambda incident: incident.number))

    @property
    def counts(self) -> Counter[str]:
        """Steps applied, skipped and so on, of all optimizers."""
        total = Counter(self._past)
        for _, journal in self.entries:
            total.update(journal.counts)  # adding would leave out what is zero
        for loop in self._loops:
            total.update(loop.counts)
        return total

    @property
    def num_not_kept(self) -> int:
        """Incidents that were left out on disk."""
        of_loops = sum(loop.num_not_kept for loop in self._loops)
        return self._past_not_kept + of_loops + sum(journal.num_not_kept for _, journal in self.entries)

    @property
    def refused_in_a_row(self) -> int:
        """Of the optimizer with the most, up to now."""
        known = [self._past_refused, *(loop.refused_in_a_row for loop in self._loops)]
        return max([*known, *(journal.refused_in_a_row for _, journal in self.entries)])

    @property
    def refused_by(self) -> str:
        """What that optimizer trains. Empty if there is only one optimizer, or if it is not known."""
        most = self.refused_in_a_row
        rows = [journal for _, journal in self.entries if journal.incidents and journal.refused_in_a_row == most]
        diagnosis = rows[0].incidents[-1].diagnosis if rows else None
        return "" if diagnosis is None else diagnosis.network

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite once the last steps have been processed. Syncs."""
        self._end_steps(HostedStep.settle)
        trained = tuple(name for hosted in self.hosted_steps for name in hosted.unsound())
        by_loops = tuple(name for loop in self._loops for name in loop.unsound())
        return trained + by_loops + self._past_unsound + unsound_averages(self.live_modules)

    def close_logs(self) -> None:
        """Ends the run log, and nothing else."""
        for hosted in self.hosted_steps:
            hosted.parts.journal.close(steps=hosted.parts.num_steps)

    def close(self) -> None:
        """Processes what is under way and ends the run log."""
        for loop in list(self._loops):
            loop.close()
        self._end_steps(HostedStep.close)
        for hosted in self.hosted_steps:
            vars(hosted.optimizer).pop(_ATTRIBUTE, None)  # a plain optimizer from now on, whatever is installed next

    def _end_steps(self, end: Callable[[HostedStep], None]) -> None:
        for hosted in self.hosted_steps:
            try:
                end(hosted)
            except NonFiniteError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("the last steps could not be processed")


def _identities(roots: Sequence[nn.Module]) -> set[int]:
    return {id(unwrapped(root)) for root in roots}


def _network_name(hosted: HostedStep, names: Mapping[int, str]) -> str:
    """The program's own names of the modules that an optimizer trains; their classes if they have none."""
    called = (names.get(id(root)) or type(unwrapped(root)).__name__ for root in hosted.roots)
    return " and ".join(dict.fromkeys(called))


def _is_in(optimizer: Optimizer | None, several: Sequence[Optimizer]) -> bool:
    return any(each is optimizer for each in several)


def hosted_step_of(optimizer: Optimizer) -> HostedStep | None:
    hosted: HostedStep | None = vars(optimizer).get(_ATTRIBUTE)
    return hosted


def num_calls_of(optimizer: Optimizer) -> int:
    """How often its ``step()`` was called."""
    hosted = hosted_step_of(optimizer)
    return 0 if hosted is None else hosted.num_calls


def use_scaler(optimizer: Optimizer, scaler: Any) -> int:
    """The program's GradScaler steps this optimizer. Returns ``num_calls_of`` it before that."""
    hosted = hosted_step_of(optimizer)
    if hosted is not None:
        hosted.use_scaler(scaler)
    return num_calls_of(optimizer)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
