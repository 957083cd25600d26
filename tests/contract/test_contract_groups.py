"""Groups and their barriers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_harness import ORDERING, contract
from support.patience import until

import pgasdl


@contract(ranks=(1, 3))
def test_world(ctx: Any) -> None:
    world = ctx.world
    assert (world.ranks, world.size, world.rank) == (tuple(range(ctx.size)), ctx.size, ctx.rank)
    assert list(map(world.index, world.ranks)) == list(range(ctx.size))
    assert ctx.rank in world
    assert ctx.size not in world
    with pytest.raises(pgasdl.RankError):
        world.index(ctx.size)
    with pytest.raises(pgasdl.RankError, match="cannot be deleted"):
        world.delete()
    again = ctx.group(range(ctx.size))
    again.barrier()
    again.delete()
    ctx.barrier()


@contract(ranks=4, on=ORDERING)
def test_one_hole(ctx: Any) -> None:
    """For every rank: a group without it, and segments of this group, until it is deleted."""
    for left_out in range(ctx.size):
        ranks = [rank for rank in range(ctx.size) if rank != left_out]
        if ctx.rank == left_out:
            with pytest.raises(pgasdl.RankError, match="not in the group"):
                ctx.group(ranks)
            continue
        group = ctx.group(ranks)
        assert group.ranks == tuple(ranks)
        assert group.rank == ranks.index(ctx.rank)
        segments = [ctx.segment(8 * group.size, group=group) for _ in range(3)]
        for segment in segments:
            for peer in ranks:
                at = 8 * group.rank
                ctx.atomic_fetch_add(segment[at : at + 8], peer, ctx.rank + 1)
        group.barrier()
        for segment in segments:
            assert segment.numpy(np.int64).tolist() == [rank + 1 for rank in ranks]
            with pytest.raises(pgasdl.RankError):
                ctx.write(segment[0:8], left_out, segment[0:8])
            with pytest.raises(pgasdl.RankError):
                segment.nbytes_of(left_out)
        group.barrier()
        group.delete()
        with pytest.raises(pgasdl.RankError, match="deleted"):
            group.barrier()
        with pytest.raises(pgasdl.RankError, match="deleted"):
            group.combine([1])
        with pytest.raises(pgasdl.RankError, match="deleted"):
            ctx.segment(8, group=group)


@contract(ranks=4)
def test_two_holes_and_complement(ctx: Any) -> None:
    """Two ranks and the two others: barriers in both groups, then of all ranks."""
    for first in ((0, 2), (1, 2), (0, 3)):
        ranks = first if ctx.rank in first else tuple({0, 1, 2, 3} - set(first))
        group = ctx.group(ranks)
        for _ in range(20):
            group.barrier()
        assert group.combine(np.array([ctx.rank]))[0] == sum(ranks)
        ctx.barrier()


@contract(ranks=3)
def test_single_member_and_rest(ctx: Any) -> None:
    group = ctx.group([0] if ctx.rank == 0 else [1, 2])
    for _ in range(200):
        group.barrier()
    for op in ("sum", "min", "max", "prod"):
        result = group.combine(np.array([ctx.rank + 1.0]), op)
        expected = {"sum": 5, "min": 2, "max": 3, "prod": 6}[op]
        assert result[0] == (1 if ctx.rank == 0 else expected)
    assert group.combine(np.array([ctx.rank]), np.maximum)[0] == (0 if ctx.rank == 0 else 2)
    ctx.barrier()


@contract(ranks=3)
def test_deleted_and_made_again(ctx: Any) -> None:
    """barrier, delete, another rank left out, barrier; and the same ranks several times."""
    for left_out in (0, 1, 2, 1, 1, 0):
        if ctx.rank != left_out:
            group = ctx.group(rank for rank in range(ctx.size) if rank != left_out)
            group.barrier()
            group.delete()
    first, second = ctx.group(range(3)), ctx.group(range(3))
    first.barrier()
    first.delete()
    second.barrier()
    second.combine(np.ones(3))
    with pytest.raises(pgasdl.RankError):
        first.barrier()


@contract(ranks=2)
def test_many_groups(ctx: Any) -> None:
    """31 groups beside the world, alive together; deleted in another order, made again."""
    groups = [ctx.group(range(ctx.size)) for _ in range(31)]
    for turn, group in enumerate(groups):
        group.barrier()
        assert group.combine(np.array([turn]))[0] == 2 * turn
    for group in groups[::2] + groups[1::4]:
        group.delete()
    for group in groups[3::4]:
        group.barrier()
    ctx.group([1, 0]).barrier()


@contract(ranks=2)
def test_refused(ctx: Any) -> None:
    for ranks in ([], [ctx.rank, ctx.rank], [0, 1, 2], [0, 1, -1], [1 - ctx.rank], [0, 1, 2**40]):
        with pytest.raises(pgasdl.RankError):
            ctx.group(ranks)
    for ranks in (None, 5, [0.5, 1], "01"):
        with pytest.raises(TypeError):
            ctx.group(ranks)
    ctx.group([0, 1]).barrier()


@contract(ranks=2)
def test_creation_continues_after_timeout(ctx: Any) -> None:
    """A group that one rank has not joined yet: Timeouts, then it is created."""
    flag = ctx.segment(0)
    if ctx.rank == 0:
        for timeout in (0.05, 0, 0.02):
            with pytest.raises(pgasdl.PgasTimeoutError):
                ctx.group([0, 1], timeout=timeout)
        ctx.notify(1, flag, 0)
    else:
        ctx.notify_waitsome(flag)
    group = ctx.group([0, 1])
    group.barrier()
    assert group.combine(np.array([1]))[0] == 2


@contract(ranks=(1, 2, 3, 4), on=ORDERING)
def test_barriers(ctx: Any) -> None:
    """Nobody leaves a barrier before everybody has come (1000 scaled to 100)."""
    segment = ctx.segment(8)
    for turn in range(100):
        ctx.atomic_fetch_add(segment[0:8], 0, 1)
        ctx.barrier(timeout=None if turn % 2 else 10)
        seen = ctx.atomic_fetch_add(segment[0:8], 0, 0)
        assert seen >= ctx.size * (turn + 1)


@contract(ranks=3, on=ORDERING)
def test_barrier_resumes(ctx: Any) -> None:
    """A rank comes late, and the others' Timeouts name it; then the barrier completes."""
    group = ctx.group(range(ctx.size))
    segment = ctx.segment(8)
    for turn in range(3):
        late = turn % ctx.size
        if ctx.rank == late:
            for rank in range(ctx.size):
                if rank != late:
                    ctx.notify_waitsome(segment, rank, 1)
                    ctx.notify_reset(segment, rank)
            ctx.atomic_fetch_add(segment[0:8], 0, 1)
        else:
            with pytest.raises(
                pgasdl.PgasTimeoutError, match=r"^nothing yet from rank \d: barrier"
            ):
                group.barrier(timeout=0.02)
            with pytest.raises(pgasdl.PgasTimeoutError):
                group.barrier(timeout=0)
            ctx.notify(late, segment, ctx.rank)
        group.barrier()
        assert ctx.atomic_fetch_add(segment[0:8], 0, 0) == turn + 1


@contract(ranks=2)
def test_a_member_in_another_collective_is_named(ctx: Any) -> None:
    """A barrier meets the making of a segment: each rank hears what the other is in."""
    board = ctx.segment(0)
    calls = {"a barrier": ctx.barrier, "segment": partial(ctx.segment, 64)}
    mine, theirs = list(calls) if ctx.rank == 0 else list(calls)[::-1]

    def hears() -> bool:
        with pytest.raises(pgasdl.PgasTimeoutError) as late:
            calls[mine](timeout=0.1)
        return f"; rank {1 - ctx.rank} is in {theirs} instead: all members" in str(late.value)

    assert until(hears)
    ctx.notify(1 - ctx.rank, board, 0)
    ctx.notify_waitsome(board)
    for call in calls.values():
        call()


@contract(ranks=4)
def test_odd_ranks_time_out_first(ctx: Any) -> None:
    segment = ctx.segment(0)
    if ctx.rank % 2:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.barrier(timeout=0.02)
        ctx.notify((ctx.rank + 1) % 4, segment, 0)
    else:
        ctx.notify_waitsome(segment)
    ctx.barrier()
    ctx.barrier()


@contract(ranks=2, on=ORDERING)
def test_short_barriers_retried(ctx: Any) -> None:
    """100 barriers with a timeout of 0.2 ms, each repeated until it completes."""
    group = ctx.group([0, 1])
    counter = ctx.segment(8)
    for turn in range(100):
        ctx.atomic_fetch_add(counter[0:8], 0, 1)
        while True:
            try:
                group.barrier(timeout=0.0002)
                break
            except pgasdl.PgasTimeoutError:
                pass
        assert ctx.atomic_fetch_add(counter[0:8], 0, 0) >= 2 * (turn + 1)


@contract(ranks=2, on=ORDERING)
def test_kinds_overlap(ctx: Any) -> None:
    """A barrier times out, an allreduce and a segment creation run, then the barrier goes on."""
    flag = ctx.segment(0)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.barrier(timeout=0.01)
    assert ctx.world.combine(np.array([ctx.rank + 1]))[0] == 3
    segment = ctx.segment(16)
    ctx.notify(1 - ctx.rank, flag, 0)
    ctx.notify_waitsome(flag)
    ctx.barrier()
    assert segment.nbytes_of(1 - ctx.rank) == 16
