"""Jobs on this machine: each step is a supervisor, a process that outlives the server.

Nothing here relies on process numbers, which are used again. A step runs as long as its lock is
held: the server takes it, and the supervisor and the launcher of the ranks inherit it, so it is
free when none of the three is left. The server asks the supervisor to stop through a named pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pgasdl.jobs import steps
from pgasdl.jobs.job import JobRow
from pgasdl.jobs.places import Places
from pgasdl.jobs.runner import Kind, Look, Lost
from pgasdl.jobs.supervisor import BEGUN, CONTROL, LOCK, MESSAGES, OUTCOME

_SUPERVISOR = "pgasdl.jobs.supervisor"
_LOST = Lost("its supervisor was killed, or the machine was started again")
_REAP = 10.0  # seconds for a supervisor whose lock is free to end


class LocalRunner:
    """Supervisors of ``pgasdl stage`` and ``pgasdl run`` on this machine."""

    resources: frozenset[str] = frozenset()

    def __init__(self, places: Places, root: Path) -> None:
        self._places = places
        self._root = root
        self._watched: set[tuple[int, int]] = set()
        self._processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def lay_out(self, job: JobRow, kind: Kind) -> None:
        """Make the folder of a step; see :class:`pgasdl.jobs.runner.Runner`."""
        request = job.request
        launcher = [*steps.PGASDL, "run", "-n", str(request.ranks), "--keep-going"]
        launcher += [f"--grace={request.grace}", "--"]
        steps.lay_out(self._places, self._root, job, kind, launcher)

    def start(self, job: JobRow, kind: Kind) -> None:
        """Start a supervisor for the present step."""
        step = self._places.step(job.id, job.step)
        with contextlib.ExitStack() as stack:
            lock = os.open(step / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.mkfifo(step / CONTROL, 0o600)
            # Open for both: with a writer there, the supervisor reads no end of file.
            control = os.open(step / CONTROL, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, control)
            messages = os.open(step / MESSAGES, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            stack.callback(os.close, messages)
            # From here on the step may have begun.
            steps.set_aside(step)
            self._processes[job.id, job.step] = subprocess.Popen(
                [sys.executable, "-P", "-m", _SUPERVISOR, str(step), str(lock)],
                stdin=control,
                stdout=messages,
                stderr=messages,
                # Else its launcher takes itself for a rank's, if this server is one.
                env={name: text for name, text in os.environ.items() if name != "PGASDL_RANK"},
                pass_fds=(lock,),
                cwd="/",
                start_new_session=True,
            )

    def look(self, job: JobRow) -> Look:
        """Return the state of the present step, by its lock and its files."""
        step = self._places.step(job.id, job.step)
        try:
            lock = _opened(step, LOCK, os.O_RDWR)
        except FileNotFoundError:
            return steps.outcome(step) or ("never began" if step.exists() else steps.REMOVED)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "runs"
        finally:
            os.close(lock)
        if outcome := steps.outcome(step):
            return outcome
        begun = (step / BEGUN).exists() or (step / OUTCOME).exists()
        return _LOST if begun else "never began"

    def stop(self, job: JobRow) -> None:
        """Ask the supervisor to end its program: SIGTERM, and after its grace SIGKILL."""
        step = self._places.step(job.id, job.step)
        # An error means that nobody reads, or that it was asked often enough.
        with contextlib.suppress(OSError):
            descriptor = _opened(step, CONTROL, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"stop\n")
            finally:
                os.close(descriptor)

    def watch(self, job: JobRow, ended: Callable[[], None]) -> None:
        """Call ``ended`` from a thread when the lock of the present step is free."""
        step = (job.id, job.step)
        if step not in self._watched:
            self._watched.add(step)
            threading.Thread(target=self._wait, args=(step, ended), daemon=True).start()

    def _wait(self, step: tuple[int, int], ended: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):  # its folder may be gone
            lock = _opened(self._places.step(*step), LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
            finally:
                os.close(lock)
        if process := self._processes.pop(step, None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP)
        self._watched.discard(step)
        ended()


def _opened(step: Path, name: str, flags: int) -> int:
    """Open the lock or pipe of a step; if its folder is gone, through its supervisor in /proc."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(step / name, flags)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = (process / "cmdline").read_text(errors="surrogateescape").split("\0")
            if words[-4:-2] == [_SUPERVISOR, str(step)] and process.stat().st_uid == os.geteuid():
                number = {LOCK: words[-2], CONTROL: "0"}[name]
                return os.open(process / "fd" / number, flags)
    raise FileNotFoundError(step)
