"""A peer's process: our rank 0 asks it over a socket; in between it sleeps.

It is one process of another library's job. Both sides send one JSON object per line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pgasdl.tools.bench.timing import Moments, batches, fill_cost, timed


class Reduction(NamedTuple):
    """How to fill an array, the calls that sum it over all ranks, and the array."""

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


def pin(rank: int, size: int) -> None:
    """Bind the calling thread to a processor of its own, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


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


def serve(library: Library, path: str) -> None:
    """Answer until told to end, or until the other side is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")
        _send(lines, {"rank": library.rank, "size": library.size, "version": library.version})
        for line in lines:
            command = json.loads(line)
            if command["op"] == "end":
                return
            _send(lines, _answer(library, command))


def _answer(library: Library, command: dict[str, Any]) -> dict[str, Any]:
    if command["op"] == "ping":
        ping = library.ping(command["way"], command["nbytes"])
        library.barrier()
        if library.rank > 1:
            return {"times": []}
        return {"times": batches(command["batches"], command["rounds"], ping)}
    fill, call, array = library.allreduce(command["cuts"])
    fill_ns = fill_cost(fill)
    library.barrier()
    moments: Moments = timed(
        command["calls"], fill, library.barrier if command["paced"] else None, call
    )
    sums = [float(array[place]) for place in (0, len(array) // 2, -1)]
    return {"began": moments[0], "ended": moments[1], "fill": fill_ns, "sums": sums}


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def run(main: Callable[[], None]) -> None:
    """Run a peer's program; tell why it failed by one write, which no other rank's can part."""
    try:
        main()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(sys.stderr.fileno(), f"{words}\n".encode())
        sys.exit(1)


def socket_path() -> str:
    """Return where our rank 0 listens: the first argument."""
    return sys.argv[1]
