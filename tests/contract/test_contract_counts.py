"""Counted notifications: additions in any order, and a wait for so many of them."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from contract_harness import ORDERING, PROCESSES, contract

import pgasdl


def answer(ctx: Any, segment: Any, notification: int) -> None:
    """Wait for a notification that is not counted."""
    assert ctx.notify_waitsome(segment, notification, 1) == notification
    assert ctx.notify_reset(segment, notification) == 1


def arrived(ctx: Any, peer: int, segment: Any, marker: int) -> None:
    """Wait until additions to ``peer`` are there, and those of the rank that does the same here."""
    ctx.notify_add(peer, segment, marker)
    assert ctx.notify_wait_count(segment, marker, 1) == 0


@contract(ranks=(1, 2))
def test_a_count_is_taken_from_what_there_is(ctx: Any) -> None:
    """Also by ``notify_waitsome`` and ``notify_reset``, for which it is a value."""
    segment = ctx.segment(0, notifications=8)
    me = ctx.rank
    for value in (1, 5, 2**31, 1):
        ctx.notify_add(me, segment, 3, value)
    arrived(ctx, me, segment, 7)
    assert ctx.notify_waitsome(segment) == 3
    assert ctx.notify_wait_count(segment, 3, 6) == 2**31 + 1
    assert ctx.notify_wait_count(segment, 3, 2**31) == 1
    assert ctx.notify_wait_count(segment, 3, 1) == 0
    assert ctx.notify_reset(segment, 3) == 0
    ctx.notify_add(me, segment, 3)
    ctx.notify_add(me, segment, 3)
    arrived(ctx, me, segment, 7)
    assert ctx.notify_reset(segment, 3) == 2
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.notify_waitsome(segment, timeout=0)


@contract(ranks=(2, 3, 4), on=ORDERING)
def test_data_of_every_addition_are_there(ctx: Any) -> None:
    """All write to all, in any order, on one id; 8 bytes, and more than a message takes."""
    for n in (1, 500, 20_000):
        segment = ctx.segment(8 * n * (ctx.size + 1), notifications=2)
        rows = segment.numpy(np.int64).reshape(ctx.size + 1, n)
        nbytes = 8 * n
        mine = segment[nbytes * ctx.size : nbytes * (ctx.size + 1)]
        slot = segment[nbytes * ctx.rank : nbytes * (ctx.rank + 1)]
        for turn in range(1, 6):
            rows[ctx.size] = turn * (ctx.rank + 1)
            dice = np.random.default_rng(100 * turn + ctx.rank)
            for peer in dice.permutation(ctx.size):
                ctx.write_notify_add(mine, int(peer), slot, 1)
            assert ctx.notify_wait_count(segment, 1, ctx.size) == 0
            for sender in range(ctx.size):
                assert (rows[sender] == turn * (sender + 1)).all()
            ctx.wait()
            ctx.barrier()


@contract(ranks=2, on=ORDERING)
def test_a_count_covers_earlier_writes(ctx: Any) -> None:
    """Counts come behind all writes of their queue, to other segments and to bound memory."""
    n = 5000
    source, first, board = ctx.segment(4 * n), ctx.segment(4 * n), ctx.segment(0)
    target = np.zeros(n, np.int32)
    bound, values = ctx.bind(target), source.numpy(np.int32)
    peer = 1 - ctx.rank
    for turn in range(1, 6):
        values[:] = turn + ctx.rank
        ctx.barrier()
        ctx.write(source[:], peer, first[:])
        ctx.write_notify_add(source[:], peer, bound[:], 0)
        ctx.notify_add(peer, board, 0, 3)
        pairs = [(source[at : at + 400], first[at : at + 400]) for at in range(0, 4000, 400)]
        ctx.write_list_notify_add(pairs, peer, board, 0, 4)
        assert ctx.notify_wait_count(board, 0, 7) == 0
        assert (first.numpy(np.int32) == turn + peer).all()
        assert ctx.notify_wait_count(bound, 0, 1) == 0
        assert (target == turn + peer).all()
        ctx.wait()
    ctx.barrier()


@contract(ranks=(2, 4))
def test_no_addition_is_lost(ctx: Any) -> None:
    """All ranks add, the owner too, while it takes in two ways: waits and resets."""
    n = 300
    segment = ctx.segment(0, notifications=4)
    dice = np.random.default_rng(ctx.rank)
    values = [int(value) for value in dice.integers(1, 50, n)]
    everybody = np.zeros(1, np.int64)
    everybody[0] = sum(values)
    wanted = int(ctx.world.combine(everybody, "sum")[0])
    if ctx.rank != 0:
        for value in values:
            ctx.notify_add(0, segment, 2, value)
        answer(ctx, segment, 1)
        return
    taken = 0
    end = time.monotonic() + 20
    while taken < wanted:
        assert time.monotonic() < end, f"{taken} of {wanted}"
        if values:
            ctx.notify_add(0, segment, 2, values.pop())
        with contextlib.suppress(pgasdl.PgasTimeoutError):
            ctx.notify_wait_count(segment, 2, 7, timeout=0)
            taken += 7
        taken += ctx.notify_reset(segment, 2)
    assert taken == wanted
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.notify_wait_count(segment, 2, 1, timeout=0)
    for peer in range(1, ctx.size):
        ctx.notify(peer, segment, 1)


@contract(ranks=3)
def test_every_id_counts_by_itself(ctx: Any) -> None:
    """More ids at once than transports have places for, from several ranks, in any order."""
    n, turns = 1000, 2
    segment = ctx.segment(8 * (n + 1), notifications=n)
    cells = segment.numpy(np.int64)
    if ctx.rank == 0:
        for turn in range(1, turns + 1):
            for number in np.random.default_rng(turn).permutation(n):
                assert ctx.notify_wait_count(segment, int(number), 3) == 0
                assert cells[number] == turn
            for peer in range(1, ctx.size):
                ctx.notify(peer, segment, 0)
    else:
        for turn in range(1, turns + 1):
            cells[n] = turn
            for number in np.random.default_rng(turn * ctx.rank).permutation(n):
                at = 8 * int(number)
                if ctx.rank == 1:
                    ctx.notify_add(0, segment, int(number), 2)
                else:
                    ctx.write_notify_add(segment[8 * n :], 0, segment[at : at + 8], int(number))
            ctx.wait()
            answer(ctx, segment, 0)


@contract(ranks=2)
def test_additions_to_a_rank_that_does_not_look(ctx: Any) -> None:
    """As many as transports have under way at once, and more: they wait, and come."""
    n = 600
    segment = ctx.segment(16, notifications=2)
    if ctx.rank == 0:
        for number in range(1, n + 1):
            segment.numpy(np.int64)[0] = number
            ctx.write_notify_add(segment[0:8], 1, segment[8:16], 0)
            ctx.wait()
    else:
        time.sleep(0.5)
        assert ctx.notify_wait_count(segment, 0, n) == 0
        assert segment.numpy(np.int64)[1] == n


@contract(ranks=2, on=PROCESSES)
def test_a_sleeper_wakes(ctx: Any) -> None:
    """Additions come one by one, each later than a wait stays awake."""
    segment = ctx.segment(0, notifications=2)
    for _ in range(5):
        if ctx.rank == 0:
            for _ in range(3):
                time.sleep(0.02)
                ctx.notify_add(1, segment, 0)
            answer(ctx, segment, 1)
        else:
            assert ctx.notify_wait_count(segment, 0, 3) == 0
            ctx.notify(0, segment, 1)


@contract(ranks=2)
def test_threads_take_their_own(ctx: Any) -> None:
    """Several threads add to, and wait for, one notification: each takes what it waited for."""
    segment = ctx.segment(0, notifications=2)
    counts = (1, 2, 3, 10)

    def add(_: int) -> None:
        for _ in range(40):
            ctx.notify_add(1, segment, 0)

    def take(count: int) -> None:
        for _ in range(10):
            ctx.notify_wait_count(segment, 0, count)

    work = add if ctx.rank == 0 else take
    with ThreadPoolExecutor(len(counts)) as threads:
        list(threads.map(work, counts))
    if ctx.rank == 1:
        assert ctx.notify_reset(segment, 0) == 0


@contract(ranks=2)
def test_count_timeouts(ctx: Any) -> None:
    """They name what is there, and take nothing."""
    segment = ctx.segment(0, notifications=16)
    for there in range(3):
        for timeout in (0, 0.02, 1e-9):
            with pytest.raises(
                pgasdl.PgasTimeoutError, match=f"notification 5 .* stands at {there} of 3 "
            ):
                ctx.notify_wait_count(segment, 5, 3, timeout=timeout)
        ctx.notify_add(ctx.rank, segment, 5)
        arrived(ctx, ctx.rank, segment, 7)
    assert ctx.notify_wait_count(segment, 5, 3, timeout=0) == 0
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError):
            ctx.notify_wait_count(segment, 5, 3, timeout=timeout)


@contract(ranks=2)
def test_counts_refused(ctx: Any) -> None:
    segment = ctx.segment(16, notifications=8)
    peer = 1 - ctx.rank
    before = segment.numpy().copy()
    source, target = segment[0:8], segment[8:16]
    pairs = [(source, target)]
    for number, value in ((8, 1), (-1, 1), (2**64, 1), (0, 0), (0, -1), (0, 2**32), (0, 2**64)):
        for post in (
            lambda number, value: ctx.notify_add(peer, segment, number, value),
            lambda number, value: ctx.write_notify_add(source, peer, target, number, value),
            lambda number, value: ctx.write_list_notify_add(pairs, peer, segment, number, value),
            lambda number, value: ctx.notify_wait_count(segment, number, value, timeout=0),
        ):
            with pytest.raises(pgasdl.NotificationError):
                post(number, value)
    with pytest.raises(pgasdl.NotificationError, match=r"2\*\*32 - 2"):
        ctx.notify_wait_count(segment, 0, 2**32 - 1, timeout=0)
    with pytest.raises(pgasdl.RankError):
        ctx.notify_add(ctx.size, segment, 0)
    with pytest.raises(pgasdl.QueueError):
        ctx.notify_add(peer, segment, 0, queue=99)
    with pytest.raises(pgasdl.SegmentError):
        ctx.write_notify_add(segment[0:8], peer, segment[8:24], 0)
    ctx.barrier()
    assert ctx.notify_reset(segment, 0) == 0
    assert (segment.numpy() == before).all()
    assert ctx.queue_size() == 0


@contract(ranks=2)
def test_a_count_that_was_lost(ctx: Any) -> None:
    """It stops at 2**32 - 1, and every wait for it says so until the reset."""
    segment = ctx.segment(0, notifications=8)
    peer = 1 - ctx.rank
    for number, values in enumerate(((2**32 - 2, 1), (2**32 - 1,), (2**31, 2**31), (1, 2**32 - 1))):
        for value in values:
            ctx.notify_add(peer, segment, number, value)
        arrived(ctx, peer, segment, 7)
        for _ in range(2):
            with pytest.raises(pgasdl.NotificationError, match=f"notification {number} .* lost"):
                ctx.notify_wait_count(segment, number, 1)
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.notify_wait_count(segment, 4, 1, timeout=0)  # the others count on
        assert ctx.notify_reset(segment, number) == 2**32 - 1
        ctx.barrier()
        ctx.notify_add(peer, segment, number, 5)
        assert ctx.notify_wait_count(segment, number, 4) == 1
