"""What another process needs to go on with a run, besides a snapshot."""

from __future__ import annotations

from typing import Any

from nanguard.errors import ProtocolError
from nanguard.state.rng import RngState
from nanguard.step.engine import StepEngine


def facts_of(engine: StepEngine) -> dict[str, Any]:
    """As JSON can hold it. Does not sync."""
    parts = engine.parts
    return {
        "num_steps": parts.num_steps,
        "num_epochs": engine.num_epochs,
        "journal": parts.journal.state_dict(),
        "measures": engine.recovery.state_dict(),
        "kept_fp32": parts.islands.state_dict(),
    }


def load_facts(engine: StepEngine, facts: dict[str, Any]) -> None:
    """Puts ``facts_of`` another engine back."""
    engine.parts.num_steps, engine.num_epochs = facts["num_steps"], facts["num_epochs"]
    engine.parts.journal.load_state_dict(facts["journal"])
    engine.parts.islands.load_state_dict(facts["kept_fp32"])
    engine.recovery.load_state_dict(facts["measures"])


def resume(engine: StepEngine) -> int | None:
    """Goes on from the newest snapshot on disk. Returns the number of steps made by then; None if there is none."""
    if engine.ring is None:
        raise ProtocolError("guard.resume() needs snapshots on disk: Guard(..., snapshots=Snapshots(where='disk'))")
    facts = engine.ring.resume()
    if facts is None:
        return None
    engine.mode.drop_in_flight()
    load_facts(engine, facts["run"])
    engine.num_epochs = max(0, engine.num_epochs - (facts["data"] is not None))  # the next epoch is the one it was in
    engine.data.resume_at(facts["data"], RngState.from_dict(facts["rng"]))
    return engine.parts.num_steps
