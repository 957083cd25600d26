"""``pgasdl bench rdma``: notified writes over verbs and perftest take turns on the same device.

``ib_write_lat`` and ``ib_write_bw`` (Debian's package perftest) are the usual measure of RDMA: one
queue pair and the device alone. Both sides run on the ranks' machines, in turns with ours, with the
same number of requests in flight. Latencies are those of typical messages, ib_write_lat's and ours:
the median of a turn, then of turns. MPICH over UCX, where it works, shows the speed of an MPI on
the same device: a put, a flush and a flag.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.errors import BootstrapError, UnavailableError
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.peers import PEER_KINDS, Peer
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.timing import rounds_of

IN_FLIGHT = 128
_TRIES = 3  # perftest's clock calibration fails now and then, and says "inf"
_PATIENCE = 120.0
_LEAST_TRIPS = 50


@dataclass(slots=True)
class Figures:
    """Microseconds of every round: a notified write one way, and each message of a stream."""

    latency: list[float] = field(default_factory=list)
    peer_latency: list[float] = field(default_factory=list)
    message: list[float] = field(default_factory=list)
    peer_message: list[float] = field(default_factory=list)
    mpi: list[float] = field(default_factory=list)

    def row(self, nbytes: int) -> dict[str, Any]:
        """Return the medians, for the JSON file."""
        ours, theirs = statistics.median(self.message), _median(self.peer_message)
        return {
            "op": "rdma",
            "transport": "verbs",
            "ranks": 2,
            "bytes": nbytes,
            "dtype": "uint8",
            "us": statistics.median(self.latency),
            "message_us": ours,
            "mb_s": nbytes / ours,
            "peers": {
                "ib_write_lat": _median(self.peer_latency),
                "ib_write_bw": theirs,
                "mpich": _median(self.mpi),
            },
        }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def measure(context: Context, request: Request) -> list[dict[str, Any]]:
    """Measure every size. Rank 0 prints the rows and returns them.

    Raises
    ------
    UnavailableError
        The ranks do not reach each other over verbs, or perftest is missing.
    """
    if context.size != 2 or context.transport_of(1 - context.rank) != "verbs":
        raise UnavailableError("bench rdma needs two ranks with --transport verbs")
    options = _native.VerbsOptions(**context.config.verbs_options())
    chosen = next(device for device in _native.verbs_devices(options) if device.chosen)
    perftest = Perftest(context, chosen)
    mpi, missing = _mpich(chosen) if context.rank == 0 else (None, "")
    rows = []
    output = Output(context.rank, as_json=request.as_json)
    say = output.say
    port = f"port {chosen.port}, {chosen.type}, {chosen.gid}"
    say(f"pgasdl bench rdma over {chosen.device}, {port}")
    say(f"medians of {request.rounds} rounds in turns; {IN_FLIGHT} requests in flight")
    say(f"MPICH put: {missing if mpi is None else mpi.version}")
    say(
        f"{'bytes':>9} {'one way us':>11} {'ib_write_lat':>13} {'ratio':>6}"
        f" {'MPICH put':>10}"
        f" {'MB/s':>9} {'ib_write_bw':>12} {'ratio':>6} {'messages/s':>11}"
    )
    for nbytes in request.sizes:
        figures = _size(context, nbytes, request, perftest, mpi)
        if context.rank != 0:
            continue
        row = figures.row(nbytes)
        rows.append(row)
        latency, message, put = (
            row["peers"][name] for name in ("ib_write_lat", "ib_write_bw", "mpich")
        )
        say(
            f"{nbytes:9} {row['us']:11.2f} {_cell(latency, 13)}"
            f" {_ratio(row['us'], latency)} {_cell(put, 10)}"
            f" {row['mb_s']:9.1f} {_cell(message and nbytes / message, 12)}"
            f" {_ratio(message, row['message_us'])}"
            f" {1e6 / row['message_us']:11.0f}"
        )
    if mpi is not None:
        mpi.close()
    output.write(rows)
    return rows


def _cell(value: float | None, width: int) -> str:
    return f"{value:{width}.2f}" if value is not None else f"{'-':>{width}}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return _cell(ours / theirs if ours and theirs else None, 6)


def _mpich(device: _native.VerbsDeviceInfo) -> tuple[Peer | None, str]:
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


def _size(
    context: Context, nbytes: int, request: Request, perftest: Perftest, mpi: Peer | None
) -> Figures:
    place = -(-nbytes // 4096) * 4096
    segment = context.segment(2 * place, notifications=1)
    figures = Figures()
    trips = max(_LEAST_TRIPS, 10 * rounds_of(nbytes))
    _native.notified_writes(context, segment, nbytes, place, 1, 2)
    _stream(context, segment, nbytes, place, 2)
    for _ in range(request.rounds):
        context.barrier(timeout=_PATIENCE)
        times = _native.notified_writes(context, segment, nbytes, place, trips, 1)
        figures.latency += [statistics.median(times) / 1e3] if times else []
        figures.peer_latency += perftest.run("ib_write_lat", nbytes, trips, _typical)
        context.barrier(timeout=_PATIENCE)
        count = max(IN_FLIGHT, min(20 * IN_FLIGHT, (4 << 20) // nbytes))
        figures.message += _stream(context, segment, nbytes, place, count)
        figures.peer_message += perftest.run("ib_write_bw", nbytes, count, _per_message)
        if mpi is not None:
            figures.mpi += mpi.ping("put", nbytes, 3)
    context.barrier(timeout=_PATIENCE)
    segment.delete()
    return figures


def _stream(context: Context, segment: Any, nbytes: int, place: int, count: int) -> list[float]:
    """Let rank 0 write messages to rank 1; return the microseconds of each."""
    if context.rank == 1:
        return []
    return [_native.streamed_writes(context, segment, nbytes, place, count) / 1e3]


class Perftest:
    """Runs a tool of perftest between the two ranks: rank 1 serves, rank 0 asks and reads."""

    def __init__(self, context: Context, device: _native.VerbsDeviceInfo) -> None:
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
