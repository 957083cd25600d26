"""The folder of a disk cache: its lock, its count, which files are whose; and a block's file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from pgasdl.errors import DataError
from pgasdl.input.descriptors import Descriptor
from pgasdl.trust import open_plain

_DIGEST = re.compile("[0-9a-f]{32}")  # only blocks are ever removed from a user's folder
_UNFINISHED = "unfinished-"
_LOCKED_FOR = 10.0  # seconds that another process may hold the lock


@dataclass(frozen=True, slots=True)
class BlockFile:
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

    def scan(self) -> list[BlockFile]:
        """Return what lies in the folder; the folder is locked."""
        # First what is being written: it may become a block meanwhile, and is counted twice then.
        found = self.sweep()
        for folder in _entries(self.path):
            if _DIGEST.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for file in filter(lambda file: file.name.isdecimal(), _entries(folder.path)):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        number = int(file.name) if folder.path == self.blocks else None
                        found.append(BlockFile(file.path, status.st_size, status.st_mtime, number))
        return found

    def sweep(self) -> list[BlockFile]:
        """Remove the unfinished files of dead processes, and return the others."""
        found = []
        for file in _entries(self.path):
            if file.name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):
                    if _is_dead(file.path):
                        os.unlink(file.path)
                    else:
                        found.append(
                            BlockFile(file.path, file.stat().st_size, math.inf, is_unfinished=True)
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


_CHUNK = 64 << 10  # bytes that have a checksum
_TRAILER = struct.Struct("<4sIQ")  # a name, the CRC-32 of the checksums, the block's bytes
_NAME = b"pgb2"


def ending(data: memoryview) -> bytes:
    """Return the bytes that follow a block in its file."""
    crcs = [zlib.crc32(data[at : at + _CHUNK]) for at in range(0, data.nbytes, _CHUNK)]
    table = struct.pack(f"<{len(crcs)}I", *crcs)
    return table + _TRAILER.pack(_NAME, zlib.crc32(table), data.nbytes)


@dataclass(slots=True)
class Seen:
    """A block that was read: its file, its bytes, the time of the touch, and its sound chunks."""

    inode: int
    nbytes: int
    touched: float = -math.inf
    sound: int = 0  # a bit for each


def checksums(descriptor: Descriptor) -> tuple[int, tuple[int, ...]]:
    """Return a block's bytes and the checksums of its chunks; DataError: its end is none."""
    end = descriptor.nbytes - _TRAILER.size
    trailer = memoryview(bytearray(_TRAILER.size))
    if end < 0 or not descriptor.fill(end, trailer):
        raise DataError(f"it has {end + _TRAILER.size} bytes")
    name, crc, nbytes = _TRAILER.unpack(trailer)
    count = -(-nbytes // _CHUNK)
    if name != _NAME or nbytes + 4 * count != end:
        raise DataError("it has no end")
    table = memoryview(bytearray(4 * count))
    if (count and not descriptor.fill(nbytes, table)) or zlib.crc32(table) != crc:
        raise DataError("it does not have the checksums that were written")
    return nbytes, struct.unpack(f"<{count}I", table)


def fill(descriptor: Descriptor, seen: Seen, offset: int, out: memoryview) -> None:
    """Read a part of a block, and compare chunks that were not read before."""
    first, last = offset // _CHUNK, (offset + len(out) - 1) // _CHUNK
    wanted = (1 << last + 1) - (1 << first)
    whole, begin = out, offset
    if unknown := wanted & ~seen.sound:
        begin, end = first * _CHUNK, min((last + 1) * _CHUNK, seen.nbytes)
        if end - begin > len(out):
            whole = memoryview(bytearray(end - begin))
    if not descriptor.fill(begin, whole):
        raise DataError("it ends too early")
    if unknown:
        crcs = checksums(descriptor)[1][first : last + 1]
        for at, crc in zip(range(0, len(whole), _CHUNK), crcs, strict=True):
            if zlib.crc32(whole[at : at + _CHUNK]) != crc:
                raise DataError("it does not have the bytes that were written")
        seen.sound |= wanted
    if whole is not out:
        out[:] = whole[offset - begin :][: len(out)]
