"""When the scheduler starts a job, and when it does not: without processes."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pgasdl.jobs.job import JobRow, State
from pgasdl.jobs.places import Places
from pgasdl.jobs.requests import JobRequest
from pgasdl.jobs.runner import Kind, Look, StepEnd
from pgasdl.jobs.scheduler import Scheduler
from pgasdl.jobs.store import Store


class Runner:
    """Jobs that fail as soon as they are started; starts may fail, too."""

    resources: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.started: list[int] = []
        self.lacks = 0

    def lay_out(self, job: JobRow, kind: Kind) -> None:
        pass

    def start(self, job: JobRow, kind: Kind) -> None:
        if self.lacks:
            raise OSError(self.lacks, "too few")
        self.started.append(job.id)

    def look(self, job: JobRow) -> Look:
        return StepEnd("run", 1, stopped=False, reason="", ended=time.time())

    def stop(self, job: JobRow) -> None:
        raise AssertionError(job)

    def watch(self, job: JobRow, ended: Callable[[], None]) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(Places(tmp_path / "jobs.db"))
    yield found
    found.close()


def test_pauses_before_restarts_grow(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    runner = Runner()
    scheduler = Scheduler(store, runner, 1)
    store.add(JobRequest(("a.py",), restarts=8))
    starts: list[float] = []
    while len(starts) < 9:
        scheduler._pass()
        starts += [clock[0]] * (len(runner.started) - len(starts))
        clock[0] += 0.5
    # After half a second it has failed, and a second later it is started again, then two.
    assert [b - a - 0.5 for a, b in pairwise(starts)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_nobody_else_waits_for_a_pause(store: Store) -> None:
    runner = Runner()
    scheduler = Scheduler(store, runner, 1)
    store.add(JobRequest(("a.py",), restarts=1))
    scheduler._pass()
    scheduler._pass()
    store.add(JobRequest(("b.py",)))
    scheduler._pass()
    assert runner.started == [1, 2]


def test_a_user_waits_for_no_pause(store: Store) -> None:
    runner = Runner()
    scheduler = Scheduler(store, runner, 1)
    job = store.add(JobRequest(("a.py",), restarts=1)).id
    for _ in range(3):
        scheduler._pass()
    assert runner.started == [job] and store.job(job).state is State.QUEUED
    store.stop(job)
    store.restart(job)
    scheduler.wake(job)
    scheduler._pass()
    assert runner.started == [job, job]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EAGAIN])
def test_what_is_lacking_for_now_fails_no_job(store: Store, error: int) -> None:
    runner = Runner()
    scheduler = Scheduler(store, runner, 1)
    jobs = [store.add(JobRequest((name,))).id for name in ("a.py", "b.py")]
    runner.lacks = error
    for _ in range(2):
        with pytest.raises(OSError, match="too few"):
            scheduler._pass()
    assert {store.job(job).state for job in jobs} == {State.QUEUED}
    runner.lacks = 0
    scheduler._pass()
    assert runner.started == jobs[:1]  # it is still its turn
    runner.lacks = errno.ENOENT
    scheduler._pass()
    assert [store.job(job).state for job in jobs] == [State.FAILED, State.FAILED]
