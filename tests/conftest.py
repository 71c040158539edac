from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch

if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks are all here, and names of hosts may lead elsewhere

# Compiled kernels are kept between runs, but never shared between instruction sets: torch loads what it finds.
_KERNELS = f"nanguard-inductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _KERNELS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the long campaigns whole, not a slice of each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--campaign"):
        rest = pytest.mark.skip(reason="the rest of a long campaign: make campaign, or pytest --campaign")
        for item in items:
            if "campaign" in item.keywords:
                item.add_marker(rest)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _only_its_own_log(request: pytest.FixtureRequest) -> None:
    """A guard that an earlier test has left behind is summed up when it is collected: before the log is looked at."""
    if "caplog" in request.fixturenames:
        gc.collect()
        request.getfixturevalue("caplog").clear()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def traced_ops(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many ops of the program were traced as they ran, with gradients on (True) or off."""
    from nanguard.diagnosis import live

    seen: Counter[bool] = Counter()

    class Counted(live.Trace):
        def _remember_node(self, *args: Any) -> None:  # called for each op, after its line was looked for
            seen[torch.is_grad_enabled()] += 1
            super()._remember_node(*args)

    monkeypatch.setattr(live, "Trace", Counted)
    return seen
