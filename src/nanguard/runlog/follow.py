"""Follows a run log that is being written. Only new lines are read."""

from __future__ import annotations

import os
from pathlib import Path

from nanguard.errors import RunLogError
from nanguard.runlog.reader import Tape, log_of

_CHUNK = 1 << 20


class Follower:
    """Follows the log of a run, given by folder or file, which need not exist yet. ``tape`` holds what was read."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._identity = (0, 0)
        self._offset = 0
        self.tape = Tape(self._path)

    @property
    def is_there(self) -> bool:
        """Whether any line has been read."""
        return self.tape.num_read > 0

    def poll(self) -> bool:
        """Reads what is new. True if there was anything.

        A file that was replaced or has become shorter is read from its beginning. Raises ``RunLogError`` if it cannot
        be read or is not a run log.
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
        except FileNotFoundError:  # not yet there, or just being replaced
            return False
        except (OSError, ValueError) as error:
            raise RunLogError(f"{self._path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if self.tape.troubles and not self.is_there:
            raise RunLogError(f"{file} is not a run log that nanguard wrote: {self.tape.troubles[0]}")
        return self._offset != before
