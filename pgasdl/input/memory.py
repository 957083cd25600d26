"""Blocks of a data set in the memories of a job's ranks, where all read them by one-sided reads."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pgasdl.buffers import Memory, aligned
from pgasdl.errors import ClosedError, PeerLost, PgasError, QueueFull, SegmentError, Timeout
from pgasdl.group import Group
from pgasdl.input.shelf import FAILED, Bytes, Shelf, Words, slot_of

if TYPE_CHECKING:
    from pgasdl.context import Context

_LOG = logging.getLogger("pgasdl")
_BELL = 0  # the notification that says: look at what is wanted
_PAUSES = 20e-6, 2e-3  # seconds between two looks, from and to
_LOOKS = 32  # until a block is asked for again
_TRIES = 4  # of reading a block that is given up meanwhile, or was before
_SOON, _NOW = 0, 1


class JobMemory:
    """The first level: blocks in slots of one rank, or of all ranks of a group.

    Block b is kept by rank ``b % size``. That rank alone loads it from the levels below, when
    any rank asks for it by a notified write; all read it from there, and check afterwards that it
    was not given up meanwhile. No rank is asked where a block is, and a read that hits takes
    nobody's time but the reader's.

    Parameters
    ----------
    n_blocks, block_bytes : int
        The data set's.
    nbytes : int
        Of this rank's slots: at least one block.
    load : Callable[[int, memoryview], Any]
        Reads a block from the levels below.
    next_use : Callable[[int], float]
        When a block will be used next; the furthest is given up.
    group : Group, optional
        None: this process alone.
    timeout : float
        Seconds to wait for a rank that loads a block; then it is read from below.

    Notes
    -----
    MiMatrix (3.4): the first of its three levels is the memory of the nodes.
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
        self._parts = parts = _Parts(n_own, n_slots, block_bytes)
        self._seen: dict[int, int] = {}  # each block's entry when it was last read
        self._homes: dict[int, _Mapped | _Remote] = {}
        self._service: _Service | None = None
        if group is None or group.size == 1:
            self._own = _Mapped(parts, np.zeros(parts.nbytes, np.uint8))
        else:
            segment = group.context.segment(parts.nbytes, notifications=1, group=group)  # type: ignore[attr-defined]
            self._own = _Mapped(parts, segment.numpy(np.uint8))
            self._service = _Service(group, segment, parts)
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
                        self._ask(home, index, _SOON)
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
                    self._ask(home, index, _SOON)
            except PgasError:
                continue

    def close(self) -> None:
        """Give up this rank's slots; peers read from below what it had. Idempotent."""
        if self._service is not None:
            self._service.end()
        self.shelf.close()
        if self._service is not None:
            self._service.segment.close()

    def _at(self, home: int) -> _Mapped | _Remote:
        return self._own if home == self._rank else self._homes[home]

    def _ask(self, home: int, index: int, when: int) -> None:
        if home == self._rank:
            self.shelf.want(index, now=when == _NOW)
        else:
            assert self._service is not None
            self._service.ask(home, index, when)

    def _entry(self, home: int, index: int, deadline: float) -> int:
        """Return a block's entry: ask for it, and wait."""
        there, pause = self._at(home), _PAUSES[0]
        for looks in itertools.count():
            if entry := there.entry(index):
                return entry
            if looks % _LOOKS == 0:  # again: it may have come, and been given up since
                self._ask(home, index, _NOW)
            if time.monotonic() > deadline:
                raise Timeout(f"it was not loaded in {self._timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        raise AssertionError


class _Parts:
    """Where the parts of a rank's memory begin.

    Marks are two bytes with which others ask, then come two for each block (soon, now), the
    entries, a buffer for what is read from peers that are not mapped, and the slots.
    """

    def __init__(self, n_own: int, n_slots: int, block_bytes: int) -> None:
        self.n_own, self.n_slots, self.block_bytes = n_own, n_slots, block_bytes
        self.wanted = 64
        self.entries = self.wanted + aligned(2 * n_own)
        self.word = self.entries + aligned(8 * n_own)
        self.buffer = self.word + 64
        self.slots = self.buffer + aligned(block_bytes)
        self.nbytes = self.slots + n_slots * block_bytes


class _Mapped:
    """A rank's memory that this process loads from."""

    def __init__(self, parts: _Parts, memory: Bytes) -> None:
        n = parts.n_own
        self.wanted = memory[parts.wanted : parts.wanted + 2 * n]
        self.entries: Words = memory[parts.entries : parts.entries + 8 * n].view(np.int64)
        slots = memory[parts.slots : parts.slots + parts.n_slots * parts.block_bytes]
        self.slots = slots.reshape(parts.n_slots, parts.block_bytes)

    def entry(self, index: int) -> int:
        return int(self.entries[index])

    def may_lack(self, index: int) -> bool:
        return self.entry(index) == 0

    def copy(self, slot: int, offset: int, out: memoryview) -> None:
        np.copyto(np.frombuffer(out, np.uint8), self.slots[slot, offset : offset + len(out)])


class _Remote:
    """A rank's memory that is read by the transport."""

    def __init__(self, service: _Service, parts: _Parts, peer: int) -> None:
        self._service, self._parts, self._peer = service, parts, peer

    def entry(self, index: int) -> int:
        word = memoryview(bytearray(8))
        self._service.read(self._peer, self._parts.entries + 8 * index, self._parts.word, word)
        return int.from_bytes(word, "little", signed=True)

    def may_lack(self, index: int) -> bool:
        return True  # to ask takes less than to look

    def copy(self, slot: int, offset: int, out: memoryview) -> None:
        source = self._parts.slots + slot * self._parts.block_bytes + offset
        self._service.read(self._peer, source, self._parts.buffer, out)


class _Service:
    """A rank's segment, its own questions to others, and a thread that hears theirs."""

    def __init__(self, group: Group, segment: Any, parts: _Parts) -> None:
        self._context: Context = group.context  # type: ignore[assignment]
        self._ranks, self._parts = group.ranks, parts
        self.segment = segment
        self._queue = self._context.queue_create()  # not the program's
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._reading = False  # something may still write to the buffer
        segment.numpy(np.uint8)[:1] = 1  # what is written to ask
        self._thread: threading.Thread | None = None

    def home(self, rank: int) -> _Mapped | _Remote:
        """Return a member's memory."""
        peer = self._ranks[rank]
        address = self.segment.address_of(peer)
        if not address:
            return _Remote(self, self._parts, peer)
        memory = Memory(address, self._parts.nbytes, np.dtype(np.uint8), (), self.segment)
        return _Mapped(self._parts, memory.on_host())

    def begin(self, wanted: Bytes, shelf: Shelf) -> None:
        """Hear what others want."""
        self._thread = threading.Thread(
            target=self._hear, args=(wanted, shelf), name="pgasdl-input-home", daemon=True
        )
        self._thread.start()

    def ask(self, rank: int, index: int, when: int) -> None:
        """Ask a member for a block."""
        segment, peer = self.segment, self._ranks[rank]
        place = self._parts.wanted + 2 * index + when
        question = segment[:1], peer, segment[place : place + 1], _BELL
        with self._lock:
            try:
                self._context.write_notify(*question, queue=self._queue)
            except QueueFull:
                self._context.wait(self._queue)
                self._context.write_notify(*question, queue=self._queue)

    def read(self, peer: int, source: int, by: int, out: memoryview) -> None:
        """Read some bytes of a peer, by way of a buffer of this rank."""
        segment, n = self.segment, len(out)
        with self._lock:
            if self._reading:
                self._finish(0.0)
            self._reading = True
            self._context.read(
                segment[by : by + n], peer, segment[source : source + n], queue=self._queue
            )
            self._finish()
            out[:] = segment.numpy(np.uint8)[by : by + n].data

    def _finish(self, timeout: float | None = None) -> None:
        """Wait for what is under way; raise why a part of it has failed once all of it has ended.

        Time-outs and losses are raised at once: then the rest is still under way.
        """
        failed: PgasError | None = None
        while True:
            try:
                self._context.wait(self._queue, timeout=timeout)
                break
            except (Timeout, PeerLost, ClosedError):
                raise
            except PgasError as error:  # once for each rank that refused something
                failed = error
        self._reading = False
        if failed is not None:
            raise failed

    def end(self) -> None:
        """End the thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if not self._context.closed:
            with suppress(PgasError):
                self._finish()
            with suppress(PgasError):
                self._context.queue_delete(self._queue)

    def _hear(self, wanted: Bytes, shelf: Shelf) -> None:
        context, segment = self._context, self.segment
        while not self._ended.is_set():
            try:
                context.notify_waitsome(segment, _BELL, 1, timeout=0.2)
                context.notify_reset(segment, _BELL)
            except Timeout:
                continue
            except (ClosedError, SegmentError):
                return
            except PeerLost:  # what the others want is heard after survivors()
                self._ended.wait(0.1)
            places = np.flatnonzero(wanted.copy()).tolist()  # others write to it
            wanted[places] = 0
            for place in sorted(places, key=lambda each: (-(each % 2), shelf.next_use(each // 2))):
                shelf.want(place // 2, now=place % 2 == _NOW)
