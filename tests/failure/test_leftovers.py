"""kill -9 of one rank, of all, of the launcher: no process, no file, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_harness import PROGRAMS, launched
from support.forking import Job
from support.leftovers import gone
from support.patience import took, until


def held(pid: int) -> tuple[set[str], set[str]]:
    """Names of the files that a process has open or shares, and of its sockets."""
    inodes, names = set(), set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
            names.add(target)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if words[1].endswith("s") and len(words) == 6:
            names.add(words[5])
    files = {name for name in names if name.startswith(("/dev/shm", "/tmp", "/run"))}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return files, {words[7] for words in lines if len(words) > 7 and words[6] in inodes}


def left_of(sockets: set[str]) -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sockets & {line.split()[-1] for line in lines}


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


def check_names(ranks: list[int]) -> set[str]:
    """Check that no rank has a file that a kill could leave; return the names of their sockets."""
    sockets: set[str] = set()
    for pid in ranks:
        files, named = held(pid)
        assert not files
        sockets |= named
    assert len(sockets) == len(ranks), sockets
    assert all(name.startswith("@pgasdl-") for name in sockets)
    return sockets


@pytest.mark.parametrize("victims", ["rank 0", "rank 2", "all ranks", "launcher", "guard"])
def test_nothing_is_left(victims: str, tmp_path: Path) -> None:
    program = str(PROGRAMS / "long_job.py")
    settings = {"PGASDL_LOG": "warning", "TMPDIR": str(tmp_path)}
    with launched("-n", "3", "--grace", "1", program, **settings) as process:
        ranks = started(process, 3)
        (launcher,) = children(process.pid)
        everybody = [*ranks, launcher, process.pid]
        sockets = check_names(ranks)
        doomed = {
            "rank 0": [ranks[0]], "rank 2": [ranks[2]], "all ranks": ranks,
            "launcher": [launcher], "guard": [process.pid],
        }[victims]  # fmt: skip
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):  # the first end may end the others
                os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        assert gone(ranks)
        assert until(lambda: process.poll() is not None)
        assert gone(everybody)
        assert until(lambda: not left_of(sockets))
        took("kill -9 to nothing left", time.monotonic() - killed_at, 2.0)
        if victims.startswith("rank"):
            assert process.stdout is not None
            said = process.stdout.read()
            lost = [json.loads(line[4:]) for line in said.splitlines() if '"lost"' in line]
            assert {event["rank"] for event in lost} == {int(victims[-1])}, said
            assert len(lost) == 2, said
            assert "was killed by SIGKILL" in said
            assert process.returncode == 137
    assert all("-rank-" in path.name for path in tmp_path.iterdir())  # flight records


def test_nothing_is_left_without_a_launcher(job: Callable[..., Job], tmp_path: Path) -> None:
    ranks = job("long_job.py", 3, PGASDL_TIMEOUT="20", TMPDIR=str(tmp_path))
    ranks.said("running")
    sockets = check_names([ranks[rank].pid for rank in range(3)])
    ranks.signal(1, signal.SIGKILL)
    assert ranks.ended([0, 2]) == [1, 1], ranks.transcript()
    assert until(lambda: not left_of(sockets))
    assert all("-rank-" in path.name for path in tmp_path.iterdir())  # flight records
