"""A peer's process: our rank 0 asks it over a socket; in between it sleeps.

It is one process of another library's job. Both sides send one JSON document per line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pgasdl.tools.bench.timing import batches, fill_cost, timed


class Reduction(NamedTuple):
    """How to fill an array, the calls of a collective on it, and the array."""

    fill: Callable[[int], object]
    call: Callable[[], None]
    array: Any


class Library(Protocol):
    """Another library's operations on this process's rank."""

    rank: int
    size: int
    version: str

    def allreduce(self, cuts: Sequence[int]) -> Reduction:
        """Return the reduction of float32 pieces of these lengths."""

    def barrier(self) -> None:
        """Wait for all processes."""

    def ping(self, way: str, nbytes: int) -> Callable[[int], None]:
        """Round trips between ranks 0 and 1."""


class Measured:
    """The answers of a library's process."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def ping(self, way: str, nbytes: int, n_batches: int, rounds: int) -> list[float]:
        """Return the nanoseconds one way of each batch of round trips."""
        ping = self._library.ping(way, nbytes)
        self._library.barrier()
        return batches(n_batches, rounds, ping) if self._library.rank <= 1 else []

    def collective(self, what: str, cuts: Sequence[int], calls: int, paced: bool) -> dict[str, Any]:
        """Return the moments of calls, how long filling takes, and samples of the last result."""
        barrier = self._library.barrier
        fill, call, array = getattr(self._library, what)(cuts)
        fill_ns = fill_cost(fill)
        barrier()
        began, ended = timed(calls, fill, barrier if paced else None, call)
        sums = [float(array[place]) for place in (0, len(array) // 2, -1)]
        return {"began": began, "ended": ended, "fill": fill_ns, "sums": sums}

    def times(self, what: str, n: int, calls: int) -> list[float]:
        """Return the microseconds of each call of an operation on matrices, on this process."""
        call, found = getattr(self._library, what)(n), []
        for _ in range(calls):
            self._library.barrier()
            began = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - began))
        return found


def messages(
    rank: int, send: Callable[[], object], receive: Callable[[], object]
) -> Callable[[int], None]:
    """Return round trips of messages between ranks 0 and 1."""

    def first(rounds: int) -> None:
        for _ in range(rounds):
            send()
            receive()

    def second(rounds: int) -> None:
        for _ in range(rounds):
            receive()
            send()

    return first if rank == 0 else second


def serve(answers: object, rank: int, size: int, version: str) -> None:
    """Answer until told to end, or until the other side is gone.

    A command names a method of ``answers`` and its arguments; the answer is the method's result.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(sys.argv[1])
        lines = connection.makefile("rw", encoding="utf-8")
        _send(lines, {"rank": rank, "size": size, "version": version})
        for line in lines:
            command = json.loads(line)
            op = command.pop("op")
            if op == "end":
                return
            _send(lines, getattr(answers, op)(**command))


def serve_library(library: Library) -> None:
    """Answer with a library's measurements."""
    serve(Measured(library), library.rank, library.size, library.version)


def _send(lines: Any, message: Any) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def run(main: Callable[[], None]) -> None:
    """Run a peer's program; report its failure by one write, so that ranks' lines do not mix."""
    try:
        main()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(sys.stderr.fileno(), f"{words}\n".encode())
        sys.exit(1)
