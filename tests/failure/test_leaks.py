"""Closed contexts, and objects made and deleted often, leave neither descriptors nor memory."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_harness import PROGRAMS, launched
from support.forking import Job
from tiers import full

TIMES = int(os.environ.get("PGASDL_LEAK_TIMES", "0"))
DEFAULT = {"allreduce": 1000, "segment": 1000, "bind": 500, "disagree": 500, "group": 300,
           "errors": 1000, "exchange": 200, "join": 500}  # fmt: skip


@pytest.mark.parametrize("what", full(DEFAULT, quick=1))
def test_repetition_leaves_nothing(job: Callable[..., Job], tmp_path: Path, what: str) -> None:
    times = TIMES or DEFAULT[what]
    ranks = job("repeats.py", 2, what, times, PGASDL_TIMEOUT="60", STORE_FOLDER=str(tmp_path))
    assert ranks.ended(seconds=120 + TIMES / 50) == [0, 0], ranks.transcript()
    for rank in (0, 1):
        held = ranks.event(rank, "held")
        before, after = held["before"], held["after"]
        assert after["descriptors"] == before["descriptors"], held
        assert after["threads"] == before["threads"], held
        # Python itself maps and unmaps an arena or two.
        assert after["mappings"] <= before["mappings"] + 2, held
        assert after["kib"] - before["kib"] < 1024, held


@pytest.mark.parametrize("how", ["left", "survivors"])
def test_a_closed_context_holds_no_descriptor(job: Callable[..., Job], how: str) -> None:
    """Also after a loss, and while the program still has it."""
    ranks = job("closes.py", 3, how, PGASDL_TIMEOUT="60")
    ranks.said("training")
    ranks.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        assert ranks.event(rank, "closed")["held"] == [], ranks.transcript()
    assert ranks.ended([0, 2]) == [0, 0], ranks.transcript()


def test_memory_of_a_rank() -> None:
    """Beyond NumPy: the context, a segment of 1 MiB, and what three plans need."""
    with launched("-n", "2", str(PROGRAMS / "footprint.py"), PGASDL_LOG="warning") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    grown = [json.loads(line[4:]) for line in said.splitlines() if '"grown"' in line]
    assert len(grown) == 2
    for rank in grown:
        assert not rank["torch"]
        assert rank["kib"] < 32 << 10, said
