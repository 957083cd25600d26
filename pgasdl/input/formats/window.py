"""One file of a data set as a file object, which libraries can read."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.input.files import Files

# Returns the bytes at an address: Read(address, nbytes).
Read = Callable[[int, int], bytes | bytearray | memoryview]
# The places of a file's records, by format. Ranks exchange tables, and disks keep them.
Table = dict[str, npt.NDArray[Any]]
Numbers = npt.NDArray[np.int64]
ALL = slice(None)


class Window(io.RawIOBase):
    """A file object over ``read``."""

    def __init__(self, files: Files, number: int, read: Read) -> None:
        self._start, self._nbytes = int(files.starts[number]), files[number].nbytes
        self._read, self._position = read, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; it may lie behind the end, where nothing is read."""
        self._position = offset + (0, self._position, self._nbytes)[whence]
        if self._position < 0:
            raise ValueError(f"position {self._position} of a file")
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as the file goes."""
        nbytes = max(0, min(len(buffer), self._nbytes - self._position))
        if nbytes:
            buffer[:nbytes] = self._read(self._start + self._position, nbytes)
            self._position += nbytes
        return nbytes
