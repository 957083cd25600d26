"""Ranks that leave while others wait for them: an error, never a hang."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from failure_harness import TIMEOUT
from support.forking import Job
from support.patience import took
from support.ranks import on_ranks
from tiers import full

from pgasdl import ClosedError, Context, PeerLostError, loopback

GOAL = "a rank leaves to another's error", 0.25
WHERE = ["barrier", "waitsome", "passive", "world.combine", "allreduce", "staged", "segment",
         "group", "notify"]  # fmt: skip


@pytest.mark.parametrize("where", full(WHERE, quick=3))
@pytest.mark.parametrize("how", ["exception", "close"])
def test_one_of_two_leaves(job: Callable[..., Job], how: str, where: str) -> None:
    ranks = job("leaves.py", 2, how, where, PGASDL_TIMEOUT=TIMEOUT)
    left_at = ranks.event(1, "leaving")["at"]
    ranks.ended()
    lost = ranks.event(0, "lost")
    assert lost["kind"] == "PeerLostError", ranks.transcript()
    took(GOAL[0], lost["at"] - left_at, GOAL[1])
    if how == "exception":
        assert lost["rank"] == 1, ranks.transcript()
        assert "rank 1 failed (ValueError: on purpose)" in lost["text"], ranks.transcript()
        assert lost["health"] == ["healthy", "failed"]
        assert ranks[1].status == 1 and "ValueError: on purpose" in ranks.transcript()
    else:
        assert lost["health"] == ["healthy", "closed"]


@pytest.mark.parametrize(
    ("how", "state"),
    full([("exception", "failed"), ("os._exit", "died"), ("sys.exit(3)", "failed"),
          ("sys.exit(0)", "closed"), ("close", "closed")], quick=2),
)  # fmt: skip
def test_one_of_three_leaves_a_barrier(job: Callable[..., Job], how: str, state: str) -> None:
    ranks = job("leaves.py", 3, how, "barrier", PGASDL_TIMEOUT=TIMEOUT)
    left_at = ranks.event(1, "leaving")["at"]
    ranks.ended()
    for rank in (0, 2):
        lost = ranks.event(rank, "lost")
        assert lost["kind"] == "PeerLostError", ranks.transcript()
        took(GOAL[0], lost["at"] - left_at, GOAL[1])
        assert lost["health"][1] == state, ranks.transcript()
        if state != "closed":
            assert lost["rank"] == 1, ranks.transcript()


@pytest.mark.parametrize("seed", full(range(20), quick=4))
def test_whoever_has_done_its_part_may_leave(seed: int) -> None:
    """A rank that has the leaver's notification, but cannot post its own yet, ends its barrier."""

    def program(ctx: Context) -> None:
        ctx.barrier()

    loopback.run(3 + seed % 3, program, seed=seed, refuse=40, delay=1, log="error", timeout=20)


@pytest.mark.parametrize("mapped", [True, False])
@on_ranks(20, "mapped", log="error", timeout=20)
def test_one_of_many_leaves(ctx: Context, mapped: bool) -> None:
    """Members that wait for it through others learn its name: no hang, and no other name."""
    group = ctx.group(range(ctx.size))
    ctx.barrier()
    if ctx.rank == 3:
        return
    for _ in range(2):
        with pytest.raises(PeerLostError) as lost:
            group.combine([1.0])
        assert lost.value.rank == 3, lost.value
    with pytest.raises(PeerLostError):
        ctx.segment(64)


def test_one_of_three_leaves_a_plan(job: Callable[..., Job]) -> None:
    ranks = job("leaves.py", 3, "close", "allreduce", PGASDL_TIMEOUT="3")
    ranks.event(1, "leaving")
    ranks.ended()
    for rank in (0, 2):
        lost = ranks.event(rank, "lost")
        assert lost["kind"] == "PeerLostError" and "rank 1" in lost["text"], ranks.transcript()


@pytest.mark.parametrize(
    "how", full(["with", "atexit", "close", "again", "del", "threads"], quick=2)
)
def test_init_followed_by_the_end(job: Callable[..., Job], how: str) -> None:
    ranks = job("hello_goodbye.py", 4, how, PGASDL_TIMEOUT=TIMEOUT)
    assert ranks.ended() == [0, 0, 0, 0], ranks.transcript()


def test_close_ends_a_call_of_another_thread() -> None:
    """The parts of the context that a call uses stay until it has ended."""
    over = threading.Event()

    def program(ctx: Context) -> None:
        array = np.ones(4, np.float32)
        for _ in range(2):
            ctx.allreduce(array)
        if ctx.rank > 0:
            assert over.wait(20)
            return
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(ctx.allreduce, array)
            while ctx._allreduces._groups[ctx.world].calls.number < 3:
                assert not waiting.done()
                time.sleep(0.001)
            ctx.close()
            gc.collect()
            with pytest.raises(ClosedError):
                waiting.result()
        over.set()

    loopback.run(2, program, log="error", timeout=20)
