"""``pgasdl bench mpi``: transport mpi and mpi4py's own calls take turns in the same processes.

It compares a notified write with put + flush + flag + flush by hand in mpi4py and with a two-sided
message, and an allreduce with ``MPI_Allreduce``: same library, same ranks, same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.tools.bench.mpi_peer import Mpi
from pgasdl.tools.bench.ours import Ours
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.timing import batches, rounds_of
from pgasdl.tools.bench.turns import Ranks

_PATIENCE = 120.0
Measure = Callable[[], list[float]]


def measure(context: Context, request: Request) -> list[dict[str, Any]]:
    """Measure every size. Rank 0 prints the rows and returns them.

    Raises
    ------
    UnavailableError
        The ranks do not reach each other over MPI.
    """
    if context.size < 2 or context.transport_of(1 - min(context.rank, 1)) != "mpi":
        raise UnavailableError("bench mpi needs --transport mpi")
    created = context.config.mpi_windows == "created"
    peer = Mpi(created=created)
    windows = "created windows" if created else "allocated windows"
    output = Output(context.rank, as_json=request.as_json)
    bench = _Bench(context, request, peer, output)
    bench.say(f"pgasdl bench mpi over {peer.version}: {context.size} ranks, {windows}")
    bench.say(f"microseconds, medians of {request.rounds} rounds in turns; ratio: ours / theirs")
    bench.say(f"{'':>14} {'bytes':>9} {'ours':>10} {'best':>10} {'theirs':>10} {'best':>10} ratio")
    for nbytes in request.sizes:
        if context.size == 2:
            bench.writes(nbytes)
        if nbytes >= 4:
            bench.reductions(nbytes)
    peer.close()
    output.write(bench.rows)
    return bench.rows


class _Bench:
    def __init__(self, context: Context, request: Request, peer: Mpi, output: Output) -> None:
        self.say = output.say
        self.context, self.request, self.peer = context, request, peer
        self.ours = Ours(Ranks(context, False, 1.0), lambda: None, request.plan)
        self.rows: list[dict[str, Any]] = []

    def writes(self, nbytes: int) -> None:
        place = -(-nbytes // 4096) * 4096
        segment = self.context.segment(2 * place, notifications=1)
        trips, calls = rounds_of(nbytes), 4
        ping = self.ours._ping(segment, nbytes, place)

        def core() -> list[float]:
            times = _native.notified_writes(self.context, segment, nbytes, place, calls, trips)
            return [ns / 1e3 for ns in times]

        def timed(way: Callable[[int], object]) -> list[float]:
            return [ns / 1e3 for ns in batches(calls, trips, way)]

        ways: dict[str, Measure] = {
            "core": core,
            "python": partial(timed, ping),
            "by hand": partial(timed, self.peer.ping("put", nbytes)),
            "send": partial(timed, self.peer.ping("send", nbytes)),
        }
        times = self._turns(ways)
        for name in ("core", "python"):
            self._row(f"notified, {name}", nbytes, times[name], times["by hand"])
        self._row("two-sided", nbytes, times["send"], times["by hand"])
        segment.delete()

    def reductions(self, nbytes: int) -> None:
        count = nbytes // 4
        segment = self.context.segment(4 * count, notifications=1)
        inside: Any = segment.numpy(np.float32)
        outside = np.zeros(count, np.float32)
        handle = self.context.allreduce_handle(inside, op="mean", plan=self.request.plan)
        fill, theirs, _ = self.peer.allreduce([count])
        mean = (self.context.size - 1) / 2

        def ours(array: Any, call: Callable[[], object]) -> list[float]:
            took = []
            for _ in range(_calls(nbytes)):
                array.fill(self.context.rank)
                took.append(self._together(call))
                if array[0] != mean or array[-1] != mean:
                    raise MismatchError(f"a mean of {mean} came out as {array[0]}: no figures")
            return took

        def reduce() -> list[float]:
            took = []
            for number in range(_calls(nbytes)):
                fill(number)
                took.append(self._together(theirs))
            return took

        times = self._turns(
            {
                "segment": partial(ours, inside, handle.run),
                "array": lambda: ours(outside, lambda: self.context.allreduce(outside, op="mean")),
                "theirs": reduce,
            }
        )
        self._row(f"{handle.plan}, segment", nbytes, times["segment"], times["theirs"])
        self._row("allreduce, array", nbytes, times["array"], times["theirs"])
        segment.delete()

    def _together(self, call: Callable[[], object]) -> float:
        self.peer.barrier()
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6

    def _turns(self, ways: dict[str, Measure]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.request.rounds + 1):
            for name, measure in ways.items():
                self.peer.barrier()
                took = measure()
                if turn > 0:  # the first warms up,
                    times[name] += took[
                        1:
                    ]  # and each first call reloads what others' turns evicted
        return times

    def _row(self, what: str, nbytes: int, ours: list[float], theirs: list[float]) -> None:
        mine, other = statistics.median(ours), statistics.median(theirs)
        self.rows.append(
            {
                "op": what,
                "bytes": nbytes,
                "us": mine,
                "peer_us": other,
                "least_us": min(ours),
                "peer_least_us": min(theirs),
                "mpi": self.peer.version,
            }
        )
        self.say(
            f"{what:>14.20} {nbytes:9} {mine:10.2f} {min(ours):10.2f} {other:10.2f} "
            f"{min(theirs):10.2f} {mine / other:5.2f}"
        )


def _calls(nbytes: int) -> int:
    return max(4, min(50, (4 << 20) // nbytes))
