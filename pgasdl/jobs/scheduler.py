"""The thread that leads jobs from one state to the next.

In each pass it compares each job's state in the file with the state of its step, then starts jobs
that fit. So a server that is started again after a crash has nothing special to do.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from dataclasses import replace
from typing import Any

from pgasdl.errors import JobError, UnavailableError
from pgasdl.jobs.job import JobRow, State
from pgasdl.jobs.requests import JobRequest
from pgasdl.jobs.runner import Kind, Lost, Runner, StepEnd
from pgasdl.jobs.schema import refused
from pgasdl.jobs.store import Store

_LOG = logging.getLogger("pgasdl.jobs")
_AGAIN = 1.0  # seconds until it tries again what could not be done
_LONGEST = 60.0  # seconds from the end of a job to its next start, which doubles each time
_LACKING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # for now


class Scheduler:
    """Slots for ranks, and whose turn it is: first in, first out."""

    def __init__(self, store: Store, runner: Runner, slots: int) -> None:
        self._store = store
        self._runner = runner
        self.slots = slots
        self._wake = threading.Event()
        self._closed = False
        self._trouble = ""
        self._pauses: dict[int, float] = {}  # until when jobs in the queue are not started
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.wake()
        self._thread.start()

    def accept(self, request: JobRequest) -> None:
        """Raise JobError with status 422, which names the reason, if a request cannot run here."""
        if request.ranks > self.slots:
            raise refused("ranks", f"{request.ranks}; the server has {self.slots} slots")
        for name in request.resources:
            if name not in self._runner.resources:
                raise refused(f"resources.{name}", "only a server with --slurm takes it")

    def wake(self, job: int = 0) -> None:
        """Wake the thread, as something has changed; ``job``: a user has changed this job."""
        self._pauses.pop(job, None)
        self._wake.set()

    def close(self) -> None:
        """End the thread; jobs run on."""
        self._closed = True
        self.wake()
        self._thread.join()

    @property
    def trouble(self) -> str:
        """Why jobs neither start nor end at present; "" if they do."""
        return self._trouble if self._thread.is_alive() else "the scheduler has ended"

    def _loop(self) -> None:
        while True:
            self._wake.wait(_AGAIN if self._trouble or self._pauses else None)
            self._wake.clear()
            if self._closed:
                return
            try:
                self._pass()
                self._trouble = ""
            except JobError:
                self.wake()  # a client was faster: look again
            except UnavailableError as error:
                self._tell(str(error))
            except sqlite3.Error as error:
                self._tell(f"the jobs' states cannot be written, for now: {error}")
            except OSError as error:
                self._tell(f"no job can be started, for now: {error}")
            except Exception as error:  # other jobs still need the thread
                self._tell(f"a fault of the server: {error!r}")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            _LOG.error(trouble, exc_info=trouble.startswith("a fault"))
        self._trouble = trouble

    def _pass(self) -> None:
        for job in self._store.active():
            self._look_after(job)
        while (first := self._store.first(self._paused())) is not None:
            ranks = first.request.ranks
            if ranks > self.slots:
                reason = f"{ranks} ranks; the server has {self.slots} slots now"
                self._store.move(first, State.FAILED, reason)
            elif ranks > self.slots - sum(job.request.ranks for job in self._store.active()):
                return
            else:
                self._begin(first, "run" if first.request.stage is None else "stage")

    def _paused(self) -> list[int]:
        now = time.monotonic()
        return [job for job, until in list(self._pauses.items()) if until > now]

    def _look_after(self, job: JobRow) -> None:
        stopping = job.state is State.STOPPING
        match self._runner.look(job):
            case "runs":
                if stopping:
                    self._runner.stop(job)
                self._runner.watch(job, self.wake)
            case "never began" if stopping:
                self._store.move(job, State.STOPPED, job.reason)
            case "never began":
                reason = "the server ended before it could start the job"
                self._store.move(job, State.QUEUED, reason)
            case Lost(reason) if stopping:
                self._store.move(job, State.LOST, f"{job.reason}; {reason}")
            case Lost(reason):
                self._fail(job, State.LOST, reason, {})
            case StepEnd() as outcome:
                self._settle(job, outcome)

    def _settle(self, job: JobRow, outcome: StepEnd) -> None:
        """Move a job whose step has ended to its next state."""
        columns: dict[str, Any] = {"status": outcome.status, "ended": outcome.ended}
        stopping = job.state is State.STOPPING
        staged = outcome.kind == "stage" and outcome.status == 0
        if stopping and (outcome.stopped or staged):
            self._store.move(job, State.STOPPED, job.reason, **columns)
        elif outcome.stopped:  # as when the machine is shut down
            self._fail(job, State.STOPPED, "a signal stopped its supervisor", columns)
        elif outcome.reason or outcome.status != 0:
            what = "its program" if outcome.kind == "run" else "pgasdl stage"
            last = f": {outcome.last}" if outcome.last else ""
            why = outcome.reason or f"{what} ended with {outcome.status}{last}"
            self._fail(job, State.FAILED, why, columns)
        elif staged:
            self._begin(job, "run")
        else:
            self._store.move(job, State.DONE, **columns)

    def _fail(self, job: JobRow, state: State, reason: str, columns: dict[str, Any]) -> None:
        """Queue a failed job again, if restarts are left, or end it."""
        if job.restarts_left and job.state is not State.STOPPING:
            reason = f"started again: {reason}"
            self._store.move(job, State.QUEUED, reason, restarts_left=job.restarts_left - 1)
            pause = min(_LONGEST, _AGAIN * 2 ** min(6, job.request.restarts - job.restarts_left))
            self._pauses[job.id] = time.monotonic() + pause
        else:
            self._store.move(job, state, reason, **columns)

    def _begin(self, job: JobRow, kind: Kind) -> None:
        """Start the next step of a job."""
        state = State.STAGING if kind == "stage" else State.RUNNING
        started = job.started or time.time()
        self._pauses.pop(job.id, None)
        now = job
        try:
            self._runner.lay_out(replace(job, step=job.step + 1), kind)
            now = self._store.move(job, state, step=job.step + 1, started=started)
            self._runner.start(now, kind)
        except (OSError, JobError) as error:
            if isinstance(error, OSError) and error.errno in _LACKING:
                if now is not job:
                    self._store.move(now, State.QUEUED, str(error), queued=job.queued)
                raise
            _LOG.warning("job %d cannot be started: %s", job.id, error)
            self._store.move(now, State.FAILED, f"cannot be started: {error}")
        else:
            self._runner.watch(now, self.wake)
