"""Long runs, in which ranks are killed and replaced: no result is wrong, nothing hangs or grows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.mpi_rows import missing
from support.starting import finished
from ways import SURVIVES

PROGRAM = str(Path(__file__).with_name("long_run.py"))


@pytest.mark.full
@pytest.mark.timeout(0)  # long_run.py notices what hangs
@pytest.mark.parametrize("way", ["shm", "tcp", "mpich", "openmpi"])
def test_long_run(way: str, request: pytest.FixtureRequest) -> None:
    if way not in SURVIVES and (why := missing(way)):
        pytest.skip(why)
    minutes = request.config.getoption("--minutes")
    command = [sys.executable, PROGRAM, "--way", way, "--minutes", str(minutes), "--period", "6"]
    done = finished(command, env=environment(), timeout=60 * minutes + 300)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
