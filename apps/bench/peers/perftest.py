"""Notified writes over verbs beside perftest, in turns on the same device.

``ib_write_lat`` and ``ib_write_bw`` (Debian's package perftest) are the usual measure of RDMA: one
queue pair and the device alone. Both sides run on the ranks' machines, with the same number of
requests in flight. Latencies are those of typical messages, ib_write_lat's and ours: the median of
a turn, then of turns. MPICH over UCX, where it works, shows the speed of an MPI on the same device:
a put, a flush and a flag.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.comparison import Comparison, asked
from bench.jobs import PEER_KINDS, Peer
from pgasdl import _native
from pgasdl.context import Context
from pgasdl.errors import BootstrapError, UnavailableError
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.timing import rounds_of
from pgasdl.tools.bench.turns import PATIENCE, Contender

IN_FLIGHT = 128
_TRIES = 3  # perftest's clock calibration fails now and then, and says "inf"
_PATIENCE = 120.0
_LEAST_TRIPS = 50


class OnDevice:
    """Measures one size after the other. Every member is collective.

    Raises
    ------
    UnavailableError
        The ranks do not reach each other over verbs, or perftest is missing.
    """

    def __init__(self, session: Session, comparison: Comparison) -> None:
        context = self._context = session.context
        if context.size != 2 or context.transport_of(1 - context.rank) != "verbs":
            raise UnavailableError("rdma is measured between two ranks with --transport verbs")
        options = _native.VerbsOptions(**context.config.verbs_options())
        chosen = next(device for device in _native.verbs_devices(options) if device.chosen)
        self._comparison, self._perftest = comparison, Perftest(context, chosen)
        session.say(
            f"device     {chosen.device}, port {chosen.port}, {chosen.type}, {chosen.gid}; "
            f"{IN_FLIGHT} requests in flight"
        )
        self._mpi, missing = _mpich(chosen) if context.rank == 0 else (None, "")
        self._with_mpi = context.world.allgather("mpich", missing.encode(), PATIENCE)[0] == b""
        if missing:
            session.output.warn(f"no peer    {missing}")

    def size(self, nbytes: int) -> None:
        """Measure one size."""
        context, perftest = self._context, self._perftest
        place = -(-nbytes // 4096) * 4096
        segment = context.segment(2 * place, notifications=1)
        trips = max(_LEAST_TRIPS, 10 * rounds_of(nbytes))
        count = max(IN_FLIGHT, min(20 * IN_FLIGHT, (4 << 20) // nbytes))

        def notified(_: int) -> list[float]:
            context.barrier(timeout=_PATIENCE)
            times = _native.notified_writes(context, segment, nbytes, place, trips, 1)
            return [statistics.median(times) / 1e3] if times else []

        def stream(_: int) -> list[float]:
            context.barrier(timeout=_PATIENCE)
            if context.rank == 1:
                return []
            return [_native.streamed_writes(context, segment, nbytes, place, count) / 1e3]

        def tool(name: str, n: int, read: Callable[[list[str]], float]) -> list[Contender]:
            return [Contender(name, lambda _: perftest.run(name, nbytes, n, read), calls=1)]

        _native.notified_writes(context, segment, nbytes, place, 1, 2)
        groups = {
            "write_notify": [Contender("", notified, calls=1)],
            "perftest": tool("ib_write_lat", trips, _typical),
        }
        if self._with_mpi:
            put = (lambda calls: self._mpi.ping("put", nbytes, calls)) if self._mpi else None
            groups["MPICH"] = [Contender("put", asked(context, put), calls=3)]
        self._comparison.measure("one way", nbytes, groups)
        groups = {
            "write_notify": [Contender("", stream, calls=1)],
            "perftest": tool("ib_write_bw", count, _per_message),
        }
        self._comparison.measure("stream", nbytes, groups)
        context.barrier(timeout=_PATIENCE)
        segment.delete()

    def close(self) -> None:
        """End MPICH's job."""
        if self._mpi is not None:
            self._mpi.close()


def _mpich(device: Any) -> tuple[Peer | None, str]:
    """Start MPICH with both ranks on the device alone; or return why not."""
    environ = {
        "MPIR_CVAR_NOLOCAL": "1",
        "UCX_TLS": "rc_verbs,ud_verbs,self",
        "UCX_NET_DEVICES": f"{device.device}:{device.port}",
        "UCX_IB_GID_INDEX": str(device.gid_index),
    }
    try:
        return Peer("mpich", 2, replace(PEER_KINDS["mpich"], environ=environ)), ""
    except UnavailableError as error:
        return None, str(error)


class Perftest:
    """Runs a tool of perftest between the two ranks: rank 1 serves, rank 0 asks and reads."""

    def __init__(self, context: Context, device: Any) -> None:
        missing = [tool for tool in ("ib_write_lat", "ib_write_bw") if shutil.which(tool) is None]
        if missing:
            raise UnavailableError(f"{', '.join(missing)}: Debian's package perftest has them")
        self._context = context
        named = f"-d {device.device} -i {device.port} -x {device.gid_index}"
        self._options = f"{named} -t {IN_FLIGHT} -F".split()
        address = device.gid.rpartition(":")[2]
        addresses = context.world.allgather("perftest", address.encode())
        self._server = addresses[1].decode()

    def run(
        self, tool: str, nbytes: int, count: int, read: Callable[[list[str]], float]
    ) -> list[float]:
        """Return the figures on rank 0; empty if it printed none."""
        options = [*self._options, "-s", str(nbytes), "-n", str(count)]
        if tool == "ib_write_lat":
            at = options.index("-t")
            del options[at : at + 2]
        found: list[float] = []
        for _ in range(_TRIES):
            self._context.barrier(timeout=_PATIENCE)
            if self._context.rank == 1:
                server = subprocess.Popen([tool, *options], stdout=subprocess.DEVNULL)
                self._context.barrier(timeout=_PATIENCE)
                server.wait(_PATIENCE)
            else:
                self._context.barrier(timeout=_PATIENCE)
                found = self._ask([tool, *options, self._server], nbytes, read)
            if self._context.world.allgather("perftest, again", bytes([bool(found)]))[0] != b"\0":
                break
        return found

    def _ask(
        self, command: list[str], nbytes: int, read: Callable[[list[str]], float]
    ) -> list[float]:
        deadline = time.monotonic() + 20
        while True:  # the server may not listen yet
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
            for line in done.stdout.splitlines():
                fields = line.split()
                if fields and fields[0] == str(nbytes):
                    try:
                        value = read(fields)
                    except (ValueError, IndexError, ZeroDivisionError):
                        return []
                    return [value] if 0 < value < 1e12 else []
            if time.monotonic() > deadline:
                raise BootstrapError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
            time.sleep(0.1)


def _typical(fields: list[str]) -> float:
    return float(fields[4])  # bytes, iterations, least, most, typical


def _per_message(fields: list[str]) -> float:
    return 1.0 / float(fields[4])  # bytes, iterations, peak, average, millions of messages a second
