"""The memory in which a rank keeps blocks: its own, a peer's that is mapped, or a remote one."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pgasdl.buffers import Memory, aligned
from pgasdl.errors import (
    ClosedError,
    PeerLostError,
    PgasError,
    PgasTimeoutError,
    QueueFullError,
    SegmentError,
)
from pgasdl.group import Group
from pgasdl.input.shelf import Bytes, Shelf, Words

if TYPE_CHECKING:
    from pgasdl.context import Context

SOON, NOW = 0, 1  # when a block is wanted
_BELL = 0  # the notification after which the owner looks at which blocks are wanted


class Parts:
    """Where the parts of a rank's memory begin.

    First the byte that is written to ask a peer. Then two bytes for each block, which peers set to
    ask for it (soon, now), the entries, a buffer for reads from peers that are not mapped, and the
    slots.
    """

    def __init__(self, n_own: int, n_slots: int, block_bytes: int) -> None:
        self.n_own, self.n_slots, self.block_bytes = n_own, n_slots, block_bytes
        self.wanted = 64
        self.entries = self.wanted + aligned(2 * n_own)
        self.word = self.entries + aligned(8 * n_own)
        self.buffer = self.word + 64
        self.slots = self.buffer + aligned(block_bytes)
        self.nbytes = self.slots + n_slots * block_bytes


class Mapped:
    """A rank's memory that this process loads from."""

    def __init__(self, parts: Parts, memory: Bytes) -> None:
        n = parts.n_own
        self.wanted = memory[parts.wanted : parts.wanted + 2 * n]
        self.entries: Words = memory[parts.entries : parts.entries + 8 * n].view(np.int64)
        slots = memory[parts.slots : parts.slots + parts.n_slots * parts.block_bytes]
        self.slots = slots.reshape(parts.n_slots, parts.block_bytes)

    def entry(self, index: int) -> int:
        """Return a block's entry."""
        return int(self.entries[index])

    def may_lack(self, index: int) -> bool:
        """Whether the block may not be there."""
        return self.entry(index) == 0

    def copy(self, slot: int, offset: int, out: memoryview) -> None:
        """Read a part of a slot."""
        np.copyto(np.frombuffer(out, np.uint8), self.slots[slot, offset : offset + len(out)])


class Remote:
    """A rank's memory that is read by the transport."""

    def __init__(self, service: BlockService, parts: Parts, peer: int) -> None:
        self._service, self._parts, self._peer = service, parts, peer

    def entry(self, index: int) -> int:
        """Return a block's entry."""
        word = memoryview(bytearray(8))
        self._service.read(self._peer, self._parts.entries + 8 * index, self._parts.word, word)
        return int.from_bytes(word, "little", signed=True)

    def may_lack(self, index: int) -> bool:
        """Return True: to ask for the block takes less time than to look for it."""
        return True

    def copy(self, slot: int, offset: int, out: memoryview) -> None:
        """Read a part of a slot."""
        source = self._parts.slots + slot * self._parts.block_bytes + offset
        self._service.read(self._peer, source, self._parts.buffer, out)


class BlockService:
    """A rank's segment: it asks other ranks for blocks, and a thread answers what they ask."""

    def __init__(self, group: Group, segment: Any, parts: Parts) -> None:
        self._context: Context = group.context  # type: ignore[assignment]
        self._ranks, self._parts = group.ranks, parts
        self.segment = segment
        self._queue = self._context.queue_create()  # not the program's
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._reading = False  # something may still write to the buffer
        segment.numpy(np.uint8)[:1] = 1  # what is written to ask
        self._thread: threading.Thread | None = None

    def home(self, rank: int) -> Mapped | Remote:
        """Return a member's memory."""
        peer = self._ranks[rank]
        address = self.segment.address_of(peer)
        if not address:
            return Remote(self, self._parts, peer)
        memory = Memory(address, self._parts.nbytes, np.dtype(np.uint8), (), self.segment)
        return Mapped(self._parts, memory.on_host())

    def begin(self, wanted: Bytes, shelf: Shelf) -> None:
        """Start the thread that looks at which blocks others want."""
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
            except QueueFullError:
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
            except (PgasTimeoutError, PeerLostError, ClosedError):
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
            except PgasTimeoutError:
                continue
            except (ClosedError, SegmentError):
                return
            except PeerLostError:  # what the others want is heard after survivors()
                self._ended.wait(0.1)
            places = np.flatnonzero(wanted.copy()).tolist()  # others write to it
            wanted[places] = 0
            for place in sorted(places, key=lambda each: (-(each % 2), shelf.next_use(each // 2))):
                shelf.want(place // 2, now=place % 2 == NOW)
