"""The file of a server: changes of state, and what is wrong with it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jobs_harness import Server, ask
from support.patience import until
from support.requiring import lacking

from pgasdl import ConfigError, JobError
from pgasdl.jobs import Client, problems, telemetry
from pgasdl.jobs.job import ENDED, NEXT, Event, State
from pgasdl.jobs.operations import CheckedRequest
from pgasdl.jobs.places import Places
from pgasdl.jobs.protocol_routes import Protocol
from pgasdl.jobs.requests import JobRequest, Stage
from pgasdl.jobs.store import Store
from pgasdl.jobs.watching import Watching


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(Places(tmp_path / "jobs.db"))
    yield found
    found.close()


def test_a_change_looks_at_the_state_before(store: Store) -> None:
    queued = store.add(JobRequest(("a.py",)))
    running = store.move(queued, State.RUNNING, step=1)
    for stale in (queued, store.move(running, State.STOPPING), running):
        if stale.state is not State.STOPPING:
            with pytest.raises(JobError, match="is stopping now") as refused:
                store.move(stale, State.FAILED)
            assert refused.value.status == 409
    assert [event.body["state"] for event in store.events(1)] == ["queued", "running", "stopping"]


def test_a_change_looks_at_the_step_before(store: Store) -> None:
    first = store.move(store.add(JobRequest(("a.py",))), State.RUNNING, step=1)
    store.move(store.move(first, State.QUEUED), State.RUNNING, step=2)
    with pytest.raises(JobError, match="is running now"):
        store.move(first, State.FAILED)


def test_no_way_leads_past_a_state(store: Store) -> None:
    ways = [(a, b) for a, b in product(State, State) if a != b and b not in NEXT[a]]
    assert (State.DONE, State.RUNNING) in ways and (State.QUEUED, State.DONE) in ways
    done = store.move(store.move(store.add(JobRequest(("a.py",))), State.RUNNING), State.DONE)
    with pytest.raises(AssertionError):
        store.move(done, State.RUNNING)
    assert store.job(1).state is State.DONE
    assert all(NEXT[state] == (State.QUEUED,) for state in ENDED)


def test_the_turn_of_a_job(store: Store) -> None:
    """Whatever comes back waits behind the others."""
    first, second = (store.add(JobRequest((name,))) for name in ("a.py", "b.py"))
    assert store.first() == first
    store.stop(first.id)
    assert store.first() == second
    again = store.restart(first.id)
    assert (again.started, again.ended, again.status) == (None, None, None)
    assert store.first() == second
    store.stop(second.id)
    assert store.first() == again


def test_a_clock_that_goes_back_changes_no_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.add(JobRequest(("a.py",)))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    second = store.add(JobRequest(("b.py",)))
    assert store.first() == first and store.first([first.id]) == second


def test_a_request_is_kept_as_it_was(store: Store) -> None:
    request = JobRequest(
        ("-m", "a", "\u00e9"), 3, "n", "f", {"A": "b"}, 4, 5, Stage(("r",), "l", "x", "1G")
    )
    assert store.add(request).request == request
    assert JobRequest.from_json(json.loads(json.dumps(request.as_json()))) == request


def test_a_stream_ends_after_its_last_event(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the job ends between two looks at the file."""
    job = store.move(store.add(JobRequest(("a.py",))), State.RUNNING)
    read = store.events

    def events(job_id: int, after: int = 0) -> list[Event]:
        found = read(job_id, after)
        if store.job(job_id).state is State.RUNNING:
            store.move(job, State.DONE)
        return found

    monkeypatch.setattr(store, "events", events)
    places = Places(tmp_path / "jobs.db")
    watching = Watching(store, Protocol(store), places, 1)

    async def messages() -> str:
        request: Any = None
        answer: Any = await watching.events(request, CheckedRequest(job.id, {"after": 0}, None))
        return "".join([message async for message in answer.body_iterator])

    told = asyncio.run(messages())
    assert re.findall("event: (.*)", told) == ["state", "state", "log", "state", "end"]


def test_what_a_restart_undid_goes(store: Store) -> None:
    """A job goes on from its checkpoint: what it had told of later iterations was another run's."""
    job = store.add(JobRequest(("a.py",))).id

    def tell(time: float, *iterations: int, name: str = "loss") -> None:
        numbers = {name: 0.5}
        with store.transaction() as database:
            messages = [{"iteration": n, "time": time, "numbers": numbers} for n in iterations]
            telemetry.add_metrics(database, job, messages)

    def told(name: str = "loss", limit: int = 100) -> list[int]:
        with store.reading() as database:
            return [each[0] for each in telemetry.thinned(database, job, name, 0, limit)]

    store.move(store.job(job), State.RUNNING, step=1)
    tell(101.0, *range(10))
    tell(101.0, 3, name="accuracy")
    tell(102.0, 5)  # of this run: one message late
    assert told() == list(range(10)) and told(limit=3) == [2, 5, 9]
    store.move(store.job(job), State.FAILED)
    store.restart(job)
    store.move(store.job(job), State.RUNNING, step=2)
    tell(51.0, 4, 5)  # its clock has gone back
    assert told() == list(range(6)) and told("accuracy") == [3]


def test_a_file_of_another_version(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.places.file.parent.mkdir()
    with sqlite3.connect(server.places.file) as database:
        database.execute("PRAGMA user_version = 1")
    before = server.places.file.read_bytes()
    with pytest.raises(AssertionError, match="no file of this version's job server"):
        server.start()
    assert server.places.file.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (sqlite3.SQLITE_FULL, 507),
        (sqlite3.SQLITE_IOERR_WRITE, 507),
        (sqlite3.SQLITE_CORRUPT, 500),
        (sqlite3.SQLITE_NOTADB, 500),
        (OSError(errno.ENOSPC, "full"), 507),
        (OSError(errno.EMFILE, "too many"), 500),
    ],
)
def test_only_a_full_disk_is_one(error: int | OSError, status: int) -> None:
    if isinstance(error, int):
        code, error = error, sqlite3.DatabaseError("it fails")
        error.sqlite_errorcode = code
    request: Any = None
    assert problems.of_storage(request, error).status_code == status


def test_a_damaged_row_is_told(make_server: Callable[..., Server]) -> None:
    """The server says so, and goes on answering."""
    server = make_server()
    store = Store(server.places)
    store.add(JobRequest(("held.py",)))
    store.close()
    with sqlite3.connect(server.places.file) as database:
        database.execute("UPDATE jobs SET request = '{'")
    database.close()
    server.start()
    assert until(lambda: ask(server, "GET", "/readyz")[0] == 503)
    told = ask(server, "GET", "/readyz")[2]
    assert "a fault of the server: JSONDecodeError" in told["detail"]
    status, _, told = ask(server, "GET", "/api/v1/jobs/1")
    assert (status, told["detail"]) == (500, "a fault of the server: JSONDecodeError")
    assert ask(server, "GET", "/livez")[0] == 200
    assert "Traceback" in server.end()


@pytest.mark.parametrize("how", ["another user's", "theirs too", "below theirs", "by a link"])
def test_a_file_that_others_can_exchange_is_refused(tmp_path: Path, how: str) -> None:
    """Its commands run as this user, and the token goes where its address says."""
    folder = tmp_path / "above/state"
    folder.mkdir(parents=True)
    places = Places(folder / "jobs.db")
    Store(places).close()
    places.url.write_text("http://127.0.0.1:1")
    if how == "another user's":
        if os.geteuid() != 0:
            lacking("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    elif how == "below theirs":
        folder.parent.chmod(0o777)
    else:
        folder.chmod(0o777)
    if how == "by a link":
        (tmp_path / "link").symlink_to(folder)
        places = Places(tmp_path / "link/jobs.db")
    with pytest.raises(ConfigError, match="only you can write to"):
        Store(places)
    with pytest.raises(ConfigError, match="only you can write to"):
        Client.find(str(places.file))
    folder.parent.chmod(0o1777)  # sticky: nobody renames what is not theirs
    os.chown(folder, os.geteuid(), os.getegid())
    folder.chmod(0o755)
    Store(places).close()
