"""Follows a run log that is being written: each time only what is new is read."""

from __future__ import annotations

import os
from pathlib import Path

from nanguard.errors import RunLogError
from nanguard.runlog.reader import Tape, log_of

_CHUNK = 1 << 20


class Follower:
    """The log of a run, its folder or its file, which need not be there yet. ``tape`` has what was read so far."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._identity = (0, 0)
        self._offset = 0
        self.tape = Tape(self._path)

    @property
    def is_there(self) -> bool:
        """Whether anything of a run was read by now."""
        return self.tape.num_read > 0

    def poll(self) -> bool:
        """Reads what is new; whether there was any.

        A file that is another one by now, or shorter than it was, is read from its beginning. Raises ``RunLogError``
        where it cannot be read, or is no run log.
        """
        file = log_of(self._path)
        try:
            with file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
                    self._identity, self._offset = (status.st_dev, status.st_ino), 0
                    self.tape = Tape(file)
                stream.seek(self._offset)
                before = self._offset
                while chunk := stream.read(_CHUNK):
                    self._offset += len(chunk)
                    self.tape.feed(chunk)
        except FileNotFoundError:  # not yet, or not for the moment
            return False
        except (OSError, ValueError) as error:
            raise RunLogError(f"{self._path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if self.tape.troubles and not self.is_there:
            raise RunLogError(f"{file} is no run log that nanguard wrote: {self.tape.troubles[0]}")
        return self._offset != before
