"""Guards the other ranks of a program that starts them by running itself again, as Lightning does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanguard.autopilot.launch import LaunchedProgram

_RANK = ("RANK", "LOCAL_RANK")


class Relaunch:
    """While installed, starts a new process that is the same program with another rank under ``nanguard run``.

    Any other command, interpreter or script is started as it is. ``options`` returns the options for ``nanguard run``
    when such a process is started.
    """

    def __init__(self, program: LaunchedProgram, options: Callable[[], Sequence[str]]) -> None:
        self._program, self._options = program, options
        self._original: Any = subprocess.Popen.__init__
        subprocess.Popen.__init__ = functools.wraps(self._original)(self._starting())  # type: ignore[method-assign]

    def remove(self) -> None:
        subprocess.Popen.__init__ = self._original  # type: ignore[method-assign]

    def _starting(self) -> Any:
        original, guarded = self._original, self._guarded

        def start(process: Any, *args: Any, **kwargs: Any) -> None:
            is_plain = not kwargs.get("shell") and kwargs.get("executable") is None
            if len(args) == 1 and is_plain:
                args = (guarded(args[0], kwargs.get("env"), kwargs.get("cwd")),)
            elif not args and is_plain and "args" in kwargs:
                kwargs["args"] = guarded(kwargs["args"], kwargs.get("env"), kwargs.get("cwd"))
            original(process, *args, **kwargs)

        return start

    def _guarded(self, command: Any, env: Mapping[str, str] | None, cwd: Any) -> Any:
        """The command to run: unchanged, unless it is this program with another rank."""
        if not isinstance(command, (list, tuple)) or not all(isinstance(part, str) for part in command):
            return command
        if env is None or all(env.get(name) == os.environ.get(name) for name in _RANK):
            return command
        match command:
            case [sys.executable, "-m", module, *args] if module == self._program.module:
                return [sys.executable, "-m", "nanguard", "run", *self._options(), "-m", module, *args]
            case [sys.executable, script, *args] if not self._program.module and self._is_script(script, cwd):
                return [sys.executable, "-m", "nanguard", "run", *self._options(), script, *args]
        return command

    def _is_script(self, path: str, cwd: Any) -> bool:
        try:
            return os.path.samefile(os.path.join(cwd or "", path), self._program.path)
        except OSError:
            return False
