"""Copy tensors into peers' copies of a segment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pgasdl.buffers import Memory, memory_of
from pgasdl.context import Context
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

        Timeout: they have not. UnavailableError: the current stream is captured into a graph.
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
