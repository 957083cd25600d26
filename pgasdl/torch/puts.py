"""Copy tensors into peers' copies of a segment."""

from __future__ import annotations

import threading
import time

from torch import Tensor

from pgasdl.buffers import Memory, memory_of
from pgasdl.context import Context
from pgasdl.segment import Segment

STAGING_BYTES = 1 << 20


class Puts:
    """Copies tensors into peers' copies of ``target``, in order before later flags on queue 0.

    Parameters
    ----------
    context : Context
        The context of this rank.
    target : Segment
        Where to.
    staging : Segment
        A segment of this rank; tensors outside of segments pass through its last ``STAGING_BYTES``
        where the target is not mapped.
    """

    def __init__(self, context: Context, target: Segment, staging: Segment) -> None:
        self._context, self._target, self._staging = context, target, staging
        self._lock = threading.Lock()

    def put(self, source: Tensor, peer: int, offset: int, timeout: float | None) -> bool:
        """Copy ``source`` to ``offset`` of ``peer``'s copy.

        False: it is posted, and ``source`` must not change until :meth:`wait` has returned.
        """
        memory = memory_of(source.detach(), writable=False)
        if memory.nbytes == 0:
            return True
        if self._target.address_of(peer):
            there = self._target.torch(source.dtype, offset, tuple(source.shape), peer=peer)
            there.copy_(source.detach())
            return True
        home, begin = self._context.segments.at(memory)
        if home is None:
            self._staged(source, memory, peer, offset, timeout)
            return True
        end = offset + memory.nbytes
        self._context.write(
            home[begin : begin + memory.nbytes], peer, self._target[offset:end], timeout=timeout
        )
        return False

    def wait(self, timeout: float | None) -> None:
        """Wait until sources may change."""
        self._context.wait(timeout=timeout)

    def _staged(
        self, source: Tensor, memory: Memory, peer: int, offset: int, timeout: float | None
    ) -> None:
        deadline = time.monotonic() + self._context._seconds(timeout)
        first = self._staging.nbytes - STAGING_BYTES
        shelf = self._staging.torch(offset=first)
        raw = source.detach().reshape(-1).view(shelf.dtype)
        with self._lock:
            self.wait(_left(deadline))  # an earlier one may have timed out
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
                self.wait(_left(deadline))


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
