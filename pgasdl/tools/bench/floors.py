"""The physical floor: raw loads, stores and flags over the same kind of memory, as contenders."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence

import numpy as np

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.tools.bench.timing import rounds_of
from pgasdl.tools.bench.turns import Contender, Ranks

NEAR_NS = 100.0
_BATCHES, _ROUNDS = 9, 50
_MEETING = 60.0  # seconds for two ranks to connect


class Floors:
    """Measures the floor; every member is collective."""

    def __init__(self, ranks: Ranks, payload: int, oversubscribed: bool) -> None:
        context: Context = ranks.context
        self._ranks = ranks
        self._clock_ns = _native.clock_cost()
        nbytes = _native.Floor.bytes(context.size, payload)
        self._segment = context.segment(nbytes, notifications=1)
        self._floor = _native.Floor(context, self._segment, oversubscribed)
        self.sync = self._floor.sync

    def line_ns(self) -> float:
        """Return the time of a cache line from rank 0 to 1, one way; 0 with one rank."""
        times = self._floor.line(_BATCHES, _ROUNDS)
        mine = statistics.median(times) if times else 0.0
        return float(self._ranks.latest(np.array([mine]))[0])

    def puts(self, nbytes: int) -> list[Contender]:
        """Make a contender of each way to copy, with a flag."""

        def contender(copy: str) -> Contender:
            rounds = rounds_of(nbytes)

            def measure(calls: int) -> Sequence[float]:
                return [ns / 1e3 for ns in self._floor.put(nbytes, copy, calls, rounds)]

            return Contender(f"put by {copy}", measure)

        ways = ["memcpy", "copy"] + (["stream"] if nbytes >= 1 << 20 else [])
        return [contender(copy) for copy in ways]

    def private_arrays(self, count: int, fill_ns: float) -> list[Contender]:
        """Make the contenders of an allreduce of arrays outside, staged in several ways."""

        def contender(piece: int, copy: str) -> Contender:
            def measure(calls: int) -> Sequence[float]:
                moments = self._floor.private_arrays(count, piece, copy, calls, self._ranks.paced)
                return self._ranks.durations(moments, self._clock_ns, fill_ns)

            return Contender(f"pieces of {4 * piece} by {copy}", measure)

        # Far from each other, stores past the caches are faster; near, pieces that stay in them.
        ways = [(32768, "memcpy")]
        ways += [(8192, "memcpy")] if count > 8192 else []
        ways += [(32768, "stream")] if count >= 1024 else []
        found = [contender(piece, copy) for piece, copy in ways]
        piece, _ = ways[0]

        def by_owners(calls: int) -> Sequence[float]:
            moments = self._floor.private_blocks(count, piece, calls, self._ranks.paced)
            return self._ranks.durations(moments, self._clock_ns, fill_ns)

        return [*found, Contender(f"by owners, in pieces of {4 * piece}", by_owners)]

    def layers(self, counts: Sequence[int], fill_ns: float = 0.0) -> list[Contender]:
        """Make the contenders of a model's tensors in segments, one for each kernel."""

        def contender(prefetch: bool) -> Contender:
            def measure(calls: int) -> Sequence[float]:
                moments = self._floor.layers(list(counts), prefetch, calls, self._ranks.paced)
                return self._ranks.durations(moments, self._clock_ns, fill_ns)

            return Contender("prefetch" if prefetch else "plain", measure)

        large = sum(counts) >= 1 << 16
        return [contender(False)] + ([contender(True)] if large else [])


class SocketFloor:
    """Measures pings over a bare socket between ranks 0 and 1; every member is collective."""

    def __init__(self, context: Context) -> None:
        self._context, self._socket = context, None
        listener = socket.create_server(("127.0.0.1", 0)) if context.rank == 0 else None
        port = listener.getsockname()[1] if listener else 0
        ports = context.world.allgather("bench", str(port).encode(), _MEETING)
        if listener:
            listener.settimeout(_MEETING)
            self._socket, _ = listener.accept()
            listener.close()
        elif context.rank == 1:
            self._socket = socket.create_connection(("127.0.0.1", int(ports[0])), _MEETING)
        if self._socket:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def puts(self, nbytes: int) -> list[Contender]:
        """Make the contender: the same bytes, and the same waiting."""
        rounds = rounds_of(nbytes)

        def measure(calls: int) -> Sequence[float]:
            self._context.barrier()
            if self._socket is None:
                return []
            number = self._socket.fileno()
            times = _native.socket_pings(self._context, number, nbytes, calls, rounds)
            return [ns / 1e3 for ns in times]

        return [Contender("socket", measure)]


def placement(line_ns: float, oversubscribed: bool) -> str:
    """Derive the placement of our processors from the latency of a bounced line."""
    if oversubscribed:
        return "oversubscribed"
    if line_ns == 0:
        return "alone"
    return "near" if line_ns < NEAR_NS else "far"
