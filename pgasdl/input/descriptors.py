"""Files that are open for reading: the most recently used ones."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict

from pgasdl.errors import DataError
from pgasdl.trust import who_else_wrote


class Descriptor:
    """A regular file that is open until nothing refers to it: threads may read it meanwhile."""

    number = -1

    def __init__(self, path: str, own: bool = False) -> None:
        # A pipe's open does not wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        self.number = os.open(path, flags | os.O_NOFOLLOW if own else flags)
        status = os.fstat(self.number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no file", path)
        if own and (problem := who_else_wrote(path, status)):
            raise DataError(problem)
        self.inode = status.st_ino

    @property
    def nbytes(self) -> int:
        """The file's size now."""
        return os.fstat(self.number).st_size

    def fill(self, offset: int, out: memoryview) -> bool:
        """Read until ``out`` is full; False: the file ended before."""
        while len(out) > (n_read := os.preadv(self.number, [out], offset)):
            if n_read == 0:
                return False
            offset += n_read
            out = out[n_read:]
        return True

    def announce(self, offset: int, nbytes: int) -> None:
        """Let the kernel read a range ahead."""
        os.posix_fadvise(self.number, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class Descriptors:
    """The most recently used open files; threads share it.

    With ``own``, those that another user could have written raise DataError, and links OSError.
    """

    def __init__(self, most: int = 64, *, own: bool = False) -> None:
        self._most, self._own = most, own
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> Descriptor:
        """Return a file that is open, or open it; OSError: it cannot be opened, or is no file."""
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        opened = Descriptor(path, self._own)
        with self._lock:
            self._open[path] = opened
            self._open.move_to_end(path)
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return opened

    def forget(self, path: str) -> None:
        """Close a file when its readers are done; the next one opens it again."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Close all when their readers are done."""
        with self._lock:
            self._open.clear()
