"""Reads files of ``torch.save``, in the new and the old format. Never runs code from a file."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from nanguard.checkpoint import standins
from nanguard.checkpoint.source import OpenedFile, Unreadable

ZIP = b"PK\x03\x04"
PICKLE = b"\x80"

_RESAVE = (
    "nanguard never runs code from a checkpoint. Save only state_dicts and plain numbers, as in "
    'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)'
)
# Modules and builtins that show an attack: no honest checkpoint contains them.
_CALLS = {"os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "runpy", "pty", "eval", "exec", "__import__"}
_ON_DEMAND = ("torch.distributed.tensor", "torch.nested", "torch._dynamo")
_TORN = "truncated or damaged: it was not completely written or copied"


def open_torch(path: Path) -> OpenedFile:
    """If the format allows it, tensors stay in the file until they are needed."""
    with path.open("rb") as file:
        zipped = file.read(4) == ZIP
        if zipped and path.suffix != ".safetensors":  # newer torch expects another format for this suffix
            value = load(path)
        else:
            file.seek(0)
            value = load(file)
    source = OpenedFile(format="torch" if zipped else "torch (legacy)")
    source.add(value)
    return source


def load(file: Path | IO[bytes]) -> Any:
    """``torch.load`` without running code. Raises only ``Unreadable``, whatever is in the file."""
    try:
        return _load(file)
    except MemoryError:
        raise Unreadable("does not fit into memory. Files of a newer torch.save can be read in parts") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise Unreadable(_why(error)) from None


def _load(file: Path | IO[bytes]) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": isinstance(file, Path)}
    with warnings.catch_warnings(), standins.in_place():
        warnings.simplefilter("ignore")  # about protocols and archives; real problems raise
        try:
            return torch.load(file, **options)
        except Exception as error:
            # torch reads DTensors and nested tensors only after their modules are imported.
            if "must be imported" not in str(error):
                raise
            for module in _ON_DEMAND:
                if f"`{module}`" in str(error):
                    importlib.import_module(module)
            if not isinstance(file, Path):
                file.seek(0)
            return torch.load(file, **options)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    unknown = re.search(r"(?:Unsupported global|unsupported GLOBAL)\W+(?:GLOBAL )?([\w.]+)", text)
    if unknown and (unknown[1] in _CALLS or unknown[1].split(".")[0] in _CALLS):
        return (
            f"calls {unknown[1]} when it is loaded normally, which no checkpoint needs. nanguard did not call it; "
            "do not load this file anywhere"
        )
    if unknown:
        return f"needs {unknown[1]}, and creating one could run any code. {_RESAVE}"
    if "Unsupported operand 149" in text:  # the frames of pickle's protocol 4 and newer
        return "a pickle protocol that torch.load can read only by running code. torch.save uses another by default"
    if "TorchScript" in text:
        return "a TorchScript archive, which is a program. Check the state_dict of its module instead"
    if ".tar format" in text:
        return "written by torch.save before 0.4, as a tar archive. Load it and save it again"
    if isinstance(error, (EOFError, IndexError)) or re.search(
        r"central directory|EOF|end of file|corrupted or truncated", text
    ):
        return _TORN
    if "Weights only load failed" in text or "weights_only" in text:
        detail = text.rsplit("WeightsUnpickler error:", 1)[-1].split("Check the documentation")[0].strip()
        return f"cannot be read without running code, or is damaged ({detail[:160]}): {_RESAVE}"
    return f"damaged, or not written by torch.save ({type(error).__name__}: {text[:160]})"
