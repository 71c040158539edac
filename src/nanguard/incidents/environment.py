"""The environment of a step: versions, device and the settings of torch that change numbers. Can restore these."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import nanguard


def environment(*, device: torch.device, precision: str, rank: int, world_size: int) -> dict[str, Any]:
    """Plain values only. Does not sync."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nanguard": nanguard.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",  # platform() starts a process
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "precision": precision,
        "rank": rank,
        "world_size": world_size,
        "flags": flags(),
    }


def flags() -> dict[str, Any]:
    """The current settings; None for one that this torch does not report."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": _told(torch, "get_float32_matmul_precision"),
        "matmul_tf32": _told(torch.backends.cuda.matmul, "allow_tf32"),
        "matmul_fp16_reduction": _told(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        "matmul_bf16_reduction": _told(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "cudnn_tf32": _told(torch.backends.cudnn, "allow_tf32"),
        "cudnn_benchmark": _told(torch.backends.cudnn, "benchmark"),
        "cudnn_deterministic": _told(torch.backends.cudnn, "deterministic"),
        "num_threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def as_then(recorded: Mapping[str, Any]) -> Iterator[None]:
    """Inside, settings that change rounding are as recorded, if known. They are restored afterwards."""
    before = flags()
    _set(recorded)
    try:
        yield
    finally:
        _set(before)


def _set(wanted: Mapping[str, Any]) -> None:
    if isinstance(wanted.get("deterministic"), bool):
        torch.use_deterministic_algorithms(wanted["deterministic"])
    if wanted.get("matmul_precision") in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(wanted["matmul_precision"])
    threads = wanted.get("num_threads")
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= (os.cpu_count() or 1):
        torch.set_num_threads(threads)
    for name in ("benchmark", "deterministic"):
        if isinstance(wanted.get(f"cudnn_{name}"), bool):
            setattr(torch.backends.cudnn, name, wanted[f"cudnn_{name}"])


def _told(owner: Any, name: str) -> Any:
    try:
        value = getattr(owner, name)
        value = value() if callable(value) else value
    except (AttributeError, RuntimeError):  # newer releases raise if a program mixes old and new settings
        return None
    return value if isinstance(value, (bool, str, int)) else str(value)
