"""Pairwise collectives: blocks of any length for each other, in arrays that lie anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl
from pgasdl.collectives.pairwise import MOST, Pairs, PairwiseCalls
from pgasdl.plans.algorithms.pairwise import Blocks

# Bytes: of less than a piece, of some, and of more than one execution has.
LENGTHS = (1, 1001, 300_000, 9_000_001)


def made(ctx: Any) -> PairwiseCalls:
    return ctx._allreduces.begin_pairwise(ctx.world, 30.0).pairwise  # type: ignore[no-any-return]


def parts(calls: PairwiseCalls, pairs: Pairs, places: list[int]) -> Iterator[tuple[Any, list[int]]]:
    """Executions, and where the arrays lie for each."""
    bound = calls.bound(pairs, lambda: pairs)
    kept = bound.apart(places)
    for execution, offset in bound.parts:
        yield execution, [*(place and place + offset for place in places), 0]
    del kept


def make(calls: PairwiseCalls, pairs: Pairs, places: list[int], owner: object) -> None:
    for execution, addresses in parts(calls, pairs, places):
        execution.run_at(owner, addresses, timeout=30.0)


def drawn(sender: int, receiver: int, n: int) -> Any:
    return np.random.default_rng([sender, receiver, n]).integers(0, 256, n, np.uint8)


@contract(ranks=(1, 2, 3))
def test_blocks_for_each_other(ctx: Any) -> None:
    """Each of another length, some empty."""
    calls, ranks = made(ctx), range(ctx.size)
    for n in LENGTHS:
        lengths = [[(n * (1 + s + 2 * r)) // 7 for r in ranks] for s in ranks]
        gives = [drawn(ctx.rank, r, lengths[ctx.rank][r]) for r in ranks]
        takes = [np.zeros(lengths[s][ctx.rank], np.uint8) for s in ranks]
        sends, receives = (tuple(map(len, each)) for each in (gives, takes))
        blocks = Blocks(sends, receives, max(map(max, lengths)))
        places = [each.ctypes.data for arrays in (gives, takes) for each in arrays]
        make(calls, Pairs(f"any {n}", "bytes", blocks), places, (gives, takes))
        for sender, each in enumerate(takes):
            assert np.array_equal(each, drawn(sender, ctx.rank, len(each)))
    calls.close()


@contract(ranks=(2, 3))
def test_blocks_are_taken_where_others_were_given(ctx: Any) -> None:
    calls, ranks, n = made(ctx), range(ctx.size), LENGTHS[2]
    array = np.stack([drawn(ctx.rank, r, n) for r in ranks])
    places = [row.ctypes.data for _ in "12" for row in array]
    lengths = (n,) * ctx.size
    make(calls, Pairs("in place", "bytes", Blocks(lengths, lengths, n)), places, array)
    assert all(np.array_equal(row, drawn(sender, ctx.rank, n)) for sender, row in enumerate(array))
    calls.close()


@contract(ranks=(2, 3))
def test_one_block_for_all_and_in_turns(ctx: Any) -> None:
    calls = made(ctx)
    for turn in range(30):
        n, root = LENGTHS[turn % 3], turn % ctx.size
        array = drawn(turn, 0, n) if ctx.rank == root else np.zeros(n, np.uint8)
        sends = tuple(n * (ctx.rank == root != rank) for rank in range(ctx.size))
        receives = tuple(n * (ctx.rank != root == rank) for rank in range(ctx.size))
        takes = [array.ctypes.data * (rank == root) for rank in range(ctx.size)]
        blocks = Blocks(sends, receives, n, same=True)
        make(calls, Pairs(f"{n} of {root}", "bytes", blocks), [array.ctypes.data, *takes], array)
        assert np.array_equal(array, drawn(turn, 0, n))
    calls.close()


@contract(ranks=(1, 2, 3))
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_sums_have_the_order_of_the_ranks(ctx: Any, dtype: str) -> None:
    def given(rank: int, n: int) -> Any:
        numbers = np.random.default_rng([rank, n]).standard_normal((ctx.size, n))
        return (1000 * numbers).astype(dtype)

    calls = made(ctx)
    for n in (1, 1001, 1_500_001):
        mine, out = given(ctx.rank, n), np.zeros(n, dtype)
        lengths = (n,) * ctx.size
        places = [*(row.ctypes.data for row in mine), out.ctypes.data]
        blocks = Blocks(lengths, lengths, n, reduces=True)
        make(calls, Pairs(f"sum {n}", dtype, blocks), places, (mine, out))
        total = given(0, n)[ctx.rank]
        for rank in range(1, ctx.size):
            total = total + given(rank, n)[ctx.rank]
        assert np.array_equal(out, total)
        assert np.array_equal(mine, given(ctx.rank, n))
    calls.close()


@contract(ranks=(2, 3))
def test_after_a_timeout_the_same_call_continues(ctx: Any) -> None:
    calls = made(ctx)
    n = MOST * calls._piece + 1000  # in two executions
    out, mine = np.zeros((ctx.size, n), np.uint8), drawn(ctx.rank, 0, n)
    blocks = Blocks((n,) * ctx.size, (n,) * ctx.size, n, same=True)
    pairs = Pairs("all", "bytes", blocks)
    places = [mine.ctypes.data, *(row.ctypes.data for row in out)]
    begun = ctx.segment(8, notifications=1)
    if ctx.rank == 0:
        ctx.notify_waitsome(begun)
    timeouts = 0
    for execution, addresses in parts(calls, pairs, places):
        while True:
            try:
                execution.run_at((out, mine), addresses, timeout=0.01 if ctx.rank == 1 else None)
                break
            except pgasdl.PgasTimeoutError:
                timeouts += 1
                if timeouts == 1:
                    ctx.notify(0, begun, 0)
    assert (timeouts > 0) == (ctx.rank == 1)
    assert all(np.array_equal(row, drawn(rank, 0, n)) for rank, row in enumerate(out))
    calls.close()


@contract(ranks=3)
def test_a_slow_rank_of_an_allreduce_finds_what_others_left_for_it(ctx: Any) -> None:
    """Plans with phases leave slots to be read; a gather between two waits for some ranks only."""
    group = ctx.group(range(ctx.size))
    calls = ctx._allreduces.begin_pairwise(group, 30.0).pairwise
    plan = "staged" if ctx.mapped else "one-shot"
    if not ctx.mapped and group.members.registers:
        return  # its plan there has no phases
    rank, array, mine = ctx.rank, np.full(100, 1.0 + ctx.rank, np.float32), np.full(8, ctx.rank)
    out = np.zeros((3, 8), mine.dtype)

    def reduce(timeout: float | None = None) -> None:
        ctx.allreduce(array, plan=plan, group=group, timeout=timeout)

    def gather() -> None:
        n = mine.nbytes
        blocks = Blocks((n, 0, 0), (n if rank == 0 else 0,) * 3, n)
        places = [mine.ctypes.data, 0, 0, *(row.ctypes.data for row in out)]
        make(calls, Pairs("gather", "bytes", blocks), places, (out, mine))

    for _ in range(2):  # connections are there
        reduce()
    array[:] = 1 + rank
    left = ctx.segment(8, notifications=1)
    if rank == 1:  # it contributes, and goes away
        with pytest.raises(pgasdl.PgasTimeoutError):
            reduce(0.0)
    ctx.barrier()
    if rank == 1:
        ctx.notify_waitsome(left)
    reduce()
    assert (array == 6).all()
    gather()  # the root takes the block of rank 2 first, which goes on
    if rank == 2:
        array[:] = 7
        with pytest.raises(pgasdl.PgasTimeoutError):
            reduce(0.0)
        ctx.notify(1, left, 0)
    reduce()
    assert (array == 19).all()
    assert rank != 0 or (out == np.arange(3)[:, None]).all()
    group.delete()


@contract(ranks=(2, 3))
def test_ranks_that_do_not_agree_are_told(ctx: Any) -> None:
    calls, n = made(ctx), 10 + (ctx.rank == 1)
    out, mine = np.zeros((ctx.size, n), np.uint8), np.zeros(n, np.uint8)
    blocks = Blocks((n,) * ctx.size, (n,) * ctx.size, n, same=True)
    places = [mine.ctypes.data, *(row.ctypes.data for row in out)]
    with pytest.raises(pgasdl.MismatchError, match="different"):
        make(calls, Pairs(f"all {n}", "bytes", blocks), places, (out, mine))
    ctx.barrier()
    calls.close()
