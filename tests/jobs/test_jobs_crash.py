"""kill -9 of the server in each state of a job, and of supervisors: the next one sees the truth."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jobs_harness import Server, children, kill_and_see_it_gone, supervisors
from support.leftovers import alive, gone
from support.patience import PATIENCE
from support.storage_server import Faults, StorageServer

from pgasdl.jobs import Client
from pgasdl.jobs.places import Places
from pgasdl.jobs.requests import JobRequest
from pgasdl.jobs.store import Store


def states(server: Server, job: int) -> list[str]:
    """All that a job has been in, in order."""
    return [event["state"] for event in server.client.events(job) if event["event"] == "state"]


def test_queued_and_running(server: Server) -> None:
    first = server.submit(ranks=2)
    ranks = server.ranks(first, 2)
    second = server.submit()
    assert server.client.show(second)["state"] == "queued"
    server.kill()
    assert all(map(alive, ranks))
    server.start()
    assert server.client.show(first)["state"] == "running"
    assert server.client.show(second)["state"] == "queued"
    assert server.ranks(first, 2) == ranks and all(map(alive, ranks))
    server.release(first)
    assert server.client.wait(first)["status"] == 0
    server.ranks(second)
    server.release(second, 3)
    ended = server.client.wait(second)
    assert (ended["state"], ended["status"]) == ("failed", 3)
    assert states(server, first) == [*states(server, second)[:-1], "done"]
    assert states(server, second) == ["queued", "running", "failed"]


def test_just_ended(server: Server) -> None:
    job = server.submit(ranks=2)
    supervised = server.supervisor(job) if server.ranks(job, 2) else 0
    server.kill()
    server.release(job, 7)
    assert gone([supervised])
    known = time.time()
    server.start()
    ended = server.client.wait(job)
    assert (ended["state"], ended["status"]) == ("failed", 7)
    assert ended["started"] <= ended["ended"] <= known


def test_an_outcome_that_is_damaged(server: Server) -> None:
    job = server.submit()
    server.ranks(job)
    supervised = server.supervisor(job)
    server.kill()
    server.release(job)
    assert gone([supervised])
    (server.places.step(job, 1) / "outcome.json").write_text('{"kind": "ru')
    server.start()
    assert server.client.wait(job)["state"] == "lost"


def test_stopping(server: Server) -> None:
    job = server.submit("held.py", "stubborn", grace=3600)
    ranks = server.ranks(job)
    assert server.client.stop(job)["state"] == "stopping"
    server.kill()
    server.start()
    assert server.client.show(job)["state"] == "stopping" and all(map(alive, ranks))
    server.release(job, 5)
    ended = server.client.wait(job)
    assert (ended["state"], ended["status"]) == ("stopped", 5)


def test_a_stop_that_the_supervisor_was_not_told_of(server: Server) -> None:
    job = server.submit(grace=0)
    ranks = server.ranks(job)
    server.kill()
    store = Store(server.places)
    store.stop(job)  # as if it were killed between its two halves
    store.close()
    server.start()
    assert server.client.wait(job)["state"] == "stopped" and gone(ranks)


def test_staging(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "records").mkdir(parents=True)
    (data / "records/0.bin").write_bytes(b"record")
    with StorageServer(data) as storage:
        path = "/records/0.bin"
        storage.faults[path] = Faults(stalls=1)
        stage = {"remote": [storage.url + path], "local": "staged", "format": "folder"}
        job = server.submit(stage=stage)
        assert storage.stalled.acquire(timeout=PATIENCE), server.log(job)
        assert server.client.show(job)["state"] == "staging"
        server.kill()
        server.start()
        assert server.client.show(job)["state"] == "staging"
        storage.release()
        server.ranks(job)
    assert list((server.root / "staged").iterdir())
    server.release(job)
    assert server.client.wait(job)["state"] == "done"
    assert states(server, job) == ["queued", "staging", "running", "done"]


def test_a_staging_that_ended_before_the_server_could_stop_it(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records/0.bin").write_bytes(b"record")
    with StorageServer(tmp_path) as storage:
        storage.faults["/records/0.bin"] = Faults(stalls=1)
        stage = {"remote": [f"{storage.url}/records/0.bin"], "local": "staged", "format": "folder"}
        job = server.submit(stage=stage)
        assert storage.stalled.acquire(timeout=PATIENCE), server.log(job)
        supervised = server.supervisor(job)
        server.kill()
        storage.release()
        assert gone([supervised])
    store = Store(server.places)
    store.stop(job)
    store.close()
    server.start()
    assert server.client.wait(job)["state"] == "stopped"
    assert states(server, job) == ["queued", "staging", "stopping", "stopped"]


def test_written_down_as_running_and_never_started(make_server: Callable[..., Server]) -> None:
    server = make_server()
    store = Store(server.places)
    job = store.add(JobRequest(("held.py",)))
    for step in (1, 2):
        server.places.step(job.id, step).mkdir(parents=True)
        (server.places.step(job.id, step) / "secret").write_bytes(b"it was laid out")
    store.move(job, job.state.RUNNING, step=1)  # as if it were killed before the next line
    store.close()
    server.start()
    server.ranks(job.id)
    server.release(job.id)
    assert server.client.wait(job.id)["state"] == "done"
    assert states(server, job.id) == ["queued", "running", "queued", "running", "done"]


def test_the_supervisor(server: Server) -> None:
    job = server.submit(ranks=2)
    ranks = server.ranks(job, 2)
    kill_and_see_it_gone(server.supervisor(job))
    ended = server.client.wait(job)
    assert ended["state"] == "lost" and "supervisor was killed" in ended["reason"]
    # Nothing of it is left when it is told to be lost, so that it may be started again.
    assert not any(map(alive, ranks))


def test_a_folder_that_is_removed(server: Server) -> None:
    """Its job runs on, once, for this server and the next; it can be stopped, and its end seen."""
    jobs = [server.submit(), server.submit()]
    ranks = [server.ranks(job)[0] for job in jobs]
    supervised = [server.supervisor(job) for job in jobs]
    shutil.rmtree(server.places.job(jobs[0]))
    server.kill()
    shutil.rmtree(server.places.job(jobs[1]).parent)
    server.start()
    last = server.submit(ranks=2)
    assert [server.client.show(job)["state"] for job in jobs] == ["running"] * 2
    assert sorted(supervisors(server.places.file.parent)) == sorted(supervised)
    for job, rank in zip(jobs, ranks, strict=True):
        server.client.stop(job)
        assert server.client.wait(job)["state"] == "stopped" and gone([rank])
        assert states(server, job) == ["queued", "running", "stopping", "stopped"]
    server.ranks(last, 2)
    shutil.rmtree(server.places.job(last))
    kill_and_see_it_gone(server.supervisor(last))
    ended = server.client.wait(last)
    assert ended["state"] == "lost" and "its folder was removed" in ended["reason"]


def test_a_job_is_not_lost_before_its_last_process_is_gone(server: Server) -> None:
    """Else a job that is started again would meet what is left of itself."""
    job = server.submit()
    ranks = server.ranks(job)
    guard = server.launcher(job)
    (launcher,) = children(guard)
    os.kill(launcher, signal.SIGSTOP)
    kill_and_see_it_gone(server.supervisor(job))
    assert gone([guard])
    other = server.submit()  # when it runs, the server has looked at the first one
    server.ranks(other)
    assert server.client.show(job)["state"] == "running" and all(map(alive, ranks))
    os.kill(launcher, signal.SIGCONT)
    assert server.client.wait(job)["state"] == "lost" and not any(map(alive, ranks))


def test_the_supervisor_while_there_is_no_server(server: Server) -> None:
    job = server.submit(ranks=2, restarts=1)
    ranks = server.ranks(job, 2)
    server.kill()
    kill_and_see_it_gone(server.supervisor(job))
    assert gone(ranks)
    server.start()
    again = server.ranks(job, 4)[2:]
    assert all(map(alive, again))
    assert server.client.show(job)["restarts_left"] == 0
    server.kill()
    kill_and_see_it_gone(server.supervisor(job))
    server.start()
    assert server.client.wait(job)["state"] == "lost"
    assert server.client.restart(job)["restarts_left"] == 1


def test_a_client_that_waits_outlives_the_server(server: Server) -> None:
    """A new one answers at another port."""
    job = server.submit()
    server.ranks(job)
    client = Client.find(str(server.places.file))
    events = client.events(job)
    assert [next(events)["state"] for _ in range(2)] == ["queued", "running"]
    pieces = client.follow(job)
    written = next(pieces)
    server.kill()
    server.start()
    server.release(job)
    assert [event["state"] for event in events if event["event"] == "state"] == ["done"]
    assert written + b"".join(pieces) == server.client.log(job)


def test_the_numbers_of_jobs_go_on(make_server: Callable[..., Server]) -> None:
    server = make_server()
    for number in (1, 2):
        store = Store(Places(server.places.file))
        assert store.add(JobRequest(("held.py",))).id == number
        store.close()
