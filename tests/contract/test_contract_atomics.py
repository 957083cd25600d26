"""Atomics on 64-bit words of any rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl


@contract(ranks=(1, 3))
def test_fetch_add(ctx: Any) -> None:
    """Every rank adds to every rank, itself included (1000 rounds scaled to 50)."""
    segment = ctx.segment(16)
    for _ in range(50):
        for peer in range(ctx.size):
            assert ctx.atomic_fetch_add(segment[8:16], peer, 1) < 50 * ctx.size
    ctx.barrier()
    assert segment.numpy(np.uint64).tolist() == [0, 50 * ctx.size]


@contract(ranks=3)
def test_old_values_are_distinct(ctx: Any) -> None:
    segment = ctx.segment(8)
    olds = [ctx.atomic_fetch_add(segment[0:8], 0, 1) for _ in range(40)]
    blobs = ctx.world.allgather("olds", np.array(olds, np.int64).tobytes())
    assert sorted(np.frombuffer(b"".join(blobs), np.int64)) == list(range(40 * ctx.size))


@contract(ranks=2)
def test_fetch_add_wraps(ctx: Any) -> None:
    segment = ctx.segment(8)
    peer = 1 - ctx.rank
    assert ctx.atomic_fetch_add(segment[0:8], peer, -1) == 0
    assert ctx.atomic_fetch_add(segment[0:8], peer, 2) == -1
    assert ctx.atomic_fetch_add(segment[0:8], peer, 2**63 - 1) == 1
    assert ctx.atomic_fetch_add(segment[0:8], peer, -(2**63)) == -(2**63)
    assert ctx.atomic_fetch_add(segment[0:8], peer, 0) == 0


@contract(ranks=2)
def test_compare_swap(ctx: Any) -> None:
    segment = ctx.segment(8)
    if ctx.rank == 0:
        for peer in range(ctx.size):
            assert ctx.atomic_compare_swap(segment[0:8], peer, 0, 42) == 0
            assert ctx.atomic_compare_swap(segment[0:8], peer, 0, 43) == 42
            assert ctx.atomic_compare_swap(segment[0:8], peer, 42, -1) == 42
            assert ctx.atomic_compare_swap(segment[0:8], peer, -1, 42) == -1
    ctx.barrier()
    assert segment.numpy(np.uint64)[0] == 42


@contract(ranks=3)
def test_only_the_first_swap_wins(ctx: Any) -> None:
    """In a user's group: everybody tries, everybody learns who won."""
    group = ctx.group(range(ctx.size))
    segment = ctx.segment(8, group=group)
    old = ctx.atomic_compare_swap(segment[0:8], 0, 0, ctx.rank + 1)
    winners = group.combine(np.array([old == 0], np.int64))
    assert winners[0] == 1
    winner = ctx.atomic_fetch_add(segment[0:8], 0, 0)
    assert 1 <= winner <= ctx.size
    assert old in (0, winner)


@contract(ranks=2)
def test_one_try_counts_exactly(ctx: Any) -> None:
    """timeout=0 retried: what was not reported as done has not been done."""
    segment = ctx.segment(8)
    for _ in range(30):
        while True:
            try:
                ctx.atomic_fetch_add(segment[0:8], 0, 1, timeout=0)
                break
            except pgasdl.PgasTimeoutError:
                pass
    ctx.barrier()
    assert ctx.atomic_fetch_add(segment[0:8], 0, 0) == 30 * ctx.size


@contract(ranks=2)
def test_alignment(ctx: Any) -> None:
    segment = ctx.segment(24)
    peer = 1 - ctx.rank
    for begin, end in ((1, 9), (7, 15), (4, 12), (0, 4), (0, 0), (0, 16), (8, 17)):
        with pytest.raises(pgasdl.AlignmentError):
            ctx.atomic_fetch_add(segment[begin:end], peer, 1)
        with pytest.raises(pgasdl.AlignmentError):
            ctx.atomic_compare_swap(segment[begin:end], peer, 0, 1)
    for begin in (0, 8, 16):
        assert ctx.atomic_fetch_add(segment[begin : begin + 8], peer, begin + 1) == 0
    ctx.barrier()
    assert segment.numpy(np.uint64).tolist() == [1, 9, 17]


@contract(ranks=2)
def test_bounds(ctx: Any) -> None:
    segment = ctx.segment(16)
    peer = 1 - ctx.rank
    for begin in (16, 24, 2**32, 2**62):
        with pytest.raises(pgasdl.SegmentError):
            ctx.atomic_fetch_add(segment[begin : begin + 8], peer, 1)
        with pytest.raises(pgasdl.SegmentError):
            ctx.atomic_compare_swap(segment[begin : begin + 8], peer, 0, 1)
    for wrong in (-1, 2, 2**31, 2**63):
        with pytest.raises(pgasdl.RankError):
            ctx.atomic_fetch_add(segment[0:8], wrong, 1)
    for wrong in (2**63, -(2**63) - 1, 1.0, "1", None):
        with pytest.raises(TypeError):
            ctx.atomic_fetch_add(segment[0:8], peer, wrong)
    for wrong in (2**63, -(2**63) - 1, 0.5, None):
        with pytest.raises(TypeError):
            ctx.atomic_compare_swap(segment[0:8], peer, wrong, 1)
        with pytest.raises(TypeError):
            ctx.atomic_compare_swap(segment[0:8], peer, 0, wrong)
    ctx.barrier()
    assert segment.numpy(np.uint64).tolist() == [0, 0]


@contract(ranks=2)
def test_without_a_segment(ctx: Any) -> None:
    """A segment that only this rank has, and None: errors, neither hang nor success."""
    alone = ctx.segment(8, group=ctx.group([ctx.rank]))
    with pytest.raises(pgasdl.RankError, match="no copy of segment"):
        ctx.atomic_fetch_add(alone[0:8], 1 - ctx.rank, 1)
    assert ctx.atomic_fetch_add(alone[0:8], ctx.rank, 5) == 0
    with pytest.raises(TypeError):
        ctx.atomic_fetch_add(None, 0, 1)
