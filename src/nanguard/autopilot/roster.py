"""The optimizers of the program and their pilots: who is there, what they are called, what became of their steps."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from nanguard.assembly import introduce
from nanguard.autopilot.crew import crew_of, has_guard, names_in_sight, owners
from nanguard.autopilot.pilot import Pilot
from nanguard.autopilot.settings import Settings
from nanguard.errors import NonFiniteError
from nanguard.journal import Journal
from nanguard.records import Incident
from nanguard.shield import needs_closure

log = logging.getLogger("nanguard")

_SEAT = "_nanguard_pilot"
"""Where an optimizer keeps its pilot: torch leaves such attributes out of copies, pickles and ``state_dict``."""


class Roster:
    """Optimizers are the program's: they are let go of when it does so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._arrived: list[weakref.ref[Optimizer]] = []
        self._names: dict[int, str] = {}
        self._pilots: list[weakref.ref[Pilot]] = []
        self._journals: list[Journal] = []
        self.has_guard = False

    @property
    def pilots(self) -> list[Pilot]:
        """Of optimizers that are still there."""
        return [pilot for pilot in (ref() for ref in self._pilots) if pilot is not None]

    @property
    def expects_somebody(self) -> bool:
        return bool(self._arrived)

    def expect(self, optimizer: Optimizer) -> list[nn.Module]:
        """One that the program has just made, and may not be finished; the outermost modules that it trains."""
        params = parameters_of(optimizer)
        roots = owners(params)
        self._names.update(names_in_sight([*params, *roots]))
        self._arrived.append(weakref.ref(optimizer))
        return roots

    def seat_next(self) -> Pilot | None:
        """The first that is expected; None where it is gone, or cannot be guarded."""
        optimizer = self._arrived.pop(0)()
        if optimizer is None or not parameters_of(optimizer):
            return None
        if has_guard(optimizer):
            self.has_guard = True
            return None
        name = names_in_sight([optimizer]).get(id(optimizer), type(optimizer).__name__)
        taken = [pilot.name for pilot in self.pilots]
        return self.enroll(optimizer, name if name not in taken else f"{name} {len(taken)}")

    def enroll(self, optimizer: Optimizer, name: str) -> Pilot | None:
        """None where the optimizer cannot be guarded, which is said once; the program goes on without."""
        kind, params = type(optimizer).__name__, parameters_of(optimizer)
        roots = owners(params)  # anew: the program may have wrapped them since
        crew = crew_of(params, roots, self._names | names_in_sight([*params, *roots]))
        try:
            pilot = Pilot(optimizer, crew, roots, self._settings, name=name, shares=bool(self.pilots))
            pilot.open()
        except ValueError as error:
            log.warning("%s is not guarded: %s", kind, error)
            return None
        except Exception:
            log.exception("%s is not guarded: nanguard failed to take it in", kind)
            return None
        if needs_closure(optimizer):
            log.warning(
                "%s computes gradients inside step(), so its steps cannot be checked before: each is looked at "
                "afterwards, and taken back where it made something non-finite",
                kind,
            )
        self._introduce(pilot)
        vars(optimizer)[_SEAT] = pilot
        self._pilots.append(weakref.ref(pilot))
        return pilot

    def _introduce(self, pilot: Pilot) -> None:
        is_first = not self._journals
        self._journals.append(pilot.bench.journal)
        pilot.bench.journal.family = self._journals
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
        self._pilots = [ref for ref in self._pilots if ref() is not pilot]

    # ---- what became of them -------------------------------------------------------------------------------------

    @property
    def num_optimizers(self) -> int:
        """That have ever been guarded."""
        return len(self._journals)

    @property
    def incidents(self) -> Sequence[Incident]:
        """Of all optimizers, as far as the host has heard, in the order in which they came."""
        found = [incident for journal in self._journals for incident in journal.incidents]
        return sorted(found, key=lambda incident: incident.number)

    @property
    def counts(self) -> Counter[str]:
        """Steps applied, skipped and so on, of all optimizers."""
        total: Counter[str] = Counter()
        for journal in self._journals:
            total.update(journal.counts)  # adding would leave out what is zero
        return total

    def unsound(self) -> tuple[str, ...]:
        """Names of what is not finite now. Syncs."""
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


def pilot_of(optimizer: Optimizer) -> Pilot | None:
    pilot: Pilot | None = vars(optimizer).get(_SEAT)
    return pilot


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
