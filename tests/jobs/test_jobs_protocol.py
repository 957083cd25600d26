"""Users talk to jobs that train: real servers, real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from jobs_harness import Server, ask
from support.leftovers import gone
from support.patience import PATIENCE, until
from support.places import APPS
from support.requiring import require_modules

from pgasdl import JobError
from pgasdl.jobs.link import Link
from pgasdl.jobs.messages import Metrics

FOR_EVER = str(10**9)


def started(server: Server, *words: str, ranks: int, **request: Any) -> int:
    """A job of ``obeys.py`` whose ranks have all said which processes they are."""
    require_modules("torch")
    job = server.submit("obeys.py", *words, ranks=ranks, **request)
    server.ranks(job, ranks)
    return job


def told(server: Server, job: int, *, of: str = "") -> dict[int, list[tuple[int, str]]]:
    """What each rank did when."""
    found: dict[int, list[tuple[int, str]]] = {}
    for rank, iteration, what in re.findall(r"rank (\d+) at (\d+): (.*)", server.log(job)):
        if what.startswith(of) and not what.startswith("process"):
            found.setdefault(int(rank), []).append((int(iteration), what))
    return found


def events(server: Server, job: int) -> list[tuple[str, str]]:
    """The events that the job has told so far, by the server's file."""
    with server_database(server) as rows:
        return [
            (body["name"], body["text"])
            for body in map(json.loads, rows("SELECT body FROM events WHERE kind = 'event'"))
        ]


def server_database(server: Server) -> Any:
    import contextlib
    import sqlite3

    @contextlib.contextmanager
    def opened() -> Any:
        database = sqlite3.connect(f"file:{server.places.file}?mode=ro", uri=True)
        try:
            yield lambda sql: [row for (row,) in database.execute(sql)]
        finally:
            database.close()

    return opened()


def reports(server: Server, job: int, name: str, text: str) -> None:
    """Wait until a job has told an event."""
    assert until(lambda: (name, text) in events(server, job), PATIENCE / 2), (
        f"{events(server, job)}: {server.log(job)}"
    )


@pytest.mark.parametrize(("kind", "ranks"), [("average", 2), ("update", 3), ("exchange", 3)])
def test_all_ranks_obey_at_the_same_iteration(
    make_server: Callable[..., Server], kind: str, ranks: int
) -> None:
    server = make_server(slots=3)
    client = server.start()
    job = started(server, kind, FOR_EVER, ranks=ranks)
    client.send(job, "nobody-knows", 1)
    client.send(job, "learning-rate", 0.5)
    client.send(job, "set", {"name": "learning-rate", "value": 0.25})
    client.send(job, "own", {"any": ["thing", None]})
    client.send(job, "checkpoint")
    client.send(job, "evaluate")
    client.send(job, "pause")
    reports(server, job, "obeyed", "pause")
    texts = [text for name, text in events(server, job) if name == "refused"]
    assert [text.partition(":")[0] for text in texts] == ["nobody-knows 1", "evaluate"]
    assert "learning-rate, own" in texts[0]
    for number in range(70):  # more than there are places, and more than their numbers tell apart
        client.send(job, "own", number)
    reports(server, job, "obeyed", "own 69")
    client.send(job, "resume")
    reports(server, job, "obeyed", "resume")
    for number in range(70):
        client.send(job, "own", -number)
    client.send(job, "stop")
    assert client.wait(job)["state"] == "done", server.log(job)
    by_rank = told(server, job)
    assert sorted(by_rank) == list(range(ranks))
    assert all(by_rank[rank] == by_rank[0] for rank in by_rank), server.log(job)
    did = [what for _, what in by_rank[0]]
    assert did == [
        "learning-rate 0.5", "learning-rate 0.25", "own {'any': ['thing', None]}",
        "checkpoint None", *(f"own {n}" for n in range(70)), *(f"own {-n}" for n in range(70)),
        "ends stopped 1",
    ]  # fmt: skip
    during = {at for at, what in by_rank[0] if what in [f"own {n}" for n in range(1, 70)]}
    assert len(during) == 1  # all while it was paused
    metrics = client.metrics(job, points=3)
    (name,) = metrics
    assert name == {"exchange": "iteration"}.get(kind, "loss") and len(metrics[name]) <= 3


def test_a_job_that_waits_for_its_start(server: Server) -> None:
    job = started(server, "exchange", "5", "paused", ranks=2)
    server.client.send(job, "own", "before")
    reports(server, job, "obeyed", 'own "before"')
    server.client.send(job, "start")
    assert server.client.wait(job)["state"] == "done", server.log(job)
    assert told(server, job)[1] == [(0, "own before"), (4, "ends by itself 1")]
    with pytest.raises(JobError, match="job 1 is done") as refused:
        server.client.send(job, "pause")
    assert refused.value.status == 409
    assert server.client.restart(job)["state"] == "queued"
    server.ranks(job, 4)
    server.client.send(job, "start")  # not before: commands to the first run are not repeated
    assert server.client.wait(job)["state"] == "done"
    assert server.log(job).count("own before") == 2


def test_a_server_that_is_killed_and_comes_back(server: Server) -> None:
    """Training goes on meanwhile; what it has to tell arrives later."""
    job = started(server, "exchange", FOR_EVER, ranks=2)
    assert until(lambda: server.client.metrics(job))
    server.kill()
    server.start()  # at another port
    last = server.client.metrics(job)["iteration"][-1][0]
    assert until(lambda: server.client.metrics(job, first=last + 1))
    server.client.send(job, "own", 7)
    reports(server, job, "obeyed", "own 7")
    server.kill()
    ranks = server.ranks(job, 2)
    os.kill(server.supervisor(job), 0)
    server.start()
    server.client.send(job, "stop")
    assert server.client.wait(job)["state"] == "done", server.log(job)
    assert gone(ranks)
    assert told(server, job)[0] == told(server, job)[1]
    assert told(server, job)[1][-1][1] == "ends stopped 1"


def test_a_rank_killed_while_all_are_paused(server: Server) -> None:
    job = started(server, "exchange", FOR_EVER, ranks=2, grace=0)
    server.client.send(job, "pause")
    reports(server, job, "obeyed", "pause")
    found = re.findall(r"\[(\d)\] process (\d+)", server.log(job))
    os.kill(int(dict(found)["1"]), signal.SIGKILL)
    assert server.client.wait(job)["state"] == "failed"
    assert "PeerLost" in server.log(job)


def test_a_secret_speaks_for_its_own_job(server: Server) -> None:
    job, other = server.submit(), server.submit()
    server.ranks(job)
    server.ranks(other)
    link = server.places.link(job)
    assert link.stat().st_mode & 0o777 == 0o600
    secret = f"Bearer {json.loads(link.read_bytes())['token']}"
    empty: dict[str, Any] = {"metrics": [], "events": [], "dropped": 0}

    def status(method: str, path: str, body: Any = None, **headers: str) -> int:
        return ask(server, method, f"/api/v1/jobs{path}", body, **headers)[0]

    assert status("POST", f"/{job}/reports", empty, Authorization=secret) == 200
    wrong = [secret[:-1], secret + "x", "", f"Bearer {server.token}"]
    assert {status("POST", f"/{job}/reports", empty, Authorization=each) for each in wrong} == {401}
    assert {status("GET", f"/{job}/commands", Authorization=each) for each in wrong} == {401}
    assert status("POST", f"/{other}/reports", empty, Authorization=secret) == 401
    assert status("POST", "/99/reports", empty, Authorization=secret) == 401
    assert status("POST", f"/{job}/messages", {"name": "stop"}, Authorization=secret) == 401
    assert status("GET", f"/{job}", Authorization=secret) == 401


def test_thousands_of_metrics_in_batches(server: Server) -> None:
    job = server.submit()
    server.ranks(job)
    link = Link(server.places.link(job), lambda: None)
    for iteration in range(5000):
        link.tell(Metrics(iteration, 1.0, {"loss": iteration / 2, "bad": float("nan")}))
    link.close()
    link.close()
    metrics = server.client.metrics(job, points=10_000)
    assert [each[0] for each in metrics["loss"]] == list(range(5000))
    assert metrics["loss"][-1] == [4999, 2499.5, 1.0] and metrics["bad"][-1] == [4999, None, 1.0]
    thinned = server.client.metrics(job, "loss", first=1000, points=7)
    assert [each[0] for each in thinned["loss"]] == [1571, 2142, 2714, 3285, 3856, 4428, 4999] or (
        len(thinned["loss"]) <= 7 and thinned["loss"][-1][0] == 4999
    )
    with pytest.raises(JobError, match="numbers"):
        link.tell(Metrics(1, 1.0, {f"n{number}": 0.0 for number in range(101)}))


def test_the_command(server: Server) -> None:
    from support.environment import environment
    from support.starting import finished

    job = started(server, "exchange", FOR_EVER, ranks=1)
    base = ["python3", "-P", "-m", "pgasdl", "job", f"--server={server.places.file}", "send"]
    for words in (["own", "a text"], ["own", '{"a": 1}'], ["own"], ["stop"]):
        done = finished([*base, str(job), *words], env=environment(), timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 0
    done = finished([*base, str(job), "a b"], env=environment(), timeout=PATIENCE)
    assert done.returncode != 0 and "name" in done.stderr
    assert server.client.wait(job)["state"] == "done"
    did = [what for _, what in told(server, job)[0]]
    assert did == ["own a text", "own {'a': 1}", "own None", "ends stopped 1"]


def test_local_sgd_is_switched_while_it_runs(server: Server) -> None:
    require_modules("torch", "sklearn")
    for name in ("local_sgd.py", "digits_net.py"):
        (server.root / name).write_bytes((APPS / name).read_bytes())
    job = server.submit("local_sgd.py", f"--rounds={FOR_EVER}", ranks=2)
    assert until(lambda: server.client.metrics(job))
    for name, value in (("protocol", "synchronous"), ("protocol", "local"), ("period", 7)):
        server.client.send(job, name, value)
        reports(server, job, "obeyed", f"{name} {json.dumps(value)}")
    server.client.send(job, "stop")
    assert server.client.wait(job)["state"] == "done", server.log(job)
    log = server.log(job)
    did = [re.findall(rf"rank {rank}, round (\d+: \w+)", log) for rank in (0, 1)]
    assert did[0] == did[1] and [what.split(": ")[1] for what in did[0]] == [
        "synchronous", "local", "7",
    ]  # fmt: skip
    weights = re.findall(r"weights: sha256 (\w+)", log)
    assert len(weights) == 2 and weights[0] == weights[1]
    periods = {each[1] for each in server.client.metrics(job, points=10_000)["iterations"]}
    assert {1.0, 4.0} <= periods
