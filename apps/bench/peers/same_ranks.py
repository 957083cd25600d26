"""Transport mpi beside mpi4py's own calls, in the same processes: same library, same ranks.

It compares a notified write with put + flush + flag + flush by hand in mpi4py and with a two-sided
message, and an allreduce with ``MPI_Allreduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.comparison import Comparison
from bench.peers.mpi import Mpi
from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.timing import batches, rounds_of, together
from pgasdl.tools.bench.turns import Contender

Measure = Callable[[int], list[float]]


class SameRanks:
    """Measures one size after the other. Every member is collective.

    Raises
    ------
    UnavailableError
        The ranks do not reach each other over MPI.
    """

    def __init__(self, session: Session, comparison: Comparison, plan: str | None) -> None:
        context = self._context = session.context
        if context.size < 2 or context.transport_of(1 - min(context.rank, 1)) != "mpi":
            raise UnavailableError("mpi is measured over transport mpi: pgasdl run --mpi")
        created = context.config.mpi_windows == "created"
        self._peer = Mpi(created=created)
        self._ours, self._plan, self._comparison = Ours(session, plan), plan, comparison
        windows = "created windows" if created else "allocated windows"
        session.say(f"peer       {self._peer.version}, {windows}")

    def size(self, nbytes: int) -> None:
        """Measure one size."""
        if self._context.size == 2:
            self._writes(nbytes)
        if nbytes >= 4:
            self._reductions(nbytes)

    def close(self) -> None:
        """Free the windows."""
        self._peer.close()

    def _writes(self, nbytes: int) -> None:
        (core, python), free = self._ours.notified_writes(nbytes)
        trips = rounds_of(nbytes)

        def theirs(way: str) -> Contender:
            ping = self._peer.ping(way, nbytes)

            def measure(calls: int) -> list[float]:
                self._peer.barrier()
                return [ns / 1e3 for ns in batches(calls, trips, ping)]

            return Contender(way, measure)

        self._comparison.measure(
            "notified write",
            nbytes,
            {
                "core": [core],
                "python": [python],
                "put by hand": [theirs("put")],
                "two-sided": [theirs("send")],
            },
        )
        free()

    def _reductions(self, nbytes: int) -> None:
        context, count = self._context, nbytes // 4
        segment = context.segment(4 * count, notifications=1)
        inside: Any = segment.numpy(np.float32)
        outside = np.zeros(count, np.float32)
        handle = context.allreduce_handle(inside, op="mean", plan=self._plan)
        fill, theirs, _ = self._peer.allreduce([count])
        array = partial(context.allreduce, outside, op="mean")
        self._comparison.measure(
            "allreduce",
            nbytes,
            {
                "segment": [Contender(handle.plan, self._checked(inside, handle.run))],
                "array": [Contender("", self._checked(outside, array))],
                "MPI": [Contender("MPI_Allreduce", together(theirs, self._peer.barrier, fill))],
            },
        )
        handle.close()
        segment.delete()

    def _checked(self, array: Any, call: Callable[[], object]) -> Measure:
        """Measure calls, the last of which has to leave the mean."""
        rank, mean = self._context.rank, (self._context.size - 1) / 2
        measure = together(call, self._peer.barrier, lambda _: array.fill(rank))

        def checked(calls: int) -> list[float]:
            times = measure(calls)
            if array[0] != mean or array[-1] != mean:
                raise MismatchError(f"a mean of {mean} came out as {array[0]}: no figures")
            return times

        return checked
