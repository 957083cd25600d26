"""Jobs through Slurm: each step is a batch job of one supervisor, which starts the ranks by srun.

Slurm queues, places and ends them. A step is found by its name in Slurm, so a server that is killed
and started again finds it; its outcome stands in its folder, which all nodes reach.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pgasdl.errors import JobError, UnavailableError
from pgasdl.jobs import steps
from pgasdl.jobs.job import JobRow, State
from pgasdl.jobs.places import Places
from pgasdl.jobs.proof import signature
from pgasdl.jobs.requests import RESOURCES
from pgasdl.jobs.runner import Kind, Look, Lost
from pgasdl.jobs.supervisor import BEGUN, MESSAGES

_NAME, _SUBMITTED = "slurm.name", "slurm.submitted"  # files of a step: its name; sbatch succeeded
_SILENCE = 60.0  # seconds that Slurm may take to answer
_EVERY = 2.0  # seconds from one look at the queue to the next
_LATE = 5.0  # seconds until this node sees a file that another node wrote
_AGAIN = 60.0  # seconds until it is asked again after it refused for now
# A violated policy without the name of its limit may be any, and so may pass.
_FOR_NOW = re.compile(
    r"did not end|timed out|Unable to contact|temporarily|not responding|SubmitJob|"
    r"^(?!.*\wLimit\b).*job submit limit"
)
_NEVER = (float("-inf"), frozenset[str]())
_LOST = Lost("Slurm ended it before its supervisor could write how: cancelled, or its node failed")


class SlurmRunner:
    """Batch jobs of the cluster to which this machine belongs; UnavailableError: no Slurm here."""

    resources = frozenset(RESOURCES)

    def __init__(self, places: Places, root: Path) -> None:
        found = shutil.which("srun")
        if found is None:
            raise UnavailableError("--slurm: there is no srun here; install Slurm's client")
        self._srun = found
        self._places = places
        self._root = root
        self._lock = threading.Lock()
        self._watched: dict[str, Callable[[], None]] = {}
        self._stopping: set[str] = set()
        self._gone: dict[str, float] = {}  # when a step was first seen to be no more in the queue
        self._seen = _NEVER  # the queue, and when
        self._closed = (float("-inf"), "")  # until when, and why, Slurm is not asked for a job
        self._thread: threading.Thread | None = None

    def lay_out(self, job: JobRow, kind: Kind) -> None:
        """Make the folder of a step; see :class:`pgasdl.jobs.runner.Runner`."""
        until, why = self._closed
        if time.monotonic() < until:
            raise OSError(errno.EAGAIN, why)
        # SIGTERM to srun itself would end the ranks at once.
        stop = ["scancel", "--signal=TERM", f"--name={self._name(job)}"]
        srun = [self._srun, "--label", "--kill-on-bad-exit=0", sys.executable, "-u"]
        steps.lay_out(self._places, self._root, job, kind, srun, stop)

    def start(self, job: JobRow, kind: Kind) -> None:
        """Hand the present step to Slurm."""
        request, name, step = job.request, self._name(job), self._places.step(job.id, job.step)
        steps.set_aside(step)
        (step / _NAME).write_text(name)
        supervisor = [sys.executable, "-P", "-m", "pgasdl.jobs.supervisor", str(step)]
        words = [
            f"--job-name={name}",
            f"--ntasks={request.ranks if kind == 'run' else 1}",
            f"--output={step / MESSAGES}",
            f"--chdir={step}",
            "--no-requeue",
            *(f"--{name}={value}" for name, value in request.resources.items()),
        ]
        script = f"#!/bin/sh\nexec {shlex.join(supervisor)}\n"
        self._seen = _NEVER
        try:
            _asked("sbatch", *words, given=script)
        except _RefusedError as error:
            if name not in self._queue():  # if Slurm answers at all
                (step / BEGUN).unlink()  # should it take it later, it runs nothing
                if _FOR_NOW.search(str(error)):
                    self._closed = (time.monotonic() + _AGAIN, f"Slurm refuses it for now: {error}")
                    raise OSError(errno.EAGAIN, self._closed[1]) from error
                raise JobError(f"Slurm refuses it: {error}", 422) from error
        (step / _SUBMITTED).touch()
        self._seen = _NEVER

    def look(self, job: JobRow) -> Look:
        """Return the state of the present step, by its folder and Slurm's queue."""
        step, name = self._places.step(job.id, job.step), self._name(job)
        queued = name in self._queue()
        if queued:
            self._gone.pop(name, None)
            return "runs"
        with contextlib.suppress(FileNotFoundError):
            os.listdir(step)  # makes a network's file system look again
        if outcome := steps.outcome(step):
            return outcome
        if not step.exists():
            return steps.REMOVED
        if not (step / _SUBMITTED).exists():
            (step / BEGUN).unlink(missing_ok=True)  # should Slurm take it later, it runs nothing
            return "never began"
        if time.monotonic() < self._gone.setdefault(name, time.monotonic()) + _LATE:
            return "runs"
        del self._gone[name]
        return "never began" if job.state is State.STOPPING else _LOST

    def stop(self, job: JobRow) -> None:
        """Take the step out of the queue, or ask its supervisor to end its program."""
        name = self._name(job)
        with self._lock:
            self._stopping.add(name)
        self._cancel(name)

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(_RefusedError):  # it has ended
            _asked("scancel", f"--name={name}", "--state=PENDING")
            _asked("scancel", f"--name={name}", "--signal=TERM", "--batch")

    def watch(self, job: JobRow, ended: Callable[[], None]) -> None:
        """Call ``ended`` from a thread when the present step is not in Slurm's queue any more."""
        with self._lock:
            self._watched[self._name(job)] = ended
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="slurm", daemon=True)
                self._thread.start()

    def _wait(self) -> None:
        while True:
            time.sleep(_EVERY)
            with contextlib.suppress(UnavailableError, OSError):
                queued = self._queue()
                with self._lock:
                    over = [name for name in self._watched if name not in queued]
                    told = [self._watched.pop(name) for name in over]
                    self._stopping &= queued
                    again = list(self._stopping)
                for name in again:  # it may have begun in between
                    self._cancel(name)
                for ended in told:
                    ended()

    def _name(self, job: JobRow) -> str:
        """Return the name of a step in Slurm, also if its folder was removed."""
        token, parts = self._places.token.read_text(), (str(job.id), str(job.submitted))
        return f"pgasdl-{signature(token, 'slurm', *parts, str(job.step))[:24]}"

    def _queue(self) -> frozenset[str]:
        """Return the names of batch jobs that wait or run."""
        moment, names = self._seen
        if time.monotonic() > moment + _EVERY / 2:
            try:
                told = _asked("squeue", "--noheader", "--all", "--format=%j")
            except _RefusedError as error:
                raise UnavailableError(f"Slurm does not answer: {error}") from error
            names = frozenset(told.split())
            self._seen = (time.monotonic(), names)
        return names


class _RefusedError(Exception):
    """A command of Slurm ended with an error, or did not end."""


def _asked(*words: str, given: str = "") -> str:
    """Return the output of a command of Slurm."""
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=_SILENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _RefusedError(f"{words[0]} did not end within {_SILENCE:g} s") from error
    if done.returncode:
        raise _RefusedError(" ".join(done.stderr.split()) or f"{words[0]}: {done.returncode}")
    return done.stdout
