"""Helpers for tests with real training frameworks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch


def use_torchvision_without_kernels() -> None:
    """Makes torchvision importable, which timm asks for: there is no CPU build of it for this torch.

    Its transforms and data sets need none of its kernels. Without a declaration of two of them it cannot be imported.
    """
    apart = Path(sys.prefix) / "torchvision"
    if str(apart) not in sys.path and apart.exists():
        sys.path.append(str(apart))
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def import_speechbrain() -> Any:
    """SpeechBrain imports torchaudio, which has no CPU build for this torch. Skips the tests if it is not installed.

    It also leaves modules behind that import others, with a warning, as soon as anything looks at them: pytest and
    ``inspect`` look at all modules there are, so these are removed.
    """
    if importlib.util.find_spec("speechbrain") is None:
        pytest.skip("speechbrain is not installed", allow_module_level=True)
    if "torchaudio" not in sys.modules and importlib.util.find_spec("torchaudio") is None:
        stand_in = types.ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        speechbrain = importlib.import_module("speechbrain")
    for name, module in list(sys.modules.items()):
        if type(module).__module__ == "speechbrain.utils.importutils":
            del sys.modules[name]
    return speechbrain
