"""Blocks of a data set in one rank's memory: loaded on request, evicted by next use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.input.threads import Threads

_LOADERS = 4  # loads at a time
FAILED = -1
_SLOT_BITS = 24

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def slot_of(entry: int) -> int:
    """Return the slot that an entry names."""
    return entry & ((1 << _SLOT_BITS) - 1)


class Shelf:
    """Slots of one block each, and a table of entries that says what is where.

    An entry is 0 for a block that is not here, FAILED for one that could not be loaded, else the
    number of its slot with a count that no earlier use of the slot had. So a reader that reads the
    entry, the bytes, and the same entry again has read one block's bytes.

    ``entries`` has one for each block, all 0 at first. ``load`` reads a block into memory.
    ``next_use`` says when a block will be used next, by this rank or others; inf: not known.
    """

    def __init__(
        self,
        entries: Words,
        slots: Bytes,
        load: Callable[[int, memoryview], Any],
        next_use: Callable[[int], float],
    ) -> None:
        self.entries, self.slots = entries, slots
        self._load, self.next_use = load, next_use
        self._closed = self.stays = False  # stays: no block is evicted for another
        self._lock = threading.Lock()
        self._free = list(range(len(slots)))[::-1]
        self._loading: set[int] = set()
        self._waiting: dict[int, None] = {}  # wanted now, and no slot is free
        self._held: dict[int, int] = {}  # block: its slot, the oldest first
        self._count = 0
        self._threads = Threads(min(_LOADERS, len(slots)), "pgasdl-input")

    def want(self, block: int, *, now: bool) -> None:
        """Begin to load a block, unless it is here.

        A block that is not wanted ``now`` takes no slot from one that is used sooner.
        """
        with self._lock:
            if block in self._held or block in self._loading:
                return
            self.entries[block] = 0
            slot = self._slot_for(block, now)
            if slot is not None:
                self._begin(block, slot)
            elif self.stays:
                self.entries[block] = FAILED
            elif now:
                self._waiting[block] = None

    def close(self) -> None:
        """Wait for loads that have begun; begin no other. Idempotent."""
        with self._lock:
            self._closed = self.stays = True  # so what is wanted now has failed
            self._waiting.clear()
        self._threads.join()

    def _slot_for(self, block: int, now: bool) -> int | None:
        if self._free and not self._closed:
            return self._free.pop()
        if self.stays or not self._held:
            return None
        last = max(self._held, key=self.next_use)
        if not now and self.next_use(last) <= self.next_use(block):
            return None
        self.entries[last] = 0  # before its bytes change
        return self._held.pop(last)

    def _begin(self, block: int, slot: int) -> None:
        self._loading.add(block)
        self._threads.submit(self._run, block, slot)

    def _run(self, block: int, slot: int) -> None:
        entry = FAILED
        with suppress(Exception):  # a reader reads from below, and gets the error there
            if not self._closed:
                self._load(block, memoryview(self.slots[slot]))
                entry = slot
        with self._lock:
            self._loading.discard(block)
            if entry == FAILED:
                self.entries[block] = FAILED
                self._free.append(slot)
            else:
                self._count += 1
                self.entries[block] = self._count << _SLOT_BITS | slot
                self._held[block] = slot
            while self._waiting:
                wanted = next(iter(self._waiting))
                place = self._slot_for(wanted, True)
                if place is None and not self.stays:
                    return
                del self._waiting[wanted]
                if place is None:
                    self.entries[wanted] = FAILED
                else:
                    self._begin(wanted, place)
