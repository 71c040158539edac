"""Facts about the machine: versions, devices, settings of torch, environment and disk."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nanguard.checkup.record import CheckupFinding, Fact
from nanguard.records.words import counted

OLDEST_PYTHON, NEWEST_PYTHON, OLDEST_TORCH = (3, 10), (3, 13), (2, 6)
FRAMEWORKS = ("lightning", "pytorch-lightning", "transformers", "accelerate", "speechbrain", "deepspeed")
OPTIONAL = {"plotly": "charts of nanguard report", "pandas": "run.frame()"}
LITTLE_DISK = 2**30

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_LOGS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Environment variables that change numbers, speed or memory. They are listed if they are set."""

_COSTLY = {
    "CUDA_LAUNCH_BLOCKING": (
        "the host waits for every kernel",
        "unset it, except while you search for a crashing kernel",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "every tensor is allocated by the driver, which waits for the GPU",
        "unset it, except under compute-sanitizer",
    ),
    "NVIDIA_TF32_OVERRIDE": (
        "all fp32 matrix products keep 10 bits of the mantissa, whatever the program asks for",
        "unset it, and call torch.set_float32_matmul_precision('high') in programs that should use it",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "fp32 matrix products keep 10 bits of the mantissa, whatever the program asks for",
        "unset it, and call torch.set_float32_matmul_precision('high') in programs that should use it",
    ),
    "TORCHDYNAMO_DISABLE": ("torch.compile does nothing", "unset it"),
}
"""Variables that should not be 1: why, and what to do."""


def look(run_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[list[Fact], list[CheckupFinding]]:
    """Facts and findings about this machine. ``run_dir`` is the folder that runs will be written to."""
    python = f"{platform.python_version()} on {platform.system()}, {platform.machine()}"
    facts = [Fact(name="Python", value=python)]
    findings = [*_python_findings(), *_environment_findings(environ)]
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        findings.append(
            CheckupFinding(
                rule="torch-missing",
                severity="error",
                what="torch cannot be imported",
                why=f"{type(error).__name__}: {error}",
                change="install torch 2.6 or newer: https://pytorch.org/get-started/locally",
            )
        )
    else:
        facts += [*_torch_facts(), *_device_facts(), *_switch_facts()]
        findings += _torch_findings(torch.__version__)
    facts += _package_facts()
    facts += [Fact(name=name, value=environ[name]) for name in VARIABLES if name in environ]
    free = _free_disk(run_dir)
    if free is not None:
        facts.append(Fact(name="free disk", value=f"{_size(free)} at {run_dir}"))
        findings += _disk_findings(run_dir, free)
    return facts, findings


# ---- facts -----------------------------------------------------------------------------------------------------------


def _torch_facts() -> Iterator[Fact]:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield Fact(name="torch", value=f"{torch.__version__}, built for {built_for}")


def _device_facts() -> Iterator[Fact]:
    import torch

    threads = torch.get_num_threads()
    yield Fact(name="CPU", value=f"{os.cpu_count()} cores, {counted(threads, 'torch thread')}")
    if not torch.cuda.is_available():
        yield Fact(name="GPU", value="none that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        value = f"{properties.name}, {_size(properties.total_memory)}, bf16 {'yes' if has_bf16 else 'emulated only'}"
        yield Fact(name=f"GPU {index}", value=value)


def _switch_facts() -> Iterator[Fact]:
    from nanguard.incidents.environment import flags

    told = flags()
    yield Fact(name="fp32 matmul precision", value=str(told["matmul_precision"]))
    yield Fact(name="TF32", value=f"matmul {_on(told['matmul_tf32'])}, cuDNN {_on(told['cudnn_tf32'])}")
    reduced = f"in matmul: fp16 {_on(told['matmul_fp16_reduction'])}, bf16 {_on(told['matmul_bf16_reduction'])}"
    yield Fact(name="half-precision sums", value=reduced)
    cudnn = f"{_on(told['cudnn_deterministic'])} in cuDNN, benchmark {_on(told['cudnn_benchmark'])}"
    yield Fact(name="deterministic", value=f"{_on(told['deterministic'])}, {cudnn}")


def _package_facts() -> Iterator[Fact]:
    for name in FRAMEWORKS:
        if found := _version(name):
            yield Fact(name=name, value=found)
    for name, use in OPTIONAL.items():
        yield Fact(name=name, value=_version(name) or f"not installed (needed for {use})")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free_disk(run_dir: Path) -> int | None:
    """Free bytes on the disk of the folder, which need not exist."""
    for folder in (run_dir, *run_dir.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


# ---- findings --------------------------------------------------------------------------------------------------------


def _python_findings(running: tuple[int, ...] = tuple(sys.version_info[:2])) -> Iterator[CheckupFinding]:
    if not OLDEST_PYTHON <= running <= NEWEST_PYTHON:
        yield CheckupFinding(
            rule="python-version",
            severity="warning",
            what=f"Python {'.'.join(map(str, running))} is not tested with nanguard",
            why="nanguard is tested with Python 3.10 to 3.13",
            change="use one of these versions",
        )


def _torch_findings(running: str) -> Iterator[CheckupFinding]:
    numbers = tuple(int(part) for part in running.split("+")[0].split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST_TORCH:
        yield CheckupFinding(
            rule="torch-version",
            severity="error",
            what=f"torch {running} is too old for nanguard",
            why="nanguard needs functions that are new in torch 2.6",
            change="install torch 2.6 or newer",
        )


def _environment_findings(environ: Mapping[str, str]) -> Iterator[CheckupFinding]:
    for name, (why, change) in _COSTLY.items():
        if environ.get(name) == "1":
            yield CheckupFinding(
                rule="environment", severity="warning", what=f"{name}=1 is set", why=why, change=change
            )


def _disk_findings(run_dir: Path, free: int) -> Iterator[CheckupFinding]:
    if free < LITTLE_DISK:
        yield CheckupFinding(
            rule="little-disk",
            severity="warning",
            what=f"only {_size(free)} are free at {run_dir}",
            why="the run log stops when the disk is full, and snapshots are as large as model and optimizer",
            change="free some space or choose another run_dir",
        )


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"


def _on(switch: object) -> str:
    if switch is None:
        return "unknown"
    return {True: "on", False: "off"}[switch] if isinstance(switch, bool) else str(switch)
