"""Checks checkpoints for NaN and Inf: ``check(path)`` in Python, ``nanguard check`` on the command line."""

from nanguard.checkpoint.checker import check
from nanguard.checkpoint.findings import CheckReport, FileReport, NumberReport, TensorReport

__all__ = ["CheckReport", "FileReport", "NumberReport", "TensorReport", "check"]
