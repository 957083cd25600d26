"""Notifications: order, values, ranges."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from contract_harness import MAPPED, ORDERING, PROCESSES, contract

import pgasdl


def take(ctx: Any, segment: Any, notification: int) -> int:
    """Wait for one notification and reset it."""
    assert ctx.notify_waitsome(segment, notification, 1) == notification
    return int(ctx.notify_reset(segment, notification))


@contract(ranks=(1, 2))
def test_self_notify_and_count_zero(ctx: Any) -> None:
    segment = ctx.segment(0, notifications=8)
    assert ctx.notify_waitsome(segment, 0, 0) is None
    assert ctx.notify_waitsome(segment, 8, 0) is None
    ctx.notify(ctx.rank, segment, 3, 7)
    assert ctx.notify_waitsome(segment) == 3
    assert ctx.notify_waitsome(segment, 3, 1) == 3
    assert ctx.notify_reset(segment, 3) == 7
    assert ctx.notify_reset(segment, 3) == 0


@contract(ranks=2)
def test_by_place_and_by_name(ctx: Any) -> None:
    """Arguments by place alone go another way than named ones, to the same end and errors."""
    segment = ctx.segment(64, notifications=8)
    peer = (ctx.rank + 1) % ctx.size
    mine, theirs = segment[0:8], segment[8:16]
    own = segment.numpy(np.int64)
    for number, (post, expected) in enumerate((
        (lambda: ctx.notify(peer, segment, 3), 1),
        (lambda: ctx.notify(peer, segment, 3, 7), 7),
        (lambda: ctx.notify(peer, segment, 3, value=7, queue=0), 7),
        (lambda: ctx.write_notify(mine, peer, theirs, 3), 1),
        (lambda: ctx.write_notify(mine, peer, theirs, 3, 7), 7),
        (lambda: ctx.write_notify(mine, peer, theirs, 3, value=7, timeout=5.0), 7),
        (lambda: ctx.write_notify(mine, np.int32(peer), theirs, np.uint8(3), np.int64(7)), 7),
        (lambda: pgasdl.Context.write_notify(ctx, mine, peer, theirs, 3, 7, **{}), 7),
    )):  # fmt: skip
        own[0] = 10 * ctx.rank + number
        post()
        ids = ((), (range(2, 5),), (3, 1))[number % 3]
        found = ctx.notify_waitsome(segment, *ids)
        assert found == 3
        reset = ctx.notify_reset
        assert (reset(segment, 3) if number % 2 else reset(segment, notification=3)) == expected
        ctx.wait()
        if number > 2:
            assert own[1] == 10 * peer + number
        ctx.barrier()
    assert ctx.notify_waitsome(segment, 3, 0) is None
    assert ctx.notify_waitsome(segment, first=3, count=0) is None
    for wrong in (1.0, "1", None, b"1", [1], segment):
        for call in (
            lambda at: ctx.notify(at, segment, 3),
            lambda at: ctx.notify(peer, segment, at),
            lambda at: ctx.write_notify(mine, at, theirs, 3),
            lambda at: ctx.write_notify(mine, peer, theirs, 3, at),
            lambda at: ctx.notify_waitsome(segment, 4, at or 1.0),
            lambda at: ctx.notify_reset(segment, at),
        ):
            with pytest.raises(TypeError, match="incompatible"):
                call(wrong)
    with pytest.raises(TypeError, match="incompatible"):
        ctx.notify_waitsome(segment, range(0, 8, 2))
    for call in (
        lambda: ctx.notify(peer, segment),
        lambda: ctx.notify(peer, segment, 3, 1, 0),
        lambda: ctx.write_notify(mine, peer, theirs),
        lambda: ctx.notify_waitsome(segment, 0, 1, 5.0),
        lambda: ctx.notify_reset(segment),
        lambda: pgasdl.Context.notify_reset(segment, segment, 3),
    ):
        with pytest.raises(TypeError, match="incompatible"):
            call()
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.notify_waitsome(segment, timeout=0)


@contract(ranks=2)
def test_ids_to_wait_for(ctx: Any) -> None:
    """A range says which; a first id says how many, too; alone it warns, and means all above."""
    segment = ctx.segment(8, notifications=8)
    ctx.notify(1 - ctx.rank, segment, 5)
    assert ctx.notify_waitsome(segment, range(4, 8)) == 5
    assert ctx.notify_waitsome(segment, range(5, 6)) == 5
    assert ctx.notify_waitsome(segment, first=range(8), timeout=1) == 5
    assert ctx.notify_waitsome(segment, count=6) == 5
    assert ctx.notify_waitsome(segment, range(3, 3)) is None
    with pytest.warns(DeprecationWarning, match=r"range\(first, segment.notifications\)"):
        assert ctx.notify_waitsome(segment, 4) == 5
    with pytest.raises(pgasdl.PgasTimeoutError, match=r"0 to 4 .* within 0\.01 s; 5 is raised"):
        ctx.notify_waitsome(segment, range(5), timeout=0.01)
    for wrong in (range(-1, 3), range(7, 9), range(8, 9)):
        with pytest.raises(pgasdl.NotificationError):
            ctx.notify_waitsome(segment, wrong, timeout=0)
    with pytest.raises(pgasdl.NotificationError, match="leave out the count"):
        ctx.notify_waitsome(segment, range(5), 1)
    ctx.barrier()


@contract(ranks=2)
def test_tries_find_any_of_a_board(ctx: Any) -> None:
    """Whoever only ever tries finds what is raised anywhere on a board, by whichever queue."""
    segment = ctx.segment(0, notifications=70_000)
    queues = (0, ctx.queue_create())
    places = [0, 255, 256, 69_999, *range(700, 60_000, 5000)]
    for turn in (1, 2):
        for number, place in enumerate(places):
            ctx.notify(1 - ctx.rank, segment, place, turn, queue=queues[number % 2])
        left = set(places)
        until = time.monotonic() + 60
        while left:
            try:
                found = ctx.notify_waitsome(segment, timeout=0)
            except pgasdl.PgasTimeoutError:
                assert time.monotonic() < until, f"never found: {left}"
                continue
            assert ctx.notify_reset(segment, found) == turn
            left.remove(found)
        ctx.barrier()


@contract(ranks=3)
def test_write_notify_all_to_all(ctx: Any) -> None:
    """A rank that sees the notification sees the data."""
    n = 1000
    segment = ctx.segment(8 * n * (ctx.size + 1))
    values = segment.numpy(np.int64).reshape(ctx.size + 1, n)
    values[ctx.size] = ctx.rank + 1
    mine = segment[8 * n * ctx.size : 8 * n * (ctx.size + 1)]
    slot = segment[8 * n * ctx.rank : 8 * n * (ctx.rank + 1)]
    for peer in range(ctx.size):
        ctx.write_notify(mine, peer, slot, ctx.rank, ctx.rank + 1)
    for _ in range(ctx.size):
        sender = ctx.notify_waitsome(segment, 0, ctx.size)
        assert ctx.notify_reset(segment, sender) == sender + 1
        assert (values[sender] == sender + 1).all()
    ctx.wait()


@contract(ranks=2, on=ORDERING)
def test_small_writes_then_notify(ctx: Any) -> None:
    """A notify overtakes no earlier write of its queue (64 MiB of 4 KiB writes, scaled down)."""
    piece, n = 4096, 64
    segment = ctx.segment(2 * piece * n)
    words = segment.numpy(np.int32).reshape(2, -1)
    peer = 1 - ctx.rank
    for turn in range(1, 5):
        words[0] = np.arange(words.shape[1]) * turn * (ctx.rank + 1)
        for number in np.random.default_rng(turn).permutation(n):
            at = int(number) * piece
            there = piece * n + at
            ctx.write(segment[at : at + piece], peer, segment[there : there + piece])
        ctx.notify(peer, segment, 0, turn)
        assert take(ctx, segment, 0) == turn
        assert (words[1] == np.arange(words.shape[1]) * turn * (peer + 1)).all()
        ctx.wait()
        ctx.barrier()


@contract(ranks=2, on=ORDERING)
def test_notify_covers_writes_to_other_segments(ctx: Any) -> None:
    """A queue keeps its order, whichever segments the writes and the notification belong to."""
    first, second, board = ctx.segment(4096), ctx.segment(1 << 16), ctx.segment(0)
    source = ctx.segment(1 << 16)
    source.numpy()[:] = ctx.rank + 1
    peer = 1 - ctx.rank
    ctx.write(source[0:4096], peer, first[0:4096])
    ctx.write(source[0 : 1 << 16], peer, second[0 : 1 << 16])
    ctx.notify(peer, board, 9, 5)
    assert take(ctx, board, 9) == 5
    assert (first.numpy() == peer + 1).all()
    assert (second.numpy() == peer + 1).all()
    ctx.wait()


@contract(ranks=2, on=ORDERING)
def test_notify_covers_completed_writes_to_bound_memory(ctx: Any) -> None:
    """Some transports reach bound memory by another way than mapped memory and boards."""
    n = 1 << 20
    target, source, board = np.zeros(n, np.int32), ctx.segment(4 * n), ctx.segment(0)
    bound, values = ctx.bind(target), source.numpy(np.int32)
    peer = 1 - ctx.rank
    for turn in range(1, 11):
        values[:] = turn
        ctx.barrier()
        ctx.write(source[0 : 4 * n], peer, bound[0 : 4 * n])
        ctx.wait()
        ctx.notify(peer, board, 0, turn)
        assert take(ctx, board, 0) == turn
        assert (target == turn).all()


@contract(ranks=2, on=ORDERING)
def test_notify_covers_notified_writes_to_bound_memory(ctx: Any) -> None:
    """A flag of another segment comes after an earlier flag's data, of any length."""
    for n in (2, 2000, 100_000):
        source, target = ctx.segment(4 * n), np.zeros(n, np.int32)
        bound, values = ctx.bind(target), source.numpy(np.int32)
        for turn in range(1, 21):
            if ctx.rank == 0:
                values[:] = turn
                ctx.write_notify(source[:], 1, bound[:], 0)
                ctx.notify(1, source, 1, turn)
                ctx.wait()
            else:
                assert take(ctx, source, 1) == turn
                assert (target == turn).all()
                ctx.notify_reset(bound, 0)
            ctx.barrier()


@contract(ranks=2, on=ORDERING)
def test_a_flag_covers_its_own_queue(ctx: Any) -> None:
    """Several queues at once: each queue's notification covers that queue's writes."""
    n_queues, n = 4, 2048
    queues = [0, *(ctx.queue_create() for _ in range(n_queues - 1))]
    segment = ctx.segment(2 * n_queues * n)
    bytes_ = segment.numpy().reshape(2, n_queues, n)
    peer = 1 - ctx.rank
    for place, queue in enumerate(queues):
        bytes_[0, place] = 10 * place + ctx.rank + 1
        for at in range(0, n, 256):
            here = place * n + at
            there = n_queues * n + here
            ctx.write(segment[here : here + 256], peer, segment[there : there + 256], queue=queue)
        ctx.notify(peer, segment, place, 1 + place, queue=queue)
    for _ in range(n_queues):
        place = ctx.notify_waitsome(segment, 0, n_queues)
        assert ctx.notify_reset(segment, place) == 1 + place
        assert (bytes_[1, place] == 10 * place + peer + 1).all()
    for queue in queues:
        ctx.wait(queue)


@contract(ranks=2, on=ORDERING)
def test_data_is_there_when_reset_hands_out_the_value(ctx: Any) -> None:
    """Polling notify_reset without waitsome orders memory as well."""
    segment = ctx.segment(2 * 8192)
    values = segment.numpy(np.int64)
    half = values.size // 2
    peer = 1 - ctx.rank
    for turn in range(1, 31):
        values[:half] = turn
        ctx.write_notify(segment[0:8192], peer, segment[8192:16384], 1, turn)
        end = time.monotonic() + 20
        while (seen := ctx.notify_reset(segment, 1)) == 0:
            assert time.monotonic() < end
            with pytest.raises(pgasdl.PgasTimeoutError):  # lets the adversary move, finds nothing
                ctx.notify_waitsome(segment, 2, 1, timeout=0)
        assert seen == turn
        assert (values[half:] == turn).all()
        ctx.wait()
        ctx.barrier()


@contract(ranks=2, on=MAPPED)
def test_write_scatter_and_gather(ctx: Any) -> None:
    """Rank 0 scatters slots with write_notify, all write back; 2 MiB scaled to 256 KiB."""
    for nbytes in (4, 100, 4096, 1 << 18):
        segment = ctx.segment(nbytes * (ctx.size + 1), notifications=64)
        slots = segment.numpy().reshape(ctx.size + 1, nbytes)
        own = segment[nbytes * ctx.size : nbytes * (ctx.size + 1)]
        slot = segment[nbytes * ctx.rank : nbytes * (ctx.rank + 1)]
        if ctx.rank == 0:
            pattern = np.random.default_rng(nbytes).integers(0, 256, (ctx.size, nbytes))
            slots[: ctx.size] = pattern
            for peer in range(ctx.size):
                at = nbytes * peer
                ctx.write_notify(segment[at : at + nbytes], peer, own, 32)
        assert take(ctx, segment, 32) == 1
        ctx.write_notify(own, 0, slot, ctx.rank, 2)
        if ctx.rank == 0:
            for _ in range(ctx.size):
                sender = ctx.notify_waitsome(segment, 0, ctx.size)
                assert ctx.notify_reset(segment, sender) == 2
                assert (slots[sender] == pattern[sender]).all()
        ctx.wait()
        ctx.barrier()


@contract(ranks=2)
def test_second_notify_overwrites(ctx: Any) -> None:
    """Notifications are not counted: until a reset, only the last value stays."""
    segment = ctx.segment(8)
    if ctx.rank == 0:
        for value in (1, 5, 2**32 - 1, 3):
            ctx.notify(1, segment, 0, value)
        ctx.notify(1, segment, 1, 1)
    else:
        assert take(ctx, segment, 1) == 1
        assert ctx.notify_reset(segment, 0) == 3
        assert ctx.notify_reset(segment, 0) == 0
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.notify_waitsome(segment, 0, 1, timeout=0)


@contract(ranks=2, on=PROCESSES)
def test_reset_loses_no_value_that_arrives_meanwhile(ctx: Any) -> None:
    """Two values in a row, polled all the time: the second may replace the first, never be lost.

    Between processes, because threads of one interpreter take turns at the board.
    """
    segment = ctx.segment(0, notifications=2)
    for turn in range(1, 1001):
        if ctx.rank == 0:
            ctx.notify(1, segment, 0, 2 * turn)
            ctx.notify(1, segment, 0, 2 * turn + 1)
            assert take(ctx, segment, 1) == turn
        else:
            end = time.monotonic() + 5
            while (seen := ctx.notify_reset(segment, 0)) != 2 * turn + 1:
                assert seen in (0, 2 * turn)
                assert time.monotonic() < end, "the value was lost"
            ctx.notify(0, segment, 1, turn)


@contract(ranks=2)
def test_values_travel_whole(ctx: Any) -> None:
    segment = ctx.segment(0)
    peer = 1 - ctx.rank
    for turn, value in enumerate((1, 255, 256, 2**31 - 1, 2**31, 2**32 - 1)):
        ctx.notify(peer, segment, turn, value)
        assert take(ctx, segment, turn) == value


@contract(ranks=2)
def test_all_ids_to_all_ranks(ctx: Any) -> None:
    """All of the default's 65536 ids over shm, a part of them over other transports."""
    segment = ctx.segment(0)
    step = 1 if ctx.transport_of(0) == "shm" else 61
    ids = [*range(ctx.rank, 65536, step * ctx.size), *([65535] if step > 1 and ctx.rank else [])]
    for number in dict.fromkeys(ids):
        for peer in range(ctx.size):
            ctx.notify(peer, segment, number, number + 1)
    theirs = set()
    for rank in range(ctx.size):
        theirs |= {*range(rank, 65536, step * ctx.size), *([65535] if step > 1 and rank else [])}
    for number in sorted(theirs):
        assert take(ctx, segment, number) == number + 1
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.notify_waitsome(segment, timeout=0)


@contract(ranks=2)
def test_last_id_and_beyond(ctx: Any) -> None:
    """Boards may differ from rank to rank: the receiver's board sets the limit."""
    n = 100 + 28 * ctx.rank
    segment = ctx.segment(8, notifications=n)
    peer = 1 - ctx.rank
    theirs = 100 + 28 * peer
    ctx.notify(peer, segment, theirs - 1, 9)
    for number in (theirs, theirs + 1, -1, 2**31, 2**32, 2**63, 2**64 - 1, 2**70):
        with pytest.raises(pgasdl.NotificationError):
            ctx.notify(peer, segment, number)
        with pytest.raises(pgasdl.NotificationError):
            ctx.write_notify(segment[0:8], peer, segment[0:8], number)
    for number in (n, -1, 2**32, 2**64 - 1):
        with pytest.raises(pgasdl.NotificationError):
            ctx.notify_reset(segment, number)
        with pytest.raises(pgasdl.NotificationError):
            ctx.read_notify(segment[0:8], peer, segment[0:8], number)
        with pytest.raises(pgasdl.NotificationError):
            ctx.notify_waitsome(segment, number, 1, timeout=0)
    for first, count in ((n - 1, 2), (0, n + 1), (n + 1, 0), (1, 2**64 - 1), (1, 2**63)):
        if count == 0:
            continue
        with pytest.raises(pgasdl.NotificationError):
            ctx.notify_waitsome(segment, first, count, timeout=0)
    assert take(ctx, segment, n - 1) == 9


@contract(ranks=2, notifications=131072)
def test_more_notifications_by_config(ctx: Any) -> None:
    segment = ctx.segment(0)
    assert ctx.limits.notifications == segment.notifications == 131072
    ctx.notify(1 - ctx.rank, segment, 131071, 4)
    assert take(ctx, segment, 131071) == 4
    with pytest.raises(pgasdl.NotificationError):
        ctx.notify(1 - ctx.rank, segment, 131072)
    ctx.notify(ctx.rank, ctx.segment(8, notifications=1), 0)


@contract(ranks=2)
def test_values_refused(ctx: Any) -> None:
    segment = ctx.segment(16)
    before = segment.numpy().copy()
    for value in (0, -1, 2**32, 2**63, 2**64, 2**80):
        for post in (
            lambda value: ctx.notify(1 - ctx.rank, segment, 0, value),
            lambda value: ctx.write_notify(segment[0:8], 1 - ctx.rank, segment[8:16], 0, value),
            lambda value: ctx.read_notify(segment[0:8], 1 - ctx.rank, segment[8:16], 0, value),
        ):
            with pytest.raises(pgasdl.NotificationError):
                post(value)
    ctx.barrier()
    assert ctx.notify_reset(segment, 0) == 0
    assert (segment.numpy() == before).all()
    assert ctx.queue_size() == 0


@contract(ranks=2)
def test_waitsome_timeouts(ctx: Any) -> None:
    """Timeout 0 is one try, a finite one ends; with a raised notification there is no timeout."""
    segment = ctx.segment(0, notifications=16)
    for timeout in (0, 0.0, 0.02, 1e-9):
        with pytest.raises(pgasdl.PgasTimeoutError, match="notifications 4 to 6"):
            ctx.notify_waitsome(segment, 4, 3, timeout=timeout)
    ctx.notify(ctx.rank, segment, 5)
    assert ctx.notify_waitsome(segment, 4, 3) == 5
    for timeout in (0, 0.01, None):
        assert ctx.notify_waitsome(segment, 4, 3, timeout=timeout) == 5
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError):
            ctx.notify_waitsome(segment, 4, 3, timeout=timeout)


@contract(ranks=2)
def test_waitsome_is_fair(ctx: Any) -> None:
    """Ids that stay raised take turns; one that is raised again at once starves nobody."""
    segment = ctx.segment(0, notifications=64)
    for number in range(8, 24):
        ctx.notify(ctx.rank, segment, number)
    ctx.notify_waitsome(segment, 23, 1)
    seen = [ctx.notify_waitsome(segment, 8, 16) for _ in range(32)]
    assert sorted(seen[:16]) == sorted(seen[16:]) == list(range(8, 24))
    for _ in range(16):
        found = ctx.notify_waitsome(segment, 8, 16)
        assert ctx.notify_reset(segment, found) == 1
        ctx.notify(ctx.rank, segment, 8)  # a greedy sender
        ctx.notify_waitsome(segment, 8, 1)
    assert [n for n in range(9, 24) if ctx.notify_reset(segment, n)] in ([], [n for n in [23]])


@contract(ranks=2)
def test_outstanding_on_every_id(ctx: Any) -> None:
    """Every id of a board in use at once, with payloads (8 KiB scaled to 64 bytes)."""
    n, nbytes = 1024, 64
    segment = ctx.segment(nbytes * (n + 1), notifications=n)
    rows = segment.numpy().reshape(n + 1, nbytes)
    peer = 1 - ctx.rank
    rows[n] = ctx.rank + 1
    for number in range(n):
        there = segment[nbytes * number : nbytes * (number + 1)]
        ctx.write_notify(segment[nbytes * n : nbytes * (n + 1)], peer, there, number, number + 1)
    seen = set()
    while len(seen) < n:
        number = ctx.notify_waitsome(segment)
        assert ctx.notify_reset(segment, number) == number + 1
        assert (rows[number] == peer + 1).all()
        seen.add(number)
    ctx.wait()


@contract(ranks=2)
def test_notify_after_own_delete(ctx: Any) -> None:
    """A rank that deleted its own copy still reaches its peer's."""
    segment = ctx.segment(64)
    if ctx.rank == 0:
        segment.delete()
        for number in range(0, 65536, 257):
            ctx.notify(1, segment, number, number + 1)
    else:
        for number in range(0, 65536, 257):
            assert take(ctx, segment, number) == number + 1


@contract(ranks=2)
def test_records_one_after_another(ctx: Any) -> None:
    """Ten records through one slot; each is sent when the one before was taken."""
    segment = ctx.segment(256, notifications=2)
    for number in range(10):
        record = f"record {number}".encode()
        if ctx.rank == 0:
            segment.numpy()[: len(record)] = np.frombuffer(record, np.uint8)
            ctx.write_notify(segment[0 : len(record)], 1, segment[0 : len(record)], 0, 1 + number)
            assert take(ctx, segment, 1) == 1
            ctx.wait()
        else:
            assert take(ctx, segment, 0) == 1 + number
            assert bytes(segment.numpy()[: len(record)]) == record
            ctx.notify(0, segment, 1)
