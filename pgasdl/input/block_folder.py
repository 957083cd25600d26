"""The folder of a disk cache: its lock, its count, and which files are whose."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pgasdl.trust import open_plain

_DIGEST = re.compile("[0-9a-f]{32}")  # only blocks are ever removed from a user's folder
_UNFINISHED = "unfinished-"
_LOCKED_FOR = 10.0  # seconds that another process may hold the lock


@dataclass(frozen=True, slots=True)
class Block:
    """A file in the folder; ``number`` is that of a block of this data set."""

    path: str
    nbytes: int
    used: float
    number: int | None = None
    is_unfinished: bool = False

    @property
    def folder(self) -> str:
        """Its data set's."""
        return os.path.dirname(self.path)


class BlockFolder:
    """Where several data sets have blocks, each in its own folder, and unfinished files lie.

    The file ``lock`` is locked while blocks leave or space is taken, and has the bytes in the
    folder: never too few, whenever a process dies. A block is written as another file of its final
    size, which is renamed in the end. A writer holds a lock of that file, so other processes know
    files of dead ones. Other users can neither write to these files nor hold the lock.

    ``digest``, 32 hexadecimal digits, is the data set whose blocks have numbers here.
    """

    def __init__(self, path: str, digest: str) -> None:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"digest {digest!r}: 32 hexadecimal digits, as Files.digest has")
        self.path = path
        self.blocks = os.path.join(path, digest)

    @contextlib.contextmanager
    def locked(self, patience: float | None = None) -> Iterator[int]:
        """Lock the folder, and give the file that has its bytes."""
        path = os.path.join(self.path, "lock")
        patience = _LOCKED_FOR if patience is None else patience
        lock = open_plain(path, os.O_RDWR)
        try:
            status = os.fstat(lock)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it is no file of this user", path)
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.fchmod(lock, 0o600)  # a user who can open it can hold it
            deadline = time.monotonic() + patience
            while not _flocked(lock):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has locked {path} for {patience:g} s")
                time.sleep(0.001)
            try:
                yield lock
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a forked process has it
        finally:
            os.close(lock)

    @staticmethod
    def read_total(lock: int) -> int | None:
        """Return the bytes of all blocks, or more, as the file of the lock has them."""
        text = os.pread(lock, 32, 0)
        return int(text) if text.strip().isdigit() else None

    @staticmethod
    def write_total(lock: int, total: int) -> None:
        """Note the bytes of all blocks."""
        os.pwrite(lock, b"%020d" % total, 0)

    def scan(self) -> list[Block]:
        """Return what lies in the folder; the folder is locked."""
        # First what is being written: it may become a block meanwhile, and is counted twice then.
        found = self.sweep()
        for folder in _entries(self.path):
            if _DIGEST.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for file in filter(lambda file: file.name.isdecimal(), _entries(folder.path)):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        number = int(file.name) if folder.path == self.blocks else None
                        found.append(Block(file.path, status.st_size, status.st_mtime, number))
        return found

    def sweep(self) -> list[Block]:
        """Remove the unfinished files of dead processes, and return the others."""
        found = []
        for file in _entries(self.path):
            if file.name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):
                    if _is_dead(file.path):
                        os.unlink(file.path)
                    else:
                        found.append(
                            Block(file.path, file.stat().st_size, math.inf, is_unfinished=True)
                        )
        return found

    @contextlib.contextmanager
    def new_file(self) -> Iterator[tuple[int, str]]:
        """Make a file, locked while it is open, which is gone in the end unless it is renamed."""
        path = os.path.join(self.path, _UNFINISHED + secrets.token_hex(8))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _flocked(descriptor)
            yield descriptor, path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(descriptor)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        return list(entries)
    return []  # another user's


def _is_dead(path: str) -> bool:
    """Whether the writer of an unfinished file is gone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _flocked(descriptor)
    finally:
        os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
