"""Jobs on this machine: each step is a supervisor, a process that outlives the server.

Nothing here goes by the number of a process, which another may have by now. A step runs as long as
its lock is held: the server takes it, and the supervisor and the launcher of the ranks inherit it,
so it is free when none of the three is left. A word to the supervisor goes through a named pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pgasdl.jobs import secret
from pgasdl.jobs.job import Job
from pgasdl.jobs.places import Places, folder_of, inside, program_of
from pgasdl.jobs.runner import Kind, Look, Outcome
from pgasdl.jobs.supervisor import BEGUN, COMMAND, CONTROL, LOCK, MESSAGES, OUTCOME

_OUTCOME_BYTES = 4096
_REAP = 10.0  # seconds for a supervisor whose lock is free to end


class LocalRunner:
    """Supervisors of ``pgasdl stage`` and ``pgasdl run`` on this machine."""

    def __init__(self, places: Places, root: Path) -> None:
        self._places = places
        self._root = root
        self._watched: set[tuple[int, int]] = set()
        self._processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, job: Job, kind: Kind) -> None:
        """Start a supervisor for the present step; see :class:`pgasdl.jobs.runner.Runner`."""
        command = self._command(job, kind)
        step = self._places.step(job.id, job.step)
        own = (self._places.own(job.id), self._places.records(job.id))
        for folder in (step.parent.parent, step.parent, step, *own):
            folder.mkdir(mode=0o700, exist_ok=True)
        secret.write(self._places, job.id)
        (step / COMMAND).write_text(json.dumps(command), encoding="utf-8")
        with contextlib.ExitStack() as stack:
            lock = os.open(step / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.mkfifo(step / CONTROL, 0o600)
            # Open for both, so that there is always a writer and the supervisor reads no end.
            control = os.open(step / CONTROL, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, control)
            messages = os.open(step / MESSAGES, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            stack.callback(os.close, messages)
            # From here on it may have begun.
            _set_aside(step / BEGUN)
            self._processes[job.id, job.step] = subprocess.Popen(
                [sys.executable, "-P", "-m", "pgasdl.jobs.supervisor", str(step), str(lock)],
                stdin=control,
                stdout=messages,
                stderr=messages,
                pass_fds=(lock,),
                cwd="/",
                start_new_session=True,
            )

    def look(self, job: Job) -> Look:
        """Tell by its lock and its files what is known of the present step."""
        step = self._places.step(job.id, job.step)
        try:
            lock = os.open(step / LOCK, os.O_RDWR)
        except FileNotFoundError:
            return "never began"
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "runs"
        finally:
            os.close(lock)
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # or it is damaged
            return Outcome.from_json(json.loads((step / OUTCOME).read_bytes()))
        begun = (step / BEGUN).exists() or (step / OUTCOME).exists()
        return "lost" if begun else "never began"

    def stop(self, job: Job) -> None:
        """Ask the supervisor to end its program: SIGTERM, and after its grace SIGKILL."""
        control = self._places.step(job.id, job.step) / CONTROL
        # Without a reader, or with more words than it takes, there is nothing to ask.
        with contextlib.suppress(OSError):
            descriptor = os.open(control, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"stop\n")
            finally:
                os.close(descriptor)

    def watch(self, job: Job, ended: Callable[[], None]) -> None:
        """Call ``ended`` from a thread when the lock of the present step is free."""
        step = (job.id, job.step)
        if step not in self._watched:
            self._watched.add(step)
            threading.Thread(target=self._wait, args=(step, ended), daemon=True).start()

    def _wait(self, step: tuple[int, int], ended: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # its folder may be gone
            lock = os.open(self._places.step(*step) / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
            finally:
                os.close(lock)
        if process := self._processes.pop(step, None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP)
        self._watched.discard(step)
        ended()

    def _command(self, job: Job, kind: Kind) -> dict[str, Any]:
        """Return what the supervisor reads; the paths are looked at again, now."""
        request = job.request
        folder = folder_of(self._root, request.folder)
        pgasdl = [sys.executable, "-P", "-m", "pgasdl"]
        if kind == "stage":
            assert request.stage is not None
            local = inside(self._root, request.stage.local, "stage.local", base=folder)
            words = [*pgasdl, "stage", f"--local={local}"]
            words += [f"--format={request.stage.format}"] if request.stage.format else []
            words += [f"--limit={request.stage.limit}"] if request.stage.limit else []
            words += ["--", *request.stage.remote]
        else:
            program = program_of(self._root, folder, request.program)
            words = [*pgasdl, "run", "-n", str(request.ranks), "--keep-going"]
            words += [f"--grace={request.grace}", "--", *program]
        trace = {"PGASDL_TRACE": str(self._places.records(job.id))}
        own = {
            "PGASDL_JOB_FOLDER": str(self._places.own(job.id)),
            "PGASDL_JOB_LINK": str(self._places.link(job.id)),
        }
        return {
            "kind": kind,
            "words": words,
            "folder": str(folder),
            "environment": {**trace, **request.environment, **own},
            "log": str(self._places.log(job.id)),
            "grace": request.grace,
        }


def _set_aside(file: Path) -> None:
    """Take the space of the outcome before anything starts: the disk may be full later."""
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _OUTCOME_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
