"""One-sided traffic of tensors: copies into peers' copies of a segment, and counted signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from pgasdl.buffers import Memory, memory_of
from pgasdl.context import Context
from pgasdl.errors import PeerLostError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.segment import Segment
from pgasdl.torch import streams

STAGING_BYTES = 1 << 20

Finish = Callable[[float | None], None]


class Puts:
    """Copies tensors into peers' copies of ``target``, in order before later flags on queue 0.

    On a GPU the current stream makes the copies, and :meth:`settle` has to come before the flags.
    Where the target is not mapped, tensors outside of segments pass through the last
    ``STAGING_BYTES`` of ``staging``, a segment of this rank.
    """

    def __init__(self, context: Context, target: Segment, staging: Segment) -> None:
        self._context, self._target, self._staging = context, target, staging
        self._lock = threading.Lock()
        device = torch.device(target.device)
        self._enqueued = streams.Enqueued(device) if device.type == "cuda" else None

    def put(self, source: Tensor, peer: int, offset: int, timeout: float | None) -> Finish | None:
        """Copy ``source`` to ``offset`` of ``peer``'s copy.

        Returns a function to call, with a timeout, before ``source`` changes; None: it may at once.
        """
        memory = memory_of(source.detach(), writable=False, device=True)
        if memory.nbytes == 0:
            return None
        if self._target.address_of(peer):
            return self._stored(source.detach(), peer, offset)
        home, begin = self._context.segments.at(memory)
        if home is None:
            self._staged(source, memory, peer, offset, timeout)
            return None
        end = offset + memory.nbytes
        self._context.write(  # of a GPU's memory once the current stream has come so far
            home[begin : begin + memory.nbytes], peer, self._target[offset:end], timeout=timeout
        )
        return self._sent

    def settle(self, timeout: float | None) -> None:
        """Wait until streams have done the puts, and the current one all its work.

        PgasTimeoutError: they have not. UnavailableError: the current stream is captured.
        """
        if self._enqueued is not None:
            self._enqueued.finish(self._context._seconds(timeout))

    def _stored(self, source: Tensor, peer: int, offset: int) -> Finish | None:
        """Copy into memory that is mapped here."""
        enqueued = self._enqueued
        if enqueued is not None:
            streams.require_no_capture(enqueued.device, "a put into memory on a GPU")
        self._target.torch(source.dtype, offset, tuple(source.shape), peer=peer).copy_(source)
        if enqueued is None:  # from a GPU, too, it is there now
            return None
        event = enqueued.note()
        return lambda _: streams.cuda.current(enqueued.device).wait_event(event)

    def _sent(self, timeout: float | None) -> None:
        self._context.wait(timeout=timeout)

    def _staged(
        self, source: Tensor, memory: Memory, peer: int, offset: int, timeout: float | None
    ) -> None:
        deadline = time.monotonic() + self._context._seconds(timeout)
        first = self._staging.nbytes - STAGING_BYTES
        shelf = self._staging.torch(offset=first)
        raw = source.detach().reshape(-1).view(shelf.dtype)
        with self._lock:
            self._sent(_left(deadline))  # an earlier one may have timed out
            for begin in range(0, memory.nbytes, STAGING_BYTES):
                piece = raw[begin : begin + STAGING_BYTES]
                shelf[: len(piece)].copy_(piece)
                at = offset + begin
                self._context.write(
                    self._staging[first : first + len(piece)],
                    peer,
                    self._target[at : at + len(piece)],
                    timeout=_left(deadline),
                )
                self._sent(_left(deadline))


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


_VALUES = 2**32 - 1  # a notification's: 0 is none


class Signals:
    """Lanes of signals: each counts what every member has sent to every other. Collective.

    A signal is a notification whose value is its number, so that one that overwrites another loses
    nothing. It never overtakes an earlier write on queue 0 to the same member. If two threads
    wait for one member's signals on one lane, one may miss them. ``board`` is the segment with the
    notifications; it has ``nbytes`` of memory for other uses.
    """

    def __init__(
        self,
        context: Context,
        group: Group,
        lanes: int,
        nbytes: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.group = group
        self._context = context
        self.board = context.segments.make(
            group, nbytes, lanes * group.size, timeout, workspace=True
        )
        self._sending, self._looking = threading.Lock(), threading.Lock()
        self._sent: dict[tuple[int, int], int] = {}
        self._arrived: dict[tuple[int, int], int] = {}
        self._met: dict[int, int] = {}

    def sent(self, lane: int, member: int) -> int:
        """Return how many signals this rank has sent to ``member``."""
        return self._sent.get((lane, member), 0)

    def send(self, lane: int, member: int, timeout: float | None = None) -> None:
        """Send one signal; QueueFullError, PgasTimeoutError or PeerLostError: none was sent."""
        with self._sending:  # numbers must leave in their order
            number = self.sent(lane, member) + 1
            self._context.notify(
                self.group.ranks[member],
                self.board,
                lane * self.group.size + self.group.rank,
                (number - 1) % _VALUES + 1,
                timeout=timeout,
            )
            self._sent[lane, member] = number

    def answer(self, lane: int, member: int, timeout: float | None = None) -> None:
        """Send to a member that may have left; it then needs no answer."""
        with suppress(PeerLostError):
            self.send(lane, member, timeout)

    def wait(self, lane: int, member: int, number: int, timeout: float | None = None) -> None:
        """Wait until ``member`` has sent ``number`` signals; the caller words a timeout."""
        deadline = time.monotonic() + self.seconds(timeout)
        place = lane * self.group.size + member
        while self._look(lane, member) < number:
            left = max(0.0, deadline - time.monotonic())
            self._context.notify_waitsome(self.board, place, 1, timeout=left)

    def meet(self, lane: int, rounds: int, timeout: float | None = None) -> None:
        """Wait until every member is here as often as this rank; after a timeout it continues.

        After one round, a member's earlier writes to this rank on queue 0 are here; after two, its
        writes to any member are there.
        """
        deadline = time.monotonic() + self.seconds(timeout)
        others = [member for member in range(self.group.size) if member != self.group.rank]
        done = self._met.get(lane, 0)
        for number in range(done + 1, done + rounds + 1):
            for member in others:
                if self.sent(lane, member) < number:
                    self.send(lane, member, max(0.0, deadline - time.monotonic()))
            for member in others:
                try:
                    self.wait(lane, member, number, max(0.0, deadline - time.monotonic()))
                except PgasTimeoutError:
                    raise PgasTimeoutError(f"{self.name(member)} is not there") from None
        self._met[lane] = done + rounds

    def seconds(self, timeout: float | None) -> float:
        """Return a timeout, checked, or the default."""
        return self._context._seconds(timeout)

    def name(self, member: int) -> str:
        """Return what an error calls ``member``."""
        rank = self.group.ranks[member]
        return f"rank {member}" if rank == member else f"rank {member} (rank {rank} of the job)"

    def close(self) -> None:
        """Give up the board: no more signals come. Idempotent."""
        self.board.close()

    def _look(self, lane: int, member: int) -> int:
        """Take the signals that have come; return their number in all."""
        with self._looking:
            value = self._context.notify_reset(self.board, lane * self.group.size + member)
            arrived = self._arrived.get((lane, member), 0)
            if value:
                arrived += (value - arrived) % _VALUES
                self._arrived[lane, member] = arrived
            return arrived
