"""Blocks of a data set in the memories of a job's ranks, where all read them by one-sided reads."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pgasdl.errors import PgasError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.input.homes import NOW, SOON, BlockService, Mapped, Parts, Remote
from pgasdl.input.shelf import FAILED, Shelf, slot_of

_LOG = logging.getLogger("pgasdl")
_PAUSES = 20e-6, 2e-3  # seconds between two looks, from and to
_LOOKS = 32  # until a block is asked for again
_TRIES = 4  # reads of a block that was evicted before or during the read


class JobMemory:
    """The first level: blocks in slots of one rank, or of all ranks of a group.

    Block b is kept by rank ``b % size``. That rank alone loads it from the levels below, when any
    rank asks for it by a notified write; all read it from there, and check afterwards that it was
    not evicted meanwhile. No rank is asked where a block is, and a read that hits takes time of the
    reader only. MiMatrix (2.1): the first of its three levels is the memory of the nodes.

    ``nbytes`` : of this rank's slots, at least one block
    ``load`` : reads a block from the levels below
    ``next_use`` : when a block will be used next; the furthest is evicted
    ``timeout`` : seconds to wait for a rank that loads a block; then it is read from below
    """

    def __init__(
        self,
        n_blocks: int,
        block_bytes: int,
        nbytes: int,
        *,
        load: Callable[[int, memoryview], Any],
        next_use: Callable[[int], float],
        group: Group | None,
        timeout: float,
    ) -> None:
        self._rank, self._size = (group.rank, group.size) if group else (0, 1)
        self._timeout = timeout
        n_own = -(-n_blocks // self._size)
        n_slots = min(max(nbytes // block_bytes, 1), max(n_own, 1))
        self.n_slots = n_slots * self._size  # of all ranks
        self._parts = parts = Parts(n_own, n_slots, block_bytes)
        self._seen: dict[int, int] = {}  # each block's entry when it was last read
        self._homes: dict[int, Mapped | Remote] = {}
        self._service: BlockService | None = None
        if group is None or group.size == 1:
            self._own = Mapped(parts, np.zeros(parts.nbytes, np.uint8))
        else:
            segment = group.context.segment(parts.nbytes, notifications=1, group=group)  # type: ignore[attr-defined]
            self._own = Mapped(parts, segment.numpy(np.uint8))
            self._service = BlockService(group, segment, parts)
            for rank in range(group.size):
                self._homes[rank] = self._service.home(rank)
        size, own = self._size, self._rank
        self.shelf = Shelf(
            self._own.entries,
            self._own.slots,
            lambda index, out: load(index * size + own, out),
            lambda index: next_use(index * size + own),
        )
        if self._service is not None:
            self._service.begin(self._own.wanted, self.shelf)

    def read(self, block: int, offset: int, out: memoryview, wait: bool = True) -> int | None:
        """Read a part of a block; return the rank that had it. None: read it from below.

        A block that no rank has is loaded, and waited for; without ``wait`` the answer is None.
        """
        home, index = block % self._size, block // self._size
        deadline = time.monotonic() + self._timeout
        try:
            there, entry = self._at(home), self._seen.get(block, 0)
            for _ in range(_TRIES):
                if not entry:
                    entry = self._entry(home, index, deadline) if wait else there.entry(index)
                if not entry:
                    return None
                if entry == FAILED:
                    if not self.shelf.stays:  # it may do better the next time
                        self._ask(home, index, SOON)
                    return None
                there.copy(slot_of(entry), offset, out)
                now = there.entry(index)
                if now == entry:
                    self._seen[block] = entry
                    return home
                entry = now
        except PgasError as error:  # it is lost, stopped, or has closed
            _LOG.info("input: rank %d does not give block %d: %s", home, block, error)
        return None

    def want(self, blocks: Iterable[int]) -> None:
        """Say that blocks will be read soon."""
        for block in blocks:
            home, index = block % self._size, block // self._size
            try:
                if self._at(home).may_lack(index):
                    self._ask(home, index, SOON)
            except PgasError:
                continue

    def close(self) -> None:
        """Free this rank's slots; peers read its blocks from below. Idempotent."""
        if self._service is not None:
            self._service.end()
        self.shelf.close()
        if self._service is not None:
            self._service.segment.close()

    def _at(self, home: int) -> Mapped | Remote:
        return self._own if home == self._rank else self._homes[home]

    def _ask(self, home: int, index: int, when: int) -> None:
        if home == self._rank:
            self.shelf.want(index, now=when == NOW)
        else:
            assert self._service is not None
            self._service.ask(home, index, when)

    def _entry(self, home: int, index: int, deadline: float) -> int:
        """Return a block's entry: ask for it, and wait."""
        there, pause = self._at(home), _PAUSES[0]
        for looks in itertools.count():
            if entry := there.entry(index):
                return entry
            if looks % _LOOKS == 0:  # again: it may have been loaded and evicted since
                self._ask(home, index, NOW)
            if time.monotonic() > deadline:
                raise PgasTimeoutError(f"it was not loaded in {self._timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        raise AssertionError
