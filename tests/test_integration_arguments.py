"""What adapters are given is checked at once, with words that a stranger understands."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from nanguard.hosted.loop import HostedLoop

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from nanguard.integrations import accelerate, fabric, transformers
from nanguard.integrations.lightning import GuardCallback
from nanguard.integrations.transformers_callback import GuardCallback as TrainerCallback


@pytest.mark.parametrize("callback", [GuardCallback, TrainerCallback])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("policy", "skip", "policy must be a Policy or None, got 'skip'"),
        ("diagnose", "sometimes", "diagnose must be one of"),
        ("capture", "everything", "capture must be one of"),
        ("observers", [3], "an observer needs at least one of the methods"),
    ],
)
def test_a_wrong_option_is_refused_before_training_begins(callback: Any, option: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        callback(**{option: value})


def test_attach_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"attach\(\) needs a transformers.Trainer, got 'trainer'"):
        transformers.attach("trainer")
    with pytest.raises(ValueError, match=r"attach\(\) needs a lightning.Fabric, got None"):
        fabric.attach(None, nn.Linear(1, 1), None)
    with pytest.raises(ValueError, match=r"attach\(\) needs an accelerate.Accelerator, got 3"):
        accelerate.attach(3, nn.Linear(1, 1), None)


def test_a_hosted_loop_checks_its_choices() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="diagnose must be one of"):
        HostedLoop(model, [], diagnose="sometimes")  # type: ignore[arg-type]
