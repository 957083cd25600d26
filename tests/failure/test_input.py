"""Ranks that keep a data set in their memories, and lose one."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

from support.forking import Job


def test_a_lost_rank_takes_its_cache_and_nothing_else(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    chance = random.Random(1)
    for number in range(40):
        (tmp_path / f"{number:02}.bin").write_bytes(chance.randbytes(400_000))
    ranks = job("reads_data.py", 3, tmp_path, PGASDL_TIMEOUT="20")
    ranks.said("working")
    assert sum(ranks.event(rank, "working")["read"] for rank in range(3)) == 40 * 400_000
    ranks.signal(1, signal.SIGKILL)
    ranks.said("together", [0, 2])
    for rank in (0, 2):
        assert ranks.event(rank, "lost")["rank"] == 1
        assert ranks.event(rank, "together")["peers"] > 0, ranks.transcript()
    assert ranks.ended([0, 2]) == [0, 0], ranks.transcript()
