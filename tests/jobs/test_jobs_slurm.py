"""``pgasdl serve --slurm``, and jobs for which a server has no Slurm."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from jobs_harness import Server
from support import slurm, two_hosts
from support.places import ROOT

from pgasdl import JobError
from pgasdl.jobs import slurm as module
from pgasdl.jobs.job import State
from pgasdl.jobs.places import Places
from pgasdl.jobs.requests import JobRequest
from pgasdl.jobs.scheduler import Scheduler
from pgasdl.jobs.store import Store

INSIDE = Path(__file__).with_name("inside_slurm.py")


@pytest.mark.full
@pytest.mark.parametrize("name", re.findall(r"(?m)^def test_(\w+)", INSIDE.read_text()))
def test_a_real_slurm(tmp_path: Path, name: str) -> None:
    two_hosts.require()
    slurm.require()
    start = slurm.start({"node1": "198.18.0.1", "node2": "198.18.0.2"}, ["node1"])
    test = f"pytest -q -p no:cacheprovider --basetemp={tmp_path}/tests {INSIDE}::test_{name}"
    # The options of this pytest are not for that one.
    told = two_hosts.succeeded(tmp_path, f"{start}\ncd {ROOT} && env -u PYTEST_ADDOPTS {test}")
    assert "1 passed" in told


@pytest.mark.parametrize(
    ("told", "for_now"),
    [
        ("Batch job submission failed: Socket timed out on send/recv operation", True),
        ("AssocMaxSubmitJobLimit sbatch: error: Job violates accounting/QOS policy (job submit "
         "limit, user's size and/or time limits)", True),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
         True),
        ("QOSMaxWallDurationPerJobLimit sbatch: error: Job violates accounting/QOS policy (job "
         "submit limit, user's size and/or time limits)", False),
        ("Batch job submission failed: Invalid partition name specified", False),
    ],
)  # fmt: skip
def test_a_refusal_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, for_now: bool
) -> None:
    """Slurm here is a stub of its commands."""
    asked: list[str] = []

    def answers(*words: str, given: str = "") -> str:
        asked.append(words[0])
        if words[0] == "sbatch" and told:
            raise module._RefusedError(told)
        return ""

    monkeypatch.setattr(module, "_asked", answers)
    monkeypatch.setattr(shutil, "which", lambda name: f"/{name}")
    places = Places(tmp_path / "jobs.db")
    places.token.write_text("token")
    store = Store(places)
    (tmp_path / "a.py").touch()
    job = store.add(JobRequest(("a.py",))).id
    scheduler = Scheduler(store, module.SlurmRunner(places, tmp_path), 1)
    with pytest.raises(OSError, match="Slurm refuses it for now") if for_now else nullcontext():
        scheduler._pass()
    assert store.job(job).state is (State.QUEUED if for_now else State.FAILED)
    if for_now:
        with pytest.raises(OSError, match="Slurm refuses it for now"):
            scheduler._pass()
        told = ""
        assert asked.count("sbatch") == 1  # it waits a while
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "monotonic", lambda: later)
        scheduler._pass()
        assert store.job(job).state is State.RUNNING
    store.close()


def test_resources_are_slurms(server: Server) -> None:
    with pytest.raises(JobError, match="--slurm") as refused:
        server.submit(resources={"nodes": "2"})
    assert refused.value.field == "resources.nodes"
    with pytest.raises(JobError, match="none of account, constraint"):
        server.submit(resources={"wrap": "true"})
