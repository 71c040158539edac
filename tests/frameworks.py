"""Helpers for tests with real training frameworks."""

from __future__ import annotations

import sys
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
