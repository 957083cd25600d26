"""The way of a data set's bytes: from the job's memory, the local disk, or storage."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pgasdl.group import Group
from pgasdl.input.disk import DiskCache
from pgasdl.input.files import Files
from pgasdl.input.memory import JobMemory
from pgasdl.input.nearby import merged
from pgasdl.input.next_use import NextUse
from pgasdl.input.shelf import Shelf
from pgasdl.input.storage import Storage

log = logging.getLogger("pgasdl")

BLOCK = 4 << 20  # bytes
# The first number of an index: a new one for each layout, behind all formats of the one before.
_LAYOUT = 16


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Bytes that this rank has read, by where they came from.

    ``storage`` and ``disk`` are mostly whole blocks, for this rank and others; ``memory`` and
    ``peers`` are bytes of records, from this rank's slots and from others'.
    """

    storage: int = 0
    disk: int = 0
    memory: int = 0
    peers: int = 0


class Levels:
    """Read a data set's bytes from the nearest level that has them.

    ``local`` is the folder of the disk's level, which holds ``limit`` bytes. ``memory`` is bytes of
    this rank's share of the memory, which the ranks of ``group`` share; 0: there is none.
    ``timeout`` is seconds to wait for another rank.
    """

    def __init__(
        self,
        files: Files,
        storage: Storage,
        *,
        local: str | os.PathLike[str] | None,
        limit: int | None,
        memory: int,
        group: Group | None,
        timeout: float,
    ) -> None:
        self.files = files
        self._read: Counter[str] = Counter()
        self._next_use: NextUse | None = None
        self._storage, self._limit = storage, limit
        self._lock = threading.Lock()
        self._process = os.getpid()  # a fork has no threads that load
        self._disk = None
        self._rank = group.rank if group else 0
        if local is not None:
            self._disk = DiskCache(local, files.digest, limit=limit, next_use=self._when)
            self._disk.stays = True  # until the order is known
        self._memory = None
        if memory:
            self._memory = JobMemory(
                self.n_blocks,
                BLOCK,
                memory,
                load=self.load,
                next_use=self._when,
                group=group,
                timeout=timeout,
            )

    def counters(self) -> BytesRead:
        """Return the bytes that this rank has read so far."""
        with self._lock:
            return BytesRead(**self._read)

    @property
    def n_blocks(self) -> int:
        """Blocks of the data set; the last may be shorter."""
        return -(-self.files.nbytes // BLOCK)

    def read(self, address: int, nbytes: int) -> bytearray:
        """Return some bytes of the data set."""
        out = bytearray(nbytes)
        self.fill(address, memoryview(out))
        return out

    def fill(self, address: int, out: memoryview) -> None:
        """Read the bytes from an address on."""
        while out:
            block, offset = divmod(address, BLOCK)
            part = out[: BLOCK - offset]
            self._fill(block, offset, part)
            address += len(part)
            out = out[len(part) :]

    def follow(self, order: NextUse) -> None:
        """Keep blocks by the order of their use.

        A level that does not hold the blocks whose records are mixed would load a block for each
        record. So it keeps the blocks it has, and the other records are read alone.
        """
        self._next_use = order
        levels: list[tuple[str, Shelf | DiskCache, int]] = []
        if self._memory is not None:
            levels.append(("memory", self._memory.shelf, self._memory.n_slots))
        if self._disk is not None and self._limit is not None:
            levels.append(("local", self._disk, self._limit // BLOCK))
        for name, level, room in levels:
            level.stays = room < self.n_blocks and (mixed := order.mixed()) >= room
            if level.stays and self._rank == 0:
                log.warning(
                    "input: %s holds %d of the %d blocks of 4 MiB whose records are mixed, and "
                    "the others' records are read one by one: give it more room, or Loader(mix=%d)",
                    *(name, room, math.ceil(mixed), max(room // 2, 1)),
                )

    def announce(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say that ranges, by address and length, will be read soon."""
        if self._memory is None:
            if self._disk is None:
                for part in (part for each in merged(ranges) for part in self.files.parts(*each)):
                    self._storage.announce(self.files[part[0]], *part[1:])
        elif os.getpid() == self._process:
            spans = (range(at // BLOCK, -(-(at + n) // BLOCK)) for at, n in ranges)
            blocks = dict.fromkeys(block for span in spans for block in span)
            self._memory.want(block for block in blocks if not self._on_disk(block))

    def load(self, block: int, out: memoryview) -> None:
        """Read a whole block from the levels below the memory; the disk keeps it."""
        out = out[: self.length(block)]
        if self._disk is not None and self._disk.get(block, 0, out):
            self._count("disk", len(out))
            return
        self._from_storage(block * BLOCK, out)
        if self._disk is not None:
            parts = self.files.parts(block * BLOCK, len(out))
            if not any(self._storage.is_another(self.files[number]) for number, _, _ in parts):
                self._disk.put(block, out)

    def stage(self, block: int) -> None:
        """Bring a block to the disk."""
        if self._disk is None:
            raise ValueError("there is no folder to stage to: pass local")
        self.load(block, memoryview(bytearray(self.length(block))))

    def staged(self, blocks: Iterable[int]) -> int:
        """Return how many bytes of some blocks are on the disk."""
        byte = memoryview(bytearray(1))
        disk = self._disk
        return sum(self.length(block) for block in blocks if disk and disk.get(block, 0, byte))

    def index(self, format: int) -> bytes:
        """Return the index of this data set, read in a format, that the disk keeps; b"": none.

        It is kept behind the blocks, and is evicted after them.
        """
        block = self._index_block(format)
        nbytes = 0 if self._disk is None else self._disk.nbytes(block)
        blob = bytearray(nbytes)
        there = self._disk is not None and nbytes and self._disk.get(block, 0, memoryview(blob))
        return bytes(blob) if there else b""

    def keep_index(self, format: int, blob: bytes) -> None:
        """Let the disk keep an index, if there is room."""
        if self._disk is not None:
            self._disk.put(self._index_block(format), memoryview(blob))

    def _index_block(self, format: int) -> int:
        return self.n_blocks + _LAYOUT + format

    def length(self, block: int) -> int:
        """Return the bytes of a block."""
        return min(BLOCK, self.files.nbytes - block * BLOCK)

    def close(self) -> None:
        """Close all levels. Idempotent."""
        self._storage.close()  # first: loads that try again and again end
        if self._memory is not None:
            self._memory.close()
        if self._disk is not None:
            self._disk.close()

    def _fill(self, block: int, offset: int, out: memoryview) -> None:
        if self._memory is not None and os.getpid() == self._process:
            owner = self._memory.read(block, offset, out, wait=not self._on_disk(block))
            if owner is not None:
                self._count("memory" if owner == self._rank else "peers", len(out))
                return
        if self._disk is not None:
            if self._disk.get(block, offset, out):
                self._count("disk", len(out))
                return
            if self._disk.keeps(block):
                whole = memoryview(bytearray(self.length(block)))
                self.load(block, whole)
                out[:] = whole[offset : offset + len(out)]
                return
        self._from_storage(block * BLOCK + offset, out)

    def _on_disk(self, block: int) -> bool:
        """Whether this machine's disk has a block: it is read from there, if memory has it not."""
        return self._disk is not None and self._disk.has(block)

    def _from_storage(self, address: int, out: memoryview) -> None:
        done = 0
        for number, offset, length in self.files.parts(address, len(out)):
            self._storage.fill(self.files[number], offset, out[done : done + length])
            done += length
        self._count("storage", len(out))

    def _count(self, level: str, nbytes: int) -> None:
        with self._lock:
            self._read[level] += nbytes

    def _when(self, block: int) -> float:
        if block >= self.n_blocks:  # an index
            return -math.inf
        return 0.0 if self._next_use is None else self._next_use(block)
