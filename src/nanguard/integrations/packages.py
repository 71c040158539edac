"""Packages that are optional: imported only if they are asked for, with a clear message if they are not there."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
from types import ModuleType

log = logging.getLogger("nanguard")


def require(module: str, *, tested: tuple[str, str], extra: str, package: str = "") -> ModuleType:
    """Imports ``module``. ``tested`` is the range of versions that is tested: from the first, up to before the second.

    ``package`` is its name on PyPI if that is another one, ``extra`` the extra of nanguard that installs it.
    """
    name = package or module
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"nanguard needs {name} for this, and it is not installed: pip install 'nanguard[{extra}]'", name=module
        ) from None
    _warn_outside(name, str(getattr(found, "__version__", "") or _installed_version(name)), tested)
    return found


@functools.cache  # once
def _warn_outside(name: str, version: str, tested: tuple[str, str]) -> None:
    first, end = tested
    if version and not _numbers(first) <= _numbers(version) < _numbers(end):
        log.warning("%s %s is outside the versions that nanguard is tested with (%s to %s)", name, version, first, end)


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
