"""A function mode of torch that can be turned on and off at any point, whatever modes the program has entered since."""

from __future__ import annotations

import threading

from torch.overrides import TorchFunctionMode

from nanguard import _compat_modes

_get_ident = threading.get_ident
_num_modes, _push, _pop = (
    _compat_modes.num_function_modes,
    _compat_modes.push_function_mode,
    _compat_modes.pop_function_mode,
)


class _Active:
    """The mode of the process that has begun, if there is one.

    It changes at each step. As a class attribute it would make CPython drop what it has cached about the class.
    """

    __slots__ = ("mode",)

    def __init__(self) -> None:
        self.mode: SwitchedMode | None = None


class SwitchedMode(TorchFunctionMode):
    """Belongs to one thread at a time. ``is_begun`` is set by subclasses, and says that it may be paused and go on.

    ``is_on``: torch tells of its calls now. While it handles one (``_is_inside``) torch holds it aside, and it cannot
    be turned off.
    """

    active = _Active()

    def __init__(self) -> None:
        super().__init__()
        self.is_begun = self.is_on = self._is_inside = False
        self._thread = 0

    def stop(self) -> None:
        """Turns it off until it begins again."""
        raise NotImplementedError

    def is_own(self) -> bool:
        """Whether this is its thread."""
        return self._thread == _get_ident()

    def may_call(self) -> bool:
        """Whether a call made now would be told of."""
        return self.is_on and not self._is_inside and self._thread == _get_ident()

    def pause(self) -> bool:
        """Until ``go_on``. Returns what that is to be given."""
        if not self.is_on or self._is_inside or self._thread != _get_ident():
            return False
        self.is_on = False
        top = _pop() if _num_modes() else self
        if top is not self:
            self._leave_below(top)
        return True

    def go_on(self, was_on: bool) -> None:
        if was_on and self.is_begun and not self.is_on:
            self.is_on = True
            if _num_modes():
                _compat_modes.enter_function_mode(self)
            else:
                _push(self)

    def _leave_below(self, top: TorchFunctionMode) -> None:
        """``top`` is a mode that the program has entered since, and was taken off."""
        _push(top)
        _compat_modes.leave_function_mode(self)
