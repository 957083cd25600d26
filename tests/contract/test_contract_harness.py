"""The harness itself: failures, deadlines, skips and the end of its workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from contract_harness import TRANSPORTS, contract, rows, run
from contract_pool import Pool, RankFailure
from support.mpi_rows import missing

import pgasdl

pytestmark = pytest.mark.full

# Rows for tests of the harness itself, on every machine.
ROWS = [row for row in TRANSPORTS if row.name != "verbs" and not row.modules]
each_row = pytest.mark.parametrize("row", rows(ROWS))


def _lives(pid: int) -> bool:
    """Whether a process lives: a killed one has no command line, a reaped one no entry."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@contract(ranks=2, meet=False)
def failing(ctx: Any, how: str) -> Any:
    if how == "skip":
        pytest.skip("not today")
    if ctx.rank == 1:
        if how == "assert":
            number = 41
            assert number == 42
        if how == "hang":
            time.sleep(60)
        if how == "die":
            os._exit(3)
        if how == "lost":
            raise pgasdl.MismatchError("the cause")
    if how in ("lost", "die"):
        ctx.barrier()
        ctx.barrier()
    return ctx.rank * 10


@pytest.fixture
def own_pool() -> Any:
    pool = Pool()
    yield pool
    pool.close()


@each_row
def test_a_failing_rank_is_named(own_pool: Pool, row: Any) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1.*number = 41|number = 41.*on rank 1"):
        run(own_pool, row, failing, 2, how="assert")
    with pytest.raises(RankFailure, match="the cause") as caught:
        run(own_pool, row, failing, 2, how="lost")
    if not row.threads:
        assert str(caught.value).startswith("--- rank 1:")  # the cause comes first
    assert run(own_pool, row, failing, 2, how="none") == [0, 10]


@contract(ranks=2, meet=False)
def raising(ctx: Any, how: str) -> Any:
    """Raises on both ranks while what they posted is under way."""
    segment = ctx.segment(1 << 16)
    ctx.barrier()
    for block in range(1 if how == "none" else 15):
        there = segment[4096 * (block + 1) : 4096 * (block + 2)]
        ctx.write_notify(segment[0:4096], 1 - ctx.rank, there, block)
    assert how == "none"
    ctx.notify_reset(segment, ctx.notify_waitsome(segment))
    ctx.barrier()


@pytest.mark.parametrize("row", rows([row for row in TRANSPORTS if row.gpu]))
def test_memory_outlives_what_was_posted(own_pool: Pool, row: Any) -> None:
    """Work that a stream still has to do does not spoil the GPU for the next test."""
    for _ in range(5):
        with pytest.raises(RankFailure, match="AssertionError"):
            run(own_pool, row, raising, 2, how="assert")
        run(own_pool, row, raising, 2, how="none")


@pytest.mark.parametrize("row", rows(ROWS[:2]))
def test_a_hanging_rank_is_killed(own_pool: Pool, row: Any) -> None:
    """The stacks are shown, the workers are killed, and the next test gets new ones."""
    run(own_pool, row, failing, 2, how="none")
    before = own_pool.pids
    with pytest.raises(RankFailure, match=r"(?s)no answer within 4 s.*in failing"):
        run(own_pool, row, failing, 2, deadline=4.0, how="hang")
    assert run(own_pool, row, failing, 2, how="none") == [0, 10]
    assert not set(before) & set(own_pool.pids)
    deadline = time.monotonic() + 10  # an MPI's launcher may reap its ranks late
    while any(map(_lives, before)):
        assert time.monotonic() < deadline, before
        time.sleep(0.02)


@pytest.mark.parametrize("row", ROWS[:1], ids=["shm"])
def test_a_dead_rank_is_reported(own_pool: Pool, row: Any) -> None:
    with pytest.raises(RankFailure, match="ended with status 3"):
        run(own_pool, row, failing, 2, how="die")
    assert run(own_pool, row, failing, 2, how="none") == [0, 10]


@each_row
def test_skips_carry_their_reason(own_pool: Pool, row: Any) -> None:
    if row.mpi is not None and missing(row.mpi):
        pytest.skip(missing(row.mpi))
    with pytest.raises(pytest.skip.Exception, match=f"{row.name}: not today"):
        run(own_pool, row, failing, 2, how="skip")


def test_the_end_kills_and_reaps() -> None:
    pool = Pool()
    run(pool, ROWS[0], failing, 2, how="none")
    pids = pool.pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
