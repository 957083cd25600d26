"""Space that is set aside, so that the end of a job can still be written down on a full disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_BYTES = 256 << 10  # some rows of the database, its log of them and its index


class Reserve:
    """A file that takes up space until that space is needed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def keep(self) -> None:
        """Set the space aside, unless it is, or the disk is full."""
        with contextlib.suppress(OSError):
            if self._file.exists() and self._file.stat().st_size >= _BYTES:
                return
            descriptor = os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)
            except OSError:
                self._file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Free the space; False: it was not there."""
        try:
            self._file.unlink()
        except OSError:
            return False
        return True
