"""Guards the other ranks of a program that starts them by running itself again, as Lightning does.

Other Python programs that it starts are not guarded, which the last line of the run mentions.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanguard.autopilot.launch import LaunchedProgram

log = logging.getLogger("nanguard")

_RANK = ("RANK", "LOCAL_RANK")
_STARTERS = re.compile(r"(python[\d.]*|torchrun|accelerate|deepspeed)(\.exe)?")
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Relaunch:
    """While installed, starts a new process that is the same program with another rank under ``nanguard run``.

    Any other command, interpreter or script is started as it is. ``options`` returns the options for ``nanguard run``
    when such a process is started. ``unguarded`` are the scripts of Python programs that were started as they are.
    """

    def __init__(self, program: LaunchedProgram, options: Callable[[], Sequence[str]]) -> None:
        self._program, self._options = program, options
        self.unguarded: dict[str, None] = {}
        self._original: Any = subprocess.Popen.__init__
        subprocess.Popen.__init__ = functools.wraps(self._original)(self._starting())  # type: ignore[method-assign]

    def remove(self) -> None:
        subprocess.Popen.__init__ = self._original  # type: ignore[method-assign]

    def __str__(self) -> str:
        """For the last line of the run; empty if no such program was started."""
        if not self.unguarded:
            return ""
        names = [os.path.basename(path) for path in self.unguarded]
        what = names[0] if len(names) == 1 else f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        return f"; {what} was started as a program of its own, which is NOT GUARDED: start it with nanguard run as well"

    def _starting(self) -> Any:
        original, guarded = self._original, self._guarded

        def start(process: Any, *args: Any, **kwargs: Any) -> None:
            is_plain = not kwargs.get("shell") and kwargs.get("executable") is None
            given = args[0] if args else kwargs.get("args")
            if len(args) == 1 and is_plain:
                args = (guarded(args[0], kwargs.get("env"), kwargs.get("cwd")),)
            elif not args and is_plain and "args" in kwargs:
                kwargs["args"] = guarded(kwargs["args"], kwargs.get("env"), kwargs.get("cwd"))
            if (args[0] if args else kwargs.get("args")) is given:
                self._note(given, kwargs.get("cwd"))
            original(process, *args, **kwargs)

        return start

    def _note(self, command: Any, cwd: Any) -> None:
        """Of a Python program that is started as it is. Scripts of installed packages are none of the user's."""
        try:
            parts = shlex.split(command) if isinstance(command, str) else list(map(os.fsdecode, command))
            if parts and (parts[0] == sys.executable or _STARTERS.fullmatch(os.path.basename(parts[0]))):
                scripts = (os.path.join(cwd or "", part) for part in parts[1:] if part.endswith(".py"))
                script = next(filter(os.path.isfile, scripts), None)
                if script is not None and not os.path.realpath(script).startswith(_LIBRARIES):
                    self.unguarded[script] = None
        except (TypeError, ValueError) as error:  # what is no command raises where the program calls
            log.debug("a command could not be read: %s", error)

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
