"""Instructions that this machine offers and cannot run. Imported before torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_ISA = "ONEDNN_MAX_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")
_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def leave_out_broken() -> None:
    """Tells torch not to use AMX if a virtual machine offers it and a bf16 product dies of it. For child processes too.

    Takes the time of one import of torch on a machine with AMX, and none on others.
    """
    if _ISA in os.environ or not _CPUINFO.exists() or "amx_tile" not in _CPUINFO.read_text():
        return
    if subprocess.run([sys.executable, "-c", _PROBE], timeout=300, check=False).returncode == -signal.SIGILL:
        os.environ[_ISA] = "AVX512_CORE_FP16"
