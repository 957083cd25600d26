"""Blocks of a data set in a folder of this machine, which ranks and jobs share."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pgasdl.errors import DataError
from pgasdl.input.block_folder import BlockFile, BlockFolder, Seen, checksums, ending, fill
from pgasdl.input.descriptors import Descriptor, Descriptors
from pgasdl.trust import make_folder, who_else_writes

log = logging.getLogger("pgasdl")

_TOUCHED_EVERY = 60.0  # seconds
_IDLE = 3600.0  # seconds
_BATCH = 64  # blocks, of puts that one look at the folder serves


class DiskCache:
    """Blocks of a data set in a folder, where ranks and jobs share them; threads may share it.

    ``folder`` : made if it is not there; data sets have folders in it. A user who can write there
    decides what is read.
    ``digest`` : the data set's name, ``Files.digest``
    ``limit`` : bytes that all data sets' blocks in the folder may take; None: no limit
    ``next_use`` : when a block is used next, in any unit: the greater, the later; ``math.inf``: not
    again. None: what was not used for the longest time is used last.

    A folder that cannot be written or locked is logged once: then blocks that are there are read,
    and no more are kept. Nothing is read where another user could exchange blocks, and no block
    that a user other than root and this one could have written.

    Where a block would exceed the limit, others are evicted. First blocks of other data sets, the
    longest unused first: those that were not used for an hour; and while this data set has less
    than an equal share of the limit, those that exceed another's share. Then the blocks of this
    data set whose next use is furthest, and further than the new block's. If that does not suffice,
    the new block is not kept: a block does not displace one that is used before it.

    A block is a file, with a checksum of each 64 KiB that each process compares when it first reads
    from there. Whenever a process dies, what it left unfinished is removed by a later one, and the
    folder's count is never too low; every process counts once for itself, too.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        digest: str,
        *,
        limit: int | None = None,
        next_use: Callable[[int], float] | None = None,
    ) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit {limit}: at least 0")
        self._folder = BlockFolder(os.path.abspath(folder), digest)
        self._limit = math.inf if limit is None else limit
        self._next_use = next_use
        self._descriptors = Descriptors(own=True)
        self._seen: dict[int, Seen] = {}
        self._counted = self._failed = self._full = False
        self.stays = False  # blocks of this data set are not evicted for others of it
        # After a put that found no room: the furthest use that is kept, and how long that is true.
        self._furthest, self._refusals = -math.inf, 0
        self._trusted = False
        blocks = Path(self._folder.blocks)
        try:
            make_folder(blocks)
            if blocks.is_symlink():  # to files that are no blocks
                raise PermissionError(f"{blocks} is a link")
            if problem := who_else_writes(blocks):
                raise PermissionError(f"{problem}: give a folder that only you can write to")
            self._trusted = True
        except OSError as error:
            if blocks.parent.exists() and not blocks.parent.is_dir():
                raise
            self._fail(error)
        else:
            with contextlib.suppress(OSError), self._folder.locked(patience=0):
                self._folder.sweep()

    def get(self, block: int, offset: int, out: memoryview) -> bool:
        """Fill ``out`` from a block; False: the block is not there, or has not so many bytes.

        Or it was damaged, or another user's, which is logged, and it is removed.
        """
        if (found := self._found(block)) is None:
            return False
        descriptor, seen = found
        try:
            if offset + out.nbytes > seen.nbytes:
                return False
            if out.nbytes:
                fill(descriptor, seen, offset, out.cast("B"))
            return True
        except (OSError, DataError) as error:
            return self._refuse(self._path(block), error)

    def nbytes(self, block: int) -> int:
        """Return the bytes of a block; 0 where :meth:`get` would be False."""
        found = self._found(block)
        return found[1].nbytes if found else 0

    def put(self, block: int, data: memoryview) -> None:
        """Keep a block, if there is room; where it is already, nothing happens.

        A disk that is full, or fails, is logged once; this cache keeps nothing more then.
        """
        if self._failed or os.path.exists(self._path(block)):
            return
        try:
            self._put(block, data)
        except OSError as error:
            self._fail(error)

    def has(self, block: int) -> bool:
        """Whether a block is there; it may be damaged."""
        return self._trusted and os.path.exists(self._path(block))

    def keeps(self, block: int) -> bool:
        """Whether there may be room for a block; False: :meth:`put` would not keep it now."""
        return not (self._failed or (self.stays and self._full) or self._is_refused(block))

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._descriptors.close()

    def _path(self, block: int) -> str:
        return os.path.join(self._folder.blocks, str(block))

    def _found(self, block: int) -> tuple[Descriptor, Seen] | None:
        """Return a block's file and what is known of it; None: it is not there, or was refused."""
        path = self._path(block)
        try:
            descriptor = self._descriptors.get(path) if self._trusted else None
        except OSError:
            return None
        except DataError as error:
            self._refuse(path, error)
            return None
        try:
            return (descriptor, self._inspect(block, descriptor)) if descriptor else None
        except (OSError, DataError) as error:
            self._refuse(path, error)
            return None

    def _refuse(self, path: str, error: Exception) -> bool:
        log.warning("%s is damaged and is removed: %s", path, error)
        self._remove(path)
        return False

    def _fail(self, error: OSError) -> None:
        self._failed = True
        log.warning("the disk cache in %s keeps no more blocks: %s", self._folder.path, error)

    def _remove(self, path: str) -> bool:
        self._descriptors.forget(path)
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(path)
            except PermissionError:  # another user's
                return False
        return True

    def _inspect(self, block: int, descriptor: Descriptor) -> Seen:
        """Return what is known of a block; note that it is used."""
        seen = self._seen.get(block)
        if seen is None or seen.inode != descriptor.inode:
            nbytes = checksums(descriptor)[0]
            seen = self._seen[block] = Seen(descriptor.inode, nbytes)
        if (now := time.monotonic()) - seen.touched > _TOUCHED_EVERY:
            with contextlib.suppress(OSError):  # another user's
                os.utime(descriptor.number)
            seen.touched = now
        return seen

    def _put(self, block: int, data: memoryview) -> None:
        path = self._path(block)
        end = ending(data)
        nbytes = data.nbytes + len(end)
        with contextlib.ExitStack() as locked:
            lock = locked.enter_context(self._folder.locked())
            if os.path.exists(path):
                return
            if (total := self._room(lock, block, nbytes)) is None:
                self._full = True
                return
            self._folder.write_total(lock, total + nbytes)
            with self._folder.new_file() as (descriptor, unfinished):
                os.ftruncate(descriptor, nbytes)  # what the others count
                locked.close()
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                    file.write(end)
                os.rename(unfinished, path)

    def _room(self, lock: int, block: int, nbytes: int) -> int | None:
        """Return the folder's bytes when there is room for more; None: there is none."""
        total = self._folder.read_total(lock) if self._counted else None
        if total is None:
            total = sum(each.nbytes for each in self._folder.scan())
            self._counted = True
        if total + nbytes <= self._limit:
            return total
        if nbytes > self._limit:
            return None
        if self._is_refused(block):
            return None
        total = self._evict(self._next(block), nbytes)
        self._folder.write_total(lock, total)
        return total if total + nbytes <= self._limit else None

    def _next(self, block: int) -> float:
        if self.stays:
            return sys.float_info.max  # a block that is not used at all may leave for it
        return self._next_use(block) if self._next_use else -math.inf

    def _is_refused(self, block: int) -> bool:
        """Whether there was no room when the folder was last looked at."""
        if not self._refusals or self._next(block) < self._furthest:
            return False
        self._refusals -= 1
        return True

    def _evict(self, use: float, nbytes: int) -> int:
        """Remove blocks until there is room for one with that use, and for some after it."""
        blocks = self._folder.scan()
        total = sum(each.nbytes for each in blocks)
        blocks = [each for each in blocks if not each.is_unfinished]
        room = self._limit - nbytes
        spare = min(self._limit // nbytes // 16, _BATCH) * nbytes
        idle = time.time() - _IDLE
        taken: Counter[str] = Counter({self._folder.blocks: nbytes})
        for each in blocks:
            taken[each.folder] += each.nbytes
        share = self._limit / len(taken)
        owed = taken[self._folder.blocks] <= share
        others = [
            (math.inf, each)
            for each in blocks
            if each.number is None and (each.used < idle or (owed and taken[each.folder] > share))
        ]
        mine = [(self._use(each), each) for each in blocks if each.number is not None]
        others.sort(key=lambda pair: pair[1].used)
        mine.sort(key=lambda pair: -pair[0])
        for at, victim in others + mine if total > room else ():
            if total <= room - spare or (at <= use and total <= self._limit):
                break
            if self._remove(victim.path):
                total -= victim.nbytes
        self._furthest = max((at for at, _ in mine if at <= use), default=-math.inf)
        self._refusals = _BATCH if total > room else 0
        return total

    def _use(self, block: BlockFile) -> float:
        if self._next_use is None or block.number is None:
            return -block.used
        return self._next_use(block.number)
