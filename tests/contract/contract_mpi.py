"""Worker processes that an MPI's own launcher started: one job, kept from test to test.

A test of n ranks runs on the first n, which meet through a communicator of only these. Commands
and answers go over sockets, because launchers pass on no descriptors. When one process of the job
ends, MPI's launcher ends all of them, and the next test gets a new job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from contract_pool import WORKER, Worker, worker_environment
from support.mpi_rows import Row
from support.output import Lines, Log
from support.starting import kill_group

_START_SECONDS = 60.0


class MpiWorker(Worker):
    """One process of the job; ``fd`` delivers its answers."""

    def __init__(self, job: MpiJob, connection: socket.socket, pid: int) -> None:
        self.job, self.connection, self.pid = job, connection, pid
        self.fd = connection.fileno()
        self._lines = Lines()

    def send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # if it died, its answer says so
            self.connection.sendall(json.dumps(command).encode() + b"\n")

    def ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"MPI's launcher ended with status {self.job.process.wait(5)}"
        return "its connection ended"

    @property
    def alive(self) -> bool:
        return self.job.process.poll() is None

    def said(self) -> str:
        return self.job.said()

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)

    def end(self) -> None:
        self.job.end()


class MpiJob:
    """One job of ``size`` workers."""

    def __init__(self, mpi: Row, size: int) -> None:
        self.size = size
        found = mpi.found()
        self._log = Log()
        self.workers: list[MpiWorker] = []
        with (
            tempfile.TemporaryDirectory(prefix="pgasdl-contract-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = os.path.join(folder, "socket")
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(0.2)
            self.process = subprocess.Popen(
                found.command(size, [sys.executable, WORKER, f"mpi:{path}"]),
                stdin=subprocess.DEVNULL,
                stdout=self._log.file,
                stderr=self._log.file,
                env=mpi.environ(worker_environment()) | found.environ(),
                start_new_session=True,
            )
            self._meet(listener)

    def _meet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        places: dict[int, MpiWorker] = {}
        while len(places) < self.size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    words = self.said()
                    self.end()
                    raise RuntimeError(f"an MPI job did not start: {words}") from None
                continue
            with connection.makefile("rb") as lines:
                hello = json.loads(lines.readline())
            places[hello["rank"]] = MpiWorker(self, connection, hello["pid"])
        self.workers = [places[rank] for rank in range(self.size)]

    def said(self) -> str:
        """The processes' output since the last call; only its end if it is long."""
        return self._log.more()

    def end(self) -> None:
        """Kill and reap the job; idempotent."""
        for worker in self.workers:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        self.workers = []
        kill_group(self.process.pid)
        self.process.wait()
        self._log.close()
