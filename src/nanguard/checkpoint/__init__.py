"""Says whether a checkpoint is clean: ``check(path)`` from Python, ``nanguard check`` on the command line."""

from nanguard.checkpoint.checker import check
from nanguard.checkpoint.findings import CheckReport, FileReport, NumberReport, TensorReport

__all__ = ["CheckReport", "FileReport", "NumberReport", "TensorReport", "check"]
