"""Jobs of other libraries: started once, asked in turn, blocked in the kernel meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.runtime.launch import mpiexec
from pgasdl.tools.bench.timing import clock_cost, durations, rounds_of

_APPS = str(Path(__file__).parents[1])

_START_SECONDS = 60.0
_ANSWER_SECONDS = 300.0
_FRAMES = re.compile(r"^Traceback .*\n(?:[ \t].*\n)*", re.MULTILINE)
_INSTALL = "pip install 'pgasdl[peers]'"


@dataclass(frozen=True, slots=True)
class PeerKind:
    """One row of the table of peers: a library, or one variant of it."""

    module: str  # the program of its processes
    needs: tuple[str, ...]  # Python modules that it needs
    # The MPI that starts them, as :func:`mpiexec.find` takes it; None: they start without one.
    mpi: str | None = None
    environ: dict[str, str] = field(default_factory=dict)  # variables of its processes
    ways: tuple[str, ...] = ("send", "put")  # how it sends: with messages ("send"), and with "put"
    also: tuple[str, ...] = ()  # operations that not every library has, of SPECIAL
    alone: bool = False  # it is one process, with a thread for each rank


_MPI, _OF_MPI = "bench.peers.mpi", ("remap", "reduce", "broadcast")
SPECIAL = ("product", *_OF_MPI)
# A variant has the name of its library, "-", and its own.
PEER_KINDS = {
    "mpich": PeerKind(_MPI, ("mpi4py",), "mpich", also=_OF_MPI),
    "mpich-generic": PeerKind(_MPI, ("mpi4py",), "mpich", {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"}),
    "openmpi": PeerKind(_MPI, ("mpi4py",), "openmpi", also=_OF_MPI),
    # Here the kernel copies from process to process, where the library might choose another way.
    "openmpi-cma": PeerKind(
        _MPI,
        ("mpi4py",),
        "openmpi",
        {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_smsc": "cma"},
    ),
    "gloo": PeerKind(
        "bench.peers.gloo", ("torch",), environ={"GLOO_SOCKET_IFNAME": "lo"}, ways=("send",)
    ),
    # Else its threads would spin for a while, on the processor of the contender whose turn it is.
    "blas": PeerKind(
        "bench.peers.blas",
        (),
        environ={"OPENBLAS_THREAD_TIMEOUT": "20"},
        ways=(),
        also=("product",),
        alone=True,
    ),
}


def serving(op: str) -> tuple[str, ...]:
    """Return the peers that have an operation."""
    return tuple(
        name
        for name, kind in PEER_KINDS.items()
        if (op in kind.also if op in SPECIAL else kind.ways)
    )


class Peer:
    """One job of another library; ``kind``: a row that is not in the table.

    UnavailableError: it is not installed, or does not start; says why.
    """

    def __init__(self, name: str, size: int, kind: PeerKind | None = None) -> None:
        self.name = name
        kind = kind or PEER_KINDS[name]
        self.ways = kind.ways
        self._size = 1 if kind.alone else size
        self._n_threads = size if kind.alone else 1
        self._clock_ns = clock_cost()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[IO[str]] = []
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        try:
            # Removed as soon as all have met: a later kill leaves no file.
            with tempfile.TemporaryDirectory(prefix="pgasdl-bench-") as folder:
                self.version = self._start(kind, folder)
        except (UnavailableError, OSError, ValueError) as error:
            self.close()
            raise UnavailableError(f"{name}: {error}") from error

    def collective(
        self,
        cuts: Sequence[int],
        calls: int,
        *,
        what: str = "allreduce",
        paced: bool,
        fill_share: float,
    ) -> list[float]:
        """Return the microseconds of each call of a collective on pieces of so many float32.

        Raises
        ------
        MismatchError
            The last call has left a wrong result.
        """
        answers = self.ask(op="collective", what=what, cuts=list(cuts), calls=calls, paced=paced)
        # Rank r fills with r, plus the number of the call.
        right = self._size * (calls - 1 + (self._size - 1) / 2)
        right = calls - 1 if what == "broadcast" else right
        results = answers[:1] if what == "reduce" else answers
        if wrong := {one for answer in results for one in answer["sums"]} - {right}:
            raise MismatchError(f"{self.name}: {what}: {right} came out as {wrong}: no figures")
        latest = [np.max([answer[key] for answer in answers], axis=0) for key in ("began", "ended")]
        fill_ns = max(answer["fill"] for answer in answers) * fill_share
        began, ended = ([int(moment) for moment in moments] for moments in latest)
        return durations(began, ended, paced=paced, clock_ns=self._clock_ns, fill_ns=fill_ns)

    def ping(self, way: str, nbytes: int, calls: int) -> list[float]:
        """Return the microseconds one way, per batch of round trips."""
        answers = self.ask(
            op="ping", way=way, nbytes=nbytes, n_batches=calls, rounds=rounds_of(nbytes)
        )
        return [ns / 1e3 for ns in answers[0]]

    def times(self, what: str, n: int, calls: int) -> list[float]:
        """Return the microseconds of each call of an operation on matrices."""
        return [
            max(each)
            for each in zip(*self.ask(op="times", what=what, n=n, calls=calls), strict=True)
        ]

    def close(self) -> None:
        """End its processes; idempotent."""
        with contextlib.suppress(OSError, ValueError):
            for lines in self._lines:
                lines.write('{"op": "end"}\n')
                lines.flush()
        for lines in self._lines:
            with contextlib.suppress(OSError, ValueError):
                lines.close()
        self._lines = []
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
        self._words.close()

    def ask(self, **command: Any) -> list[Any]:
        """Give every process a command; return their answers, by rank."""
        text = json.dumps(command) + "\n"
        for lines in self._lines:
            lines.write(text)
            lines.flush()
        answers = [lines.readline() for lines in self._lines]
        if not all(answers):
            raise UnavailableError(f"{self.name} ended while it was measured: {self._last_words()}")
        return [json.loads(answer) for answer in answers]

    def _start(self, kind: PeerKind, folder: str) -> str:
        for module in kind.needs:
            if importlib.util.find_spec(module) is None:
                raise UnavailableError(f"{module} is not installed ({_INSTALL})")
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(self._size)
            self._launch(kind, path, os.path.join(folder, "store"))
            hellos = self._meet(listener)
        order = sorted(range(len(hellos)), key=lambda place: int(hellos[place]["rank"]))
        self._lines = [self._lines[place] for place in order]
        version = str(hellos[0]["version"])
        sizes = {int(hello["size"]) for hello in hellos}
        says = mpiexec.LAUNCHERS[kind.mpi].says if kind.mpi else ""
        if sizes != {self._size} or says not in version:
            raise UnavailableError(
                f"{self._size} processes of {says or 'it'} were started, but they are "
                f"{sorted(sizes)} of {version}"
            )
        return version

    def _launch(self, kind: PeerKind, path: str, store: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PGASDL_", "PMI"))}
        paths = filter(None, (_APPS, environ.get("PYTHONPATH")))
        n_threads = str(self._n_threads)
        environ |= {
            "OMP_NUM_THREADS": n_threads,
            "PYTHONPATH": os.pathsep.join(paths),
            **kind.environ,
        }
        program = [sys.executable, "-P", "-m", kind.module, path]
        if kind.mpi is not None:
            found = mpiexec.find(kind.mpi)
            self._spawn(found.command(self._size, program), environ | found.environ())
            return
        for rank in range(self._size):
            self._spawn([*program, str(rank), str(self._size), store], environ)

    def _spawn(self, command: list[str], environ: dict[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                start_new_session=True,
            )
        )

    def _meet(self, listener: socket.socket) -> list[dict[str, Any]]:
        hellos: list[dict[str, Any]] = []
        deadline = time.monotonic() + _START_SECONDS
        listener.settimeout(0.2)
        while len(hellos) < self._size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                ended = any(process.poll() is not None for process in self._processes)
                if ended or time.monotonic() > deadline:
                    what = "ended" if ended else f"did not start in {_START_SECONDS:g} s"
                    raise UnavailableError(f"{what}: {self._last_words()}") from None
                continue
            connection.settimeout(_ANSWER_SECONDS)
            lines = connection.makefile("rw", encoding="utf-8")
            connection.close()  # the file keeps it open
            self._lines.append(lines)
            hellos.append(json.loads(lines.readline() or "null"))
        return hellos

    def _last_words(self) -> str:
        # pread leaves the position at which the processes write.
        text = os.pread(self._words.fileno(), 1 << 16, 0).decode(errors="replace")
        lines = [line.strip() for line in _FRAMES.sub("", text).splitlines() if line.strip(" -\t")]
        return " ".join(lines)[:400] or "without a word"


def start(names: Sequence[str], size: int) -> tuple[list[Peer], list[str]]:
    """Start the available peers; return them, and the reason for each other one."""
    peers: list[Peer] = []
    missing: list[str] = []
    for name in names:
        try:
            peers.append(Peer(name, size))
        except UnavailableError as error:
            missing.append(str(error))
    return peers, missing
