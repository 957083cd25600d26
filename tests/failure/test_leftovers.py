"""kill -9 of one rank, of all, of the launcher: no process, no file, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_harness import PROGRAMS, Job, alive, launched, until

WITHIN = 2.0


def files() -> set[str]:
    """What could be left: in shared memory, and in the directory of temporary files."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return found | {
        os.path.join(tempfile.gettempdir(), name)
        for name in os.listdir(tempfile.gettempdir())
        if "pgasdl" in name
    }


def sockets() -> set[str]:
    """Our sockets in the abstract name space."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@pgasdl" in line}


def started(process: subprocess.Popen[str], n: int) -> list[int]:
    """The processes of a launcher's job, by rank, once all of them run."""
    assert process.stdout is not None
    pids: dict[int, int] = {}
    while len(pids) < n:
        line = process.stdout.readline()
        assert line, "the job ended early"
        rank, _, rest = line.partition("] ")
        if rest.startswith('{"event": "running"'):
            pids[int(rank.strip("["))] = json.loads(rest)["pid"]
    return [pids[rank] for rank in range(n)]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("victims", ["rank 0", "rank 2", "all ranks", "launcher", "guard"])
def test_nothing_is_left(victims: str) -> None:
    files_before, sockets_before = files(), sockets()
    program = str(PROGRAMS / "long_job.py")
    with launched("-n", "3", "--grace", "1", program, PGASDL_LOG="warning") as process:
        ranks = started(process, 3)
        (launcher,) = children(process.pid)
        everybody = [*ranks, launcher, process.pid]
        assert len(sockets() - sockets_before) >= 3
        doomed = {
            "rank 0": [ranks[0]], "rank 2": [ranks[2]], "all ranks": ranks,
            "launcher": [launcher], "guard": [process.pid],
        }[victims]  # fmt: skip
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        assert until(lambda: not any(alive(pid) for pid in ranks), WITHIN + 1.5)
        assert until(lambda: process.poll() is not None, WITHIN)
        assert until(lambda: not any(alive(pid) for pid in everybody), WITHIN)
        assert until(lambda: not sockets() - sockets_before, WITHIN)
        assert time.monotonic() - killed_at < 2 * WITHIN
        if victims.startswith("rank"):
            assert process.stdout is not None
            said = process.stdout.read()
            lost = [json.loads(line[4:]) for line in said.splitlines() if '"lost"' in line]
            assert {event["rank"] for event in lost} == {int(victims[-1])}, said
            assert len(lost) == 2, said
            assert "was killed by SIGKILL" in said
            assert process.returncode == 137
    assert until(lambda: not files() - files_before, WITHIN), files() - files_before


def test_nothing_is_left_without_a_launcher(job: Callable[..., Job]) -> None:
    files_before, sockets_before = files(), sockets()
    ranks = job("long_job.py", 3, PGASDL_TIMEOUT="20")
    ranks.said("running")
    ranks.signal(1, signal.SIGKILL)
    assert ranks.ended([0, 2]) == [1, 1], ranks.transcript()
    assert until(lambda: not sockets() - sockets_before, WITHIN)
    assert not files() - files_before
