"""Users talk to jobs that train: real servers, real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jobs_harness import Server, ask
from support.leftovers import gone
from support.patience import PATIENCE, until
from support.places import APPS
from support.requiring import require_modules
from tiers import gate

from pgasdl import JobError
from pgasdl.jobs.link import Link
from pgasdl.jobs.messages import Metrics
from pgasdl.tools.cli import main

FOR_EVER = str(10**9)


@pytest.fixture(scope="module")
def of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("shared"), slots=3)
    found.start()
    yield found
    found.close()


def started(server: Server, *words: str, ranks: int, **request: Any) -> int:
    """A job of ``obeys.py`` whose ranks have all said which processes they are."""
    job = server.submit("obeys.py", *words, ranks=ranks, **request)
    server.ranks(job, ranks)
    return job


def told(server: Server, job: int) -> dict[int, list[tuple[int, str]]]:
    """What each rank did when."""
    found: dict[int, list[tuple[int, str]]] = {}
    for rank, iteration, what in re.findall(r"rank (\d+) at (\d+): (.*)", server.log(job)):
        found.setdefault(int(rank), []).append((int(iteration), what))
    return found


def reports(server: Server, job: int, name: str, text: str) -> list[tuple[str, str]]:
    """Wait until a job has told an event; all that it had told before."""
    found: list[tuple[str, str]] = []
    for event in server.client.events(job, PATIENCE / 2):
        if event["event"] == "event":
            if (event["name"], event["text"]) == (name, text):
                return found
            found.append((event["name"], event["text"]))
    raise AssertionError(f"it ended after {found}: {server.log(job)}")


@pytest.mark.parametrize(
    ("kind", "ranks"), [("exchange", 3), *gate([("average", 2), ("update", 3)])]
)
def test_all_ranks_obey_at_the_same_iteration(shared: Server, kind: str, ranks: int) -> None:
    if kind != "exchange":
        require_modules("torch")
    server, client = shared, shared.client
    job = started(server, kind, FOR_EVER, ranks=ranks)
    client.send(job, "nobody-knows", 1)
    client.send(job, "learning-rate", 0.5)
    client.send(job, "set", {"name": "learning-rate", "value": 0.25})
    client.send(job, "own", {"any": ["thing", None]})
    client.send(job, "checkpoint")
    client.send(job, "evaluate")
    client.send(job, "picky", "abc")
    client.send(job, "picky", "on rank 1")
    client.send(job, "picky", -0.5)
    client.send(job, "pause")
    before = reports(server, job, "obeyed", "pause")
    assert [text for name, text in before if name == "failed"] == [
        "picky \"abc\": ValueError: could not convert string to float: 'abc' "
        f"(on {ranks - 1} other ranks: see the log)",
        'picky "on rank 1" (on 1 other ranks: see the log)',
    ]
    assert ("obeyed", "picky -0.5") in before and ("obeyed", 'picky "abc"') not in before
    texts = [text for name, text in before if name == "refused"]
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
        "checkpoint None", "picky -0.5",
        *(f"own {n}" for n in range(70)), *(f"own {-n}" for n in range(70)),
        "ends stopped 1",
    ]  # fmt: skip
    during = {at for at, what in by_rank[0] if what in [f"own {n}" for n in range(1, 70)]}
    assert len(during) == 1  # all while it was paused
    metrics = client.metrics(job, points=3)
    (name,) = metrics
    assert name == {"exchange": "iteration"}.get(kind, "loss") and len(metrics[name]) <= 3


def test_a_job_that_waits_for_its_start(shared: Server) -> None:
    job = started(shared, "exchange", "5", "paused", ranks=2)
    shared.client.send(job, "own", "before")
    reports(shared, job, "obeyed", 'own "before"')
    shared.client.send(job, "start")
    assert shared.client.wait(job)["state"] == "done", shared.log(job)
    assert told(shared, job)[1] == [(0, "own before"), (4, "ends by itself 1")]
    with pytest.raises(JobError, match=f"job {job} is done") as refused:
        shared.client.send(job, "pause")
    assert refused.value.status == 409
    assert shared.client.restart(job)["state"] == "queued"
    shared.ranks(job, 4)
    shared.client.send(job, "start")  # not before: commands to the first run are not repeated
    assert shared.client.wait(job)["state"] == "done"
    assert shared.log(job).count("own before") == 2


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


def test_a_rank_killed_while_all_are_paused(shared: Server) -> None:
    job = started(shared, "exchange", FOR_EVER, ranks=2, grace=0)
    shared.client.send(job, "pause")
    reports(shared, job, "obeyed", "pause")
    found = re.findall(r"\[(\d)\] process (\d+)", shared.log(job))
    os.kill(int(dict(found)["1"]), signal.SIGKILL)
    assert shared.client.wait(job)["state"] == "failed"
    assert "PeerLostError" in shared.log(job)


def test_a_secret_speaks_for_its_own_job(shared: Server) -> None:
    job, other = shared.submit(), shared.submit()
    shared.ranks(job)
    shared.ranks(other)
    link = shared.places.link(job)
    assert link.stat().st_mode & 0o777 == 0o600
    secret = f"Bearer {json.loads(link.read_bytes())['token']}"
    empty: dict[str, Any] = {"metrics": [], "events": [], "dropped": 0}

    def status(method: str, path: str, body: Any = None, **headers: str) -> int:
        return ask(shared, method, f"/api/v1/jobs{path}", body, **headers)[0]

    assert status("POST", f"/{job}/reports", empty, Authorization=secret) == 200
    wrong = [secret[:-1], secret + "x", "", f"Bearer {shared.token}"]
    assert {status("POST", f"/{job}/reports", empty, Authorization=each) for each in wrong} == {401}
    assert {status("GET", f"/{job}/commands", Authorization=each) for each in wrong} == {401}
    assert status("POST", f"/{other}/reports", empty, Authorization=secret) == 401
    assert status("POST", "/99/reports", empty, Authorization=secret) == 401
    assert status("POST", f"/{job}/messages", {"name": "stop"}, Authorization=secret) == 401
    assert status("GET", f"/{job}", Authorization=secret) == 401


def test_what_a_job_cannot_report(shared: Server) -> None:
    job = shared.submit()
    shared.ranks(job)
    secret = f"Bearer {json.loads(shared.places.link(job).read_bytes())['token']}"

    def status(loss: str, time: str = "1") -> int:
        metrics = f'{{"iteration": 1, "time": {time}, "numbers": {{"loss": {loss}}}}}'
        report = f'{{"metrics": [{metrics}], "events": [], "dropped": 0}}'.encode()
        given = {"Authorization": secret, "Content_Type": "application/json"}
        return ask(shared, "POST", f"/api/v1/jobs/{job}/reports", report, **given)[0]

    assert [status("1e999"), status("-1e999"), status("1", "1e999"), status("NaN")] == [
        422, 422, 422, 400,
    ]  # fmt: skip
    assert status(str(2**70), str(2**70)) == 200
    assert shared.client.metrics(job) == {"loss": [[1, 2.0**70, 2.0**70]]}
    shared.release(job)
    assert shared.client.wait(job)["state"] == "done"
    assert status("2") == 409  # of a process that outlived it
    assert shared.client.metrics(job)["loss"][0][1] == 2.0**70


def test_thousands_of_metrics_in_batches(shared: Server) -> None:
    job = shared.submit()
    shared.ranks(job)
    link = Link(shared.places.link(job), lambda: None)
    for iteration in range(5000):
        link.tell(Metrics(iteration, 1.0, {"loss": iteration / 2, "bad": float("nan")}))
    link.close()
    link.close()
    metrics = shared.client.metrics(job, points=10_000)
    assert [each[0] for each in metrics["loss"]] == list(range(5000))
    assert metrics["loss"][-1] == [4999, 2499.5, 1.0] and metrics["bad"][-1] == [4999, None, 1.0]
    thinned = shared.client.metrics(job, "loss", first=1000, points=7)
    assert [each[0] for each in thinned["loss"]] == [1570, 2141, 2713, 3284, 3856, 4427, 4999]
    with pytest.raises(JobError, match="numbers"):
        link.tell(Metrics(1, 1.0, {f"n{number}": 0.0 for number in range(101)}))


def test_the_command(shared: Server, capsys: pytest.CaptureFixture[str]) -> None:
    job = started(shared, "exchange", FOR_EVER, ranks=2)
    base = ["job", f"--server={shared.places.file}", "send", str(job)]
    long = "x" * 4090  # with its name it is longer than an event
    for words, why in (
        (["a b"], "name"),
        (["nosuch", "5"], "refused nosuch 5: no function for it; there are start"),
        (["picky", "abc"], 'failed picky "abc": ValueError'),
        (["picky", "on rank 1"], 'failed picky "on rank 1" (on 1 other ranks'),
        (["picky", "NaN"], ""),
    ):
        assert main([*base, *words]) == (1 if why else 0)
        assert why in capsys.readouterr().err
    for words in ("own=a text", 'own={"a": 1}', f"own={long}", "picky=-0.5", "stop"):
        assert main([*base, *words.split("=")]) == 0
        assert int(capsys.readouterr().out) > 0
    assert shared.client.wait(job)["state"] == "done"
    did = [what for _, what in told(shared, job)[0]]
    assert did == [
        "picky nan", "own a text", "own {'a': 1}", f"own {long}", "picky -0.5", "ends stopped 1",
    ]  # fmt: skip


def test_a_program_that_connects_again(shared: Server) -> None:
    """Also if its first rank is another one then."""
    job = shared.submit("twice.py", ranks=2)
    for phase in range(2):
        assert until(lambda: f"phase {phase}" in shared.log(job), PATIENCE / 2)  # noqa: B023
        shared.client.send(job, "own", phase)
        shared.client.send(job, "stop")
    assert shared.client.wait(job)["state"] == "done"
    assert sorted(re.findall(r"rank \d gets \d", shared.log(job))) == [
        "rank 0 gets 0", "rank 1 gets 0", "rank 1 gets 1",
    ]  # fmt: skip


def test_a_command_to_a_run_that_fails(shared: Server, capsys: pytest.CaptureFixture[str]) -> None:
    job = shared.submit(restarts=1)
    (rank,) = shared.ranks(job)
    with ThreadPoolExecutor() as pool:
        send = ["job", f"--server={shared.places.file}", "send", str(job), "checkpoint"]
        status = pool.submit(main, send)
        assert any(event["event"] == "command" for event in shared.client.events(job, PATIENCE))
        os.kill(rank, signal.SIGKILL)
        assert status.result(PATIENCE) == 1
    assert f"job {job} is queued before it obeyed" in capsys.readouterr().err


@pytest.mark.gate
def test_local_sgd_is_switched_while_it_runs(shared: Server) -> None:
    require_modules("torch", "sklearn")
    for name in ("local_sgd.py", "digits_net.py"):
        (shared.root / name).write_bytes((APPS / name).read_bytes())
    job = shared.submit("local_sgd.py", f"--rounds={FOR_EVER}", ranks=2)
    assert until(lambda: shared.client.metrics(job))
    for name, value in (("protocol", "synchronous"), ("protocol", "local"), ("period", 7)):
        shared.client.send(job, name, value)
        reports(shared, job, "obeyed", f"{name} {json.dumps(value)}")
    shared.client.send(job, "stop")
    assert shared.client.wait(job)["state"] == "done", shared.log(job)
    log = shared.log(job)
    did = [re.findall(rf"rank {rank}, round (\d+: \w+)", log) for rank in (0, 1)]
    assert did[0] == did[1] and [what.split(": ")[1] for what in did[0]] == [
        "synchronous", "local", "7",
    ]  # fmt: skip
    weights = re.findall(r"weights: sha256 (\w+)", log)
    assert len(weights) == 2 and weights[0] == weights[1]
    periods = {each[1] for each in shared.client.metrics(job, points=10_000)["iterations"]}
    assert {1.0, 4.0} <= periods
