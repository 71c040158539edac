"""Helpers for tests with real training frameworks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

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


def use_speechbrain_without_torchaudio() -> None:
    """Makes SpeechBrain importable, which imports torchaudio: there is no CPU build of it for this torch."""
    if "torchaudio" not in sys.modules and importlib.util.find_spec("torchaudio") is None:
        stand_in = types.ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = stand_in
