"""Warnings of torch calls that pass through the tape: Python takes our frame for the line that caused them."""

from __future__ import annotations

import functools
import sys
import warnings
from types import CodeType, FrameType
from typing import Any

from nanguard import _compat_modes
from nanguard.step.tape_functions import Listening


class WarnedLines(Listening):
    """They are shown with the line of the program, once for each of its lines, as without us.

    ``passes`` is the code that torch calls pass through.
    """

    def __init__(self, passes: CodeType) -> None:
        self._passes = passes
        self._hook: Any = None
        self._original: Any = None

    def begin(self) -> bool:
        if self._hook is None:
            self._original = warnings.showwarning
            self._hook = warnings.showwarning = functools.partial(self._show, self._original)
        return True

    def end(self) -> None:
        if self._hook is not None:
            if warnings.showwarning is self._hook:  # else the program has its own by now
                warnings.showwarning = self._original
            self._hook = None

    def _show(self, original: Any, message: Any, category: Any, filename: str, lineno: int, *args: Any) -> None:
        frame = self._line_of_program() if filename == self._passes.co_filename else None
        if frame is None:
            original(message, category, filename, lineno, *args)
            return
        names = frame.f_globals
        shown = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, names["__name__"], shown)

    def _line_of_program(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._passes:
            frame = frame.f_back
        if frame is None:
            return None
        frame.f_globals.pop("__warningregistry__", None)  # what is shown of one line must be shown of the next one too
        above = frame.f_back
        if above is not None and above.f_code in _compat_modes.HANDLERS_OF_FUNCTIONAL and above.f_back is not None:
            above = above.f_back.f_back  # the function that asked the modes is called by the program
        return above
