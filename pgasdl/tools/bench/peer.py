"""A peer's process: our rank 0 asks it over a socket; in between it sleeps.

It is one process of another library's job. Both sides send one JSON object per line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pgasdl.tools.bench.timing import Moments, batches, fill_cost, timed


class Library(Protocol):
    """Another library's operations on this process's rank."""

    rank: int
    size: int
    version: str

    def allreduce(self, cuts: Sequence[int]) -> tuple[Callable[[int], object], Callable[[], None]]:
        """Return how to fill float32 pieces of these lengths, and the calls that reduce them."""

    def barrier(self) -> None:
        """Wait for all processes."""

    def ping(self, way: str, nbytes: int) -> Callable[[int], None]:
        """Round trips between ranks 0 and 1."""


def pin(rank: int, size: int) -> None:
    """Bind the calling thread to a processor of its own, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


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
    fill, call = library.allreduce(command["cuts"])
    fill_ns = fill_cost(fill)
    library.barrier()
    moments: Moments = timed(
        command["calls"], fill, library.barrier if command["paced"] else None, call
    )
    return {"began": moments[0], "ended": moments[1], "fill": fill_ns}


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def socket_path() -> str:
    """Return where our rank 0 listens: the first argument."""
    return sys.argv[1]
