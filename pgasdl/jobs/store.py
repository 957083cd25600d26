"""The jobs and their events: one SQLite file, which one server at a time uses."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pgasdl.errors import ConfigError, JobError, UnavailableError
from pgasdl.jobs.job import ACTIVE, ENDED, NEXT, Event, JobRow, State
from pgasdl.jobs.places import Places
from pgasdl.jobs.requests import JobRequest
from pgasdl.jobs.telemetry import TABLES

_BYTES = 256 << 10  # some rows of the database, its log of them and its index


class Reserve:
    """A file that takes up space until that space is needed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def keep(self) -> None:
        """Set the space aside, unless it is, or the disk is full."""
        with contextlib.suppress(OSError):
            if self._file.exists() and self._file.stat().st_size >= _BYTES:
                return
            descriptor = os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BYTES)
            except OSError:
                self._file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Free the space; False: it was not there."""
        try:
            self._file.unlink()
        except OSError:
            return False
        return True


_VERSION = 2
_TRIES = 20
_TABLES = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    status INTEGER,
    submitted REAL NOT NULL,
    queued REAL NOT NULL,
    started REAL,
    ended REAL,
    step INTEGER NOT NULL DEFAULT 0,
    restarts_left INTEGER NOT NULL,
    request TEXT NOT NULL
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, queued);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_job ON events (job, id);
"""
_COLUMNS = (
    "id, state, reason, status, submitted, queued, started, ended, step, restarts_left, request"
)


class Store:
    """The file; every method may be called by any thread.

    UnavailableError: another server uses the file. ConfigError: it is no file of this version of
    pgasdl, or cannot be opened.
    """

    def __init__(self, places: Places) -> None:
        self._mutex = threading.Lock()
        self._reserve = Reserve(places.reserve)
        try:
            places.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            places.require_private()
            self._lock = os.open(places.lock, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"--file {places.file}: {error.strerror}") from error
        if not _locked(self._lock):
            os.close(self._lock)
            raise UnavailableError(
                f"another job server uses {places.file}: stop it, or give --file another"
            )
        try:
            self._database = _opened(places)
        except BaseException:
            os.close(self._lock)
            raise
        self._reserve.keep()

    def close(self) -> None:
        """Let another server use the file."""
        with self._mutex:
            self._database.close()
            os.close(self._lock)

    # --- reading

    def job(self, job: int) -> JobRow:
        """Return a job; JobError with status 404: there is none."""
        rows = self._jobs("WHERE id = ?", job)
        if not rows:
            raise JobError(f"there is no job {job}", 404)
        return rows[0]

    def newest(self, limit: int, before: int, state: str = "") -> list[JobRow]:
        """Return jobs by falling id, those below ``before``, of any or of one state."""
        clause = "WHERE id < ? AND (? = '' OR state = ?) ORDER BY id DESC LIMIT ?"
        return self._jobs(clause, before, state, state, limit)

    def active(self) -> list[JobRow]:
        """Return the jobs that hold slots."""
        marks = ", ".join("?" for _ in ACTIVE)
        return self._jobs(f"WHERE state IN ({marks}) ORDER BY id", *ACTIVE)

    def first(self, but: Collection[int] = ()) -> JobRow | None:
        """Return the job whose turn it is, but for some that wait."""
        marks = ", ".join("?" for _ in but)
        clause = f"WHERE state = ? AND id NOT IN ({marks}) ORDER BY queued, id LIMIT 1"
        return next(iter(self._jobs(clause, State.QUEUED, *but)), None)

    def events(self, job: int, after: int = 0) -> list[Event]:
        """Return the events of a job with ids above ``after``."""
        return self._events("job = ? AND id > ? ORDER BY id", job, after)

    def last_events(self, job: int, limit: int) -> list[Event]:
        """Return the last events of a job."""
        return self._events("job = ? ORDER BY id DESC LIMIT ?", job, limit)[::-1]

    def events_of_all(self, after: int) -> list[Event]:
        """Return the events of all jobs with ids above ``after``."""
        return self._events("id > ? ORDER BY id", after)

    def last_event(self) -> int:
        """Return the id of the last event of all; 0: there is none."""
        with self._mutex:
            found = self._database.execute("SELECT max(id) FROM events").fetchone()[0]
        return int(found or 0)

    def _events(self, clause: str, *values: int) -> list[Event]:
        sql = f"SELECT id, job, time, kind, body FROM events WHERE {clause}"  # noqa: S608
        with self._mutex:
            rows = self._database.execute(sql, values).fetchall()
        return [Event(id, job, time, kind, json.loads(body)) for id, job, time, kind, body in rows]

    # --- writing

    def add(self, request: JobRequest) -> JobRow:
        """Put a new job at the end of the queue."""
        now = time.time()
        document = json.dumps(request.as_json())
        with self._writing() as database:
            cursor = database.execute(
                "INSERT INTO jobs (state, submitted, queued, restarts_left, request)"
                " VALUES (?, ?, ?, ?, ?)",
                (State.QUEUED, now, _turn(database), request.restarts, document),
            )
            job = cursor.lastrowid
            assert job is not None
            _note(database, job, now, State.QUEUED, "", None)
        return self.job(job)

    def move(self, job: JobRow, to: State, reason: str = "", **columns: Any) -> JobRow:
        """Move a job from the state in which the caller saw it to another.

        JobError with status 409: it is in another state now, or in another step.
        """

        def decide(now: JobRow) -> State:
            if (now.state, now.step) != (job.state, job.step):
                raise JobError(f"job {job.id} is {now.state} now, not {job.state}", 409)
            return to

        return self._decided(job.id, decide, reason, columns)

    def stop(self, job: int) -> JobRow:
        """Ask for the end of a job; JobError with status 409: it has ended."""

        def decide(now: JobRow) -> State:
            if now.state in ENDED:
                raise JobError(f"job {job} is {now.state} already", 409)
            return State.STOPPED if now.state is State.QUEUED else State.STOPPING

        return self._decided(job, decide, "its user stopped it", {})

    def restart(self, job: int) -> JobRow:
        """Put a job that has ended into the queue again; JobError with status 409: it has not."""

        def decide(now: JobRow) -> State:
            if now.state not in ENDED:
                raise JobError(f"job {job} is {now.state}: stop it first", 409)
            columns["restarts_left"] = now.request.restarts
            return State.QUEUED

        columns: dict[str, Any] = {}
        return self._decided(job, decide, "its user started it again", columns)

    def _decided(
        self, job: int, decide: Callable[[JobRow], State], reason: str, columns: dict[str, Any]
    ) -> JobRow:
        """Look at a job and change its state, in one transaction."""
        spared = False
        while True:
            try:
                with self._writing() as database:
                    now = _read(database, "WHERE id = ?", (job,))
                    if not now:
                        raise JobError(f"there is no job {job}", 404)
                    to = decide(now[0])
                    if to is not now[0].state:
                        assert to in NEXT[now[0].state], f"{now[0].state} -> {to}"
                        _change(database, job, to, reason, columns)
                self._reserve.keep()
                return self.job(job)
            except sqlite3.OperationalError:
                # On a full disk the reserve has room for the reports of running jobs.
                if spared or not self._reserve.give_up():
                    raise
                spared = True

    def transaction(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Return a transaction for other modules that write and read rows of jobs."""
        return self._writing()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Let other modules read rows of jobs."""
        with self._mutex:
            yield self._database

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _jobs(self, clause: str, *values: Any) -> list[JobRow]:
        with self._mutex:
            return _read(self._database, clause, values)


def _read(database: sqlite3.Connection, clause: str, values: Iterable[Any]) -> list[JobRow]:
    rows = database.execute(f"SELECT {_COLUMNS} FROM jobs {clause}", tuple(values))  # noqa: S608
    return [_job(*row) for row in rows.fetchall()]


def _job(id: int, state: str, *columns: Any) -> JobRow:
    *others, request = columns
    fields = dict(zip(_COLUMNS.split(", ")[2:-1], others, strict=True))
    return JobRow(id, State(state), request=JobRequest.from_stored(json.loads(request)), **fields)


def _change(
    database: sqlite3.Connection, job: int, to: State, reason: str, columns: dict[str, Any]
) -> None:
    now = time.time()
    columns = {"state": to, "reason": reason} | columns
    if to is State.QUEUED:
        fresh = {"queued": _turn(database), "started": None, "ended": None, "status": None}
        columns = fresh | columns
    elif to in ENDED:
        columns.setdefault("ended", now)
    names = ", ".join(f"{name} = ?" for name in columns)
    database.execute(f"UPDATE jobs SET {names} WHERE id = ?", (*columns.values(), job))  # noqa: S608
    _note(database, job, now, to, reason, columns.get("status"))


def _turn(database: sqlite3.Connection) -> int:
    """Return the next place in the queue, by what happened: clocks go back."""
    found: int = database.execute("SELECT coalesce(max(id), 0) + 1 FROM events").fetchone()[0]
    return found


def _note(
    database: sqlite3.Connection, job: int, now: float, to: State, reason: str, status: int | None
) -> None:
    body = json.dumps({"state": to, "reason": reason, "status": status})
    database.execute(
        "INSERT INTO events (job, time, kind, body) VALUES (?, ?, 'state', ?)", (job, now, body)
    )


def _locked(lock: int) -> bool:
    """Take the lock; a client that checks for a server may hold it for a moment, so try again."""
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _opened(places: Places) -> sqlite3.Connection:
    try:
        # Requests hold environments: they are the user's alone.
        os.close(os.open(places.file, os.O_CREAT | os.O_RDWR, 0o600))
        if places.file.stat().st_nlink > 1:
            raise ConfigError(
                f"--file {places.file} has another name, too (a hard link): remove it"
            )
        database = sqlite3.connect(places.file, check_same_thread=False, isolation_level=None)
        try:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version not in (0, _VERSION) or (version == 0 and tables):
                raise ConfigError(f"--file {places.file} is no file of this version's job server")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute("PRAGMA foreign_keys = ON")
            if not tables:
                database.executescript(
                    f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;"
                )
            database.executescript(TABLES)
        except BaseException:
            database.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--file {places.file}: {error}") from error
    return database
