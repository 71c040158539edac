"""What the recovery has changed in a loop and is still in force, in a form that a checkpoint can hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nanguard.hosted.step import HostedStep

log = logging.getLogger("nanguard")


def state_of(hosted_steps: Sequence[HostedStep]) -> dict[str, Any]:
    """Modules that are kept in fp32, and the factor of the learning rate; empty if nothing is in force.

    A checkpoint of a run without trouble is then that of a run without nanguard.
    """
    states: list[dict[str, Any]] = [
        {"kept_fp32": each.parts.islands.state_dict(), "measures": each.recovery.mitigations.state_dict()}
        for each in hosted_steps
    ]
    if not any(state["kept_fp32"] or state["measures"]["active"] for state in states):
        return {}
    saved: dict[str, Any] = json.loads(json.dumps({"version": 1, "optimizers": states}))
    return saved


def load_state(hosted_steps: Sequence[HostedStep], state: Mapping[str, Any]) -> None:
    """Puts back what ``state_of`` has returned. Logs what does not fit, such as a module that is not there any more."""
    if not state:
        return
    if state.get("version") != 1 or len(state["optimizers"]) != len(hosted_steps):
        log.warning("what nanguard had changed before the checkpoint is not put back: it is of another program")
        return
    for each, saved in zip(hosted_steps, state["optimizers"], strict=True):
        try:
            each.parts.islands.load_state_dict(saved["kept_fp32"])
        except ValueError as error:
            log.warning("modules that were in fp32 before the checkpoint are not put back: %s", error)
            continue
        each.recovery.mitigations.load_state_dict(saved["measures"])
        if saved["kept_fp32"]:
            log.info("in fp32, as before the checkpoint: %s", ", ".join(saved["kept_fp32"]))
