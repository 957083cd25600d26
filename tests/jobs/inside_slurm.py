"""Jobs through a real Slurm of two nodes, in whose namespaces test_jobs_slurm.py runs this."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_harness import Server, ask
from support.patience import PATIENCE, until

HOST = "198.18.0.1"
ALL = 8  # the processors of both nodes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path, "--slurm", f"--host={HOST}", slots=1000)
    start(found)
    yield found
    found.close()
    for name in names():
        asked("scancel", f"--name={name}", "--full", "--signal=KILL")
        asked("scancel", f"--name={name}")
    assert until(lambda: names() == [], PATIENCE)


def start(server: Server) -> None:
    server.start(SLURM_CONF=os.environ["SLURM_CONF"])


def asked(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def names(*states: str) -> list[str]:
    of = [f"--states={','.join(states)}"] if states else []
    return asked("squeue", "--noheader", *of, "--format=%j").split()


def is_slurms(server: Server, job: int, state: str) -> bool:
    file = server.places.step(job, 1) / "slurm.name"
    return file.exists() and file.read_text() in names(state)


def reaches(server: Server, job: int, state: str) -> None:
    assert until(lambda: is_slurms(server, job, state), PATIENCE), asked("squeue")


def writes(server: Server, job: int, pattern: str, n: int = 1) -> list[str]:
    found: list[str] = []

    def there() -> bool:
        found[:] = re.findall(pattern, server.log(job))
        return len(found) >= n

    assert until(there, PATIENCE), f"{server.client.show(job)}: {server.log(job)}"
    return found


def ended(server: Server, job: int) -> dict[str, Any]:
    return server.client.wait(job, PATIENCE)


def test_a_training_on_two_nodes(server: Server) -> None:
    request = {"ranks": 2, "resources": {"nodes": "2", "time": "5"}}
    job = server.submit("watched.py", "0.001", str(10**9), **request)
    assert until(lambda: server.client.metrics(job, "loss")["loss"], PATIENCE), server.log(job)
    assert until(lambda: len(server.client.ranks(job)) == 2, PATIENCE)
    assert asked("squeue", "--noheader", "--format=%D %R").strip() == "2 node[1-2]"
    server.client.send(job, "stop")
    assert ended(server, job)["state"] == "done", server.log(job)
    assert sorted(re.findall("(?m)^([01]): <b>", server.log(job))) == ["0", "1"]


def test_a_rank_that_fails(server: Server) -> None:
    (server.root / "data").mkdir()
    (server.root / "data/one").write_text("x")
    stage = {"remote": [str(server.root / "data")], "local": "staged", "format": "folder"}
    job = server.submit("fails.py", ranks=2, restarts=1, stage=stage)
    found = ended(server, job)
    assert (found["state"], found["restarts_left"]) == ("failed", 0) and found["status"] > 0
    reasons = [event.get("reason", "") for event in server.client.events(job)]
    assert any(reason.startswith("started again: ") for reason in reasons)
    assert len(server.client.records(job)) == 2  # of rank 0, twice
    assert list((server.root / "staged").iterdir()), server.log(job)


def test_what_slurm_refuses(server: Server) -> None:
    job = server.submit(resources={"partition": "none-such"})
    found = ended(server, job)
    assert found["state"] == "failed"
    assert re.search("Slurm refuses it: .*invalid partition", found["reason"])


def test_stops(server: Server) -> None:
    runs = server.submit("held.py", "graceful", ranks=ALL)
    writes(server, runs, r"process (\d+)", ALL)
    waits = server.submit("held.py", ranks=ALL)
    reaches(server, waits, "PENDING")
    server.client.stop(waits)
    assert ended(server, waits)["state"] == "stopped"
    server.client.stop(runs)
    assert ended(server, runs)["state"] == "stopped"
    assert "saves" in server.log(runs)
    stubborn = server.submit("held.py", "stubborn", grace=0)
    writes(server, stubborn, r"process (\d+)")
    server.client.stop(stubborn)
    assert ended(server, stubborn)["state"] == "stopped"
    assert until(lambda: names() == [], PATIENCE)


def test_a_server_that_is_killed(server: Server) -> None:
    """Jobs that run and wait go on, and the next server knows them."""
    runs, waits = server.submit("held.py", ranks=ALL), server.submit("held.py", ranks=ALL)
    writes(server, runs, r"process (\d+)", ALL)
    reaches(server, waits, "PENDING")
    server.kill()
    start(server)
    server.release(runs)
    assert ended(server, runs)["state"] == "done"
    writes(server, waits, r"process (\d+)", ALL)
    server.kill()
    server.release(waits, 3)
    assert until(lambda: names() == [], PATIENCE)
    start(server)
    found = ended(server, waits)
    assert (found["state"], found["status"]) == ("failed", 3)


def test_what_others_cancel(server: Server) -> None:
    runs, waits = server.submit("held.py", ranks=ALL), server.submit("held.py", ranks=ALL)
    writes(server, runs, r"process (\d+)", ALL)
    reaches(server, waits, "PENDING")
    asked("scancel", "--state=PENDING", "--user=root")
    found = ended(server, waits)
    assert found["state"] == "lost" and "cancelled" in found["reason"]
    asked("scancel", "--full", "--state=RUNNING", "--user=root")
    assert ended(server, runs)["state"] in ("failed", "stopped", "lost")


def test_a_controller_that_is_away(server: Server) -> None:
    """Nothing is lost: jobs wait, and the server says what is missing."""
    runs = server.submit("held.py")
    writes(server, runs, r"process (\d+)")
    (controller,) = asked("pgrep", "--exact", "slurmctld").split()
    os.kill(int(controller), signal.SIGTERM)  # it writes down what it knows
    later = server.submit("held.py")
    assert until(lambda: ask(server, "GET", "/readyz")[0] == 503, PATIENCE)
    assert "Slurm does not answer" in ask(server, "GET", "/readyz")[2]["detail"]
    server.release(runs)
    with (Path(os.environ["SLURM_CONF"]).parent / "slurmctld.log").open("ab") as log:
        subprocess.Popen(["slurmctld", "-D"], stdout=log, stderr=log, start_new_session=True)
    assert until(lambda: ask(server, "GET", "/readyz")[0] == 200, PATIENCE)
    assert ended(server, runs)["state"] == "done"
    writes(server, later, r"process (\d+)")
    server.release(later)
    assert ended(server, later)["state"] == "done"
