"""What ranks count, as rank 0 reads it out of their memories."""

from __future__ import annotations

import time
from typing import Any

from contract_harness import contract

from pgasdl.jobs.board import Board

SECONDS = 30.0  # for all to be read


def looked(board: Board, iteration: int) -> list[dict[str, Any]]:
    """What a look finds that is due."""
    board._next = 0.0
    return list(board.look(iteration))


def seen(board: Board, ranks: set[int], iteration: int) -> dict[int, dict[str, Any]]:
    """The records of an iteration, once those of ``ranks`` have been read."""
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + SECONDS
    while not ranks <= found.keys():
        assert time.monotonic() < deadline, found.keys()
        told = looked(board, iteration)
        found |= {each["rank"]: each for each in told if each["iteration"] == iteration}
    return found


@contract(ranks=(2, 3))
def test_rank_0_reads_all(ctx: Any) -> None:
    board = Board(ctx, ctx.world)
    for iteration in (7, 8):
        if ctx.rank != 0:
            assert looked(board, iteration) == []
        ctx.barrier()
        if ctx.rank == 0:
            found = seen(board, set(range(ctx.size)), iteration)
            assert all(record["registrations"] > 0 for record in found.values())
        ctx.barrier()


@contract(ranks=(2, 3))
def test_a_rank_that_has_left(ctx: Any) -> None:
    """Nobody who trains hears of it; the others are still read."""
    board = Board(ctx, ctx.world)
    assert len(looked(board, 1)) <= 1
    ctx.barrier()
    if ctx.rank == 1:
        board._segment.close()
    ctx.barrier()
    if ctx.rank == 0:
        for _ in range(20):
            looked(board, 1)
        seen(board, set(range(ctx.size)) - {1}, 1)
    ctx.barrier()
