"""Worker processes that run contract tests, kept from test to test, and the deadline over them.

A worker is one rank of a job of processes, or a whole job of threads. Commands and answers are
lines of JSON over pipes. A worker that misses the deadline dumps its stacks and is killed, with
all workers of its test; the next test gets new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.environment import ONE_THREAD, environment
from support.output import Lines, Log
from support.places import TESTS
from support.starting import kill_group

from pgasdl.runtime.bootstrap import StoreServer
from pgasdl.runtime.bootstrap.rendezvous import sealed_secret

if TYPE_CHECKING:
    from contract_mpi import MpiJob
    from support.mpi_rows import Row

WORKER = str(Path(__file__).with_name("contract_worker.py"))
_MPI_RANKS = 4  # of a new job, at least: enough for most tests

Answer = dict[str, Any]


class RankFailure(AssertionError):
    """A rank of a test failed, or none answered in time; the text holds all tracebacks."""


def worker_environment() -> dict[str, str]:
    return environment(TESTS, **ONE_THREAD)


class Worker:
    """One process; ``fd`` delivers its answers."""

    def __init__(self, secret_fd: int, variables: dict[str, str]) -> None:
        read, write = os.pipe()
        self._log = Log()
        self.process = subprocess.Popen(
            [sys.executable, WORKER, str(write), str(secret_fd)],
            stdin=subprocess.PIPE,
            stdout=self._log.file,
            stderr=self._log.file,
            env=worker_environment() | variables,
            pass_fds=(write, secret_fd),
            start_new_session=True,  # Ctrl-C reaches only pytest; the pool ends its workers
        )
        os.close(write)
        self.fd = read
        self._lines = Lines()

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if it died, its answer says so
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> Answer | None:
        """The answer; None while it is incomplete. If the worker died, the answer says how."""
        part = os.read(self.fd, 1 << 16)
        if not part:
            return {"error": f"the worker process: {self.ended()}", "kind": "WorkerDied"}
        lines = self._lines.of(part)
        answer: Answer | None = json.loads(lines[0]) if lines else None
        return answer

    def ended(self) -> str:
        """How the process ended, once its answers have ended."""
        status = self.process.wait()
        return f"ended with signal {-status}" if status < 0 else f"ended with status {status}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """The worker's output since the last call; only its end if it is long."""
        return self._log.more()

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR2)

    def end(self) -> None:
        """Kill and reap the process, with whatever it started."""
        kill_group(self.process.pid)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._log.close()


class Pool:
    """Workers by place: a test of n processes takes the first n; all threads run in one more."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._secret_fd = sealed_secret(self._secret)
        self._workers: dict[object, Worker] = {}
        self._mpi: dict[str, MpiJob] = {}
        self._job = 0

    def _at(self, place: object, command: dict[str, Any]) -> Worker:
        variables: dict[str, str] = command.get("gpu", {})
        place = place, *variables.items()
        worker = self._workers.get(place)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.end()
            worker = self._workers[place] = Worker(self._secret_fd, variables)
        return worker

    def run_processes(
        self, command: dict[str, Any], size: int, settings: dict[str, Any], deadline: float
    ) -> list[Answer]:
        """Run one rank per process, started together; return their answers in rank order."""
        self._job += 1
        job_id = f"contract-{self._job}"
        with StoreServer(self._secret, size, job_id=job_id) as server:
            host, port = server.address
            workers = [self._at(rank, command) for rank in range(size)]
            for rank, worker in enumerate(workers):
                place = {"rank": rank, "size": size, "job_id": job_id, "store": f"{host}:{port}"}
                worker.send(command | {"init": place | settings})
            return self._gather(workers, deadline)

    def run_mpi(
        self,
        mpi: Row,
        command: dict[str, Any],
        size: int,
        settings: dict[str, Any],
        deadline: float,
    ) -> list[Answer]:
        """Run on the first ranks of a job that an MPI's launcher started."""
        from contract_mpi import MpiJob

        job = self._mpi.get(mpi.name)
        if job is None or job.size < size or job.process.poll() is not None or not job.workers:
            if job is not None:
                job.end()
            job = self._mpi[mpi.name] = MpiJob(mpi, max(size, _MPI_RANKS))
        workers = job.workers[:size]
        for worker in workers:
            worker.send(command | {"mpi": size, "init": settings})
        return self._gather(workers, deadline)

    def run_threads(
        self, command: dict[str, Any], size: int, settings: dict[str, Any], deadline: float
    ) -> list[Answer]:
        """Run all ranks as threads of one process; return one answer for all."""
        worker = self._at("threads", command)
        worker.send(command | {"threads": size, "settings": settings})
        return self._gather([worker], deadline)

    def _gather(self, workers: Sequence[Worker], deadline: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(workers):
                selector.register(worker.fd, selectors.EVENT_READ, number)
            while len(answers) < len(workers) and (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    answer = workers[key.data].receive()
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fd)
        late = [worker for number, worker in enumerate(workers) if number not in answers]
        if late:
            for worker in late:
                worker.dump_stacks()
            time.sleep(0.3)
        for number, worker in enumerate(workers):
            words = worker.said()
            answer = answers.setdefault(
                number, {"error": f"no answer within {deadline:g} s", "kind": "Deadline"}
            )
            if "error" in answer:
                answer["error"] += f"\n--- it wrote:\n{words}" if words else ""
            if late or not worker.alive:
                worker.end()
                self._workers = {p: w for p, w in self._workers.items() if w is not worker}
        return [answers[number] for number in range(len(workers))]

    @property
    def pids(self) -> list[int]:
        jobs = [worker.pid for job in self._mpi.values() for worker in job.workers]
        return [worker.process.pid for worker in self._workers.values()] + jobs

    def close(self) -> None:
        """Kill and reap every worker."""
        for worker in self._workers.values():
            worker.end()
        for job in self._mpi.values():
            job.end()
        self._workers.clear()
        os.close(self._secret_fd)


def judged(answers: list[Answer]) -> list[Any]:
    """The results of the ranks; RankFailure with every failing rank's traceback, cause first."""
    failed = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
    # Ranks that only heard of a failure come last.
    failed.sort(key=lambda pair: pair[1].get("kind") == "PeerLostError")
    if failed:
        raise RankFailure(
            "\n".join(
                f"--- {f'rank {rank}' if len(answers) > 1 else 'threads'}: {answer['error']}"
                for rank, answer in failed
            )
        )
    return [answer.get("result") for answer in answers]
