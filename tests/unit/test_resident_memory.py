"""The resident memory of a rank hardly grows with the number of ranks."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
from support.environment import environment
from support.starting import finished

import pgasdl
from pgasdl import loopback

PROGRAM = """
import gc, re, sys
import numpy as np
import pgasdl, pgasdl.collectives.allreduce, pgasdl.runtime.bootstrap, pgasdl.runtime.init
import pgasdl.runtime.job

def resident():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Rss: +(\\d+) kB", file.read())[1])

before = resident()
with pgasdl.init(timeout=60) as ctx:
    ctx.barrier()
    more = ctx.world.combine(np.array([resident() - before]), op="max")
    if ctx.rank == 0:
        sys.stdout.write(f"KiB {more[0]}\\n")
"""


@pytest.mark.full
def test_resident_memory_over_shm(tmp_path: Path) -> None:
    """Beyond importing, each of 32 ranks has at most 1 MiB more in memory than each of 2."""
    program = tmp_path / "resident.py"
    program.write_text(PROGRAM)

    def kib(n: int) -> int:
        command = [sys.executable, "-m", "pgasdl", "run", "-n", str(n), str(program)]
        done = finished(command, env=environment(PGASDL_TRANSPORT="shm"), timeout=120, cwd=tmp_path)
        found = re.search(r"KiB (\d+)", done.stdout)
        assert done.returncode == 0 and found, done.stdout + done.stderr
        return int(found[1])

    assert kib(32) <= kib(2) + 1024


def test_a_segment_beyond_the_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pgasdl.segment.memory_limit", lambda: 8192)
    monkeypatch.setattr(logging.getLogger("pgasdl"), "propagate", True)
    caplog.set_level(logging.WARNING, "pgasdl")  # another test may have asked for more

    def program(ctx: pgasdl.Context) -> None:
        ctx.segment(8192)
        assert not caplog.records
        ctx.segment(8193)

    loopback.run(1, program)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "rank 0: segment " in record.getMessage()
