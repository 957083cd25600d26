"""write, read and their list and notifying forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_harness import ORDERING, PROCESSES, contract

import pgasdl

LIST = 255


def pattern(rank: int, n: int) -> Any:
    return np.random.default_rng([rank, n]).integers(0, 256, n).astype(np.uint8)


@contract(ranks=3)
def test_write_all_sizes(ctx: Any) -> None:
    """Powers of two to every rank, at odd offsets (8 MiB scaled to 1 MiB)."""
    longest = 1 << 20
    segment = ctx.segment(longest + (longest + 64) * ctx.size)
    view = segment.numpy()
    for power in range(0, 21, 1 if ctx.transport_of(0) == "shm" else 4):
        n = 1 << power
        view[1 : 1 + n - 1] = pattern(ctx.rank, n - 1) if n > 1 else 0
        at = longest + (longest + 64) * ctx.rank + power % 8
        for peer in range(ctx.size):
            ctx.write_notify(segment[1:n], peer, segment[at : at + n - 1], ctx.rank, n)
        for sender in range(ctx.size):
            assert ctx.notify_waitsome(segment, sender, 1) == sender
            assert ctx.notify_reset(segment, sender) == n
            there = longest + (longest + 64) * sender + power % 8
            if n > 1:
                assert (view[there : there + n - 1] == pattern(sender, n - 1)).all()
        ctx.wait()
        ctx.barrier()


@contract(ranks=3)
def test_read_all_sizes(ctx: Any) -> None:
    """4 B to 128 B in steps of 4, then powers of two, from every rank."""
    longest = 1 << 18
    segment = ctx.segment(2 * longest)
    view = segment.numpy()
    view[:longest] = pattern(ctx.rank, longest)
    ctx.barrier()
    for n in (*range(4, 129, 4), *(1 << power for power in range(8, 19))):
        for peer in range(ctx.size):
            ctx.read(segment[longest : longest + n], peer, segment[0:n])
            ctx.wait()
            assert (view[longest : longest + n] == pattern(peer, longest)[:n]).all()


@contract(ranks=2)
def test_unaligned_1800_bytes(ctx: Any) -> None:
    segment = ctx.segment(8192)
    view = segment.numpy()
    view[13:1813] = pattern(ctx.rank, 1800)
    for peer in range(ctx.size):
        at = 2001 + 1907 * ctx.rank
        ctx.write_notify(segment[13:1813], peer, segment[at : at + 1800], ctx.rank)
    for sender in range(ctx.size):
        ctx.notify_waitsome(segment, sender, 1)
        at = 2001 + 1907 * sender
        assert (view[at : at + 1800] == pattern(sender, 1800)).all()
        assert view[at - 1] == 0
    ctx.wait()


@contract(ranks=2)
def test_limits_of_one_transfer(ctx: Any) -> None:
    """A whole segment in one request (1 GiB scaled to 16 MiB), and one byte more."""
    n = 16 << 20
    segment, inbox = ctx.segment(n), ctx.segment(n)
    segment.numpy(np.int64)[:] = np.arange(n // 8) * (ctx.rank + 3)
    peer = 1 - ctx.rank
    ctx.write_notify(segment[0:n], peer, inbox[0:n], 0)
    ctx.notify_waitsome(inbox)
    assert (inbox.numpy(np.int64) == np.arange(n // 8) * (peer + 3)).all()
    ctx.wait()
    ctx.barrier()
    inbox.numpy()[:] = 0
    ctx.read(inbox[0:n], peer, segment[0:n])
    ctx.wait()
    assert (inbox.numpy(np.int64) == np.arange(n // 8) * (peer + 3)).all()
    for begin, end in ((0, n + 1), (1, n + 1), (n, n + 1)):
        with pytest.raises(pgasdl.SegmentError):
            ctx.write(segment[begin:end], peer, inbox[begin:end])
        with pytest.raises(pgasdl.SegmentError):
            ctx.read(segment[begin:end], peer, inbox[begin:end])


@contract(ranks=(1, 2))
def test_zero_bytes(ctx: Any) -> None:
    """Moving nothing changes nothing; the notifying forms still notify."""
    segment = ctx.segment(64)
    segment.numpy()[:] = 7
    peer = (ctx.rank + 1) % ctx.size
    for at in (0, 10, 64):
        ctx.write(segment[at:at], peer, segment[at:at])
        ctx.read(segment[at:at], peer, segment[at:at])
        ctx.write_list([(segment[at:at], segment[0:0])] * 3, peer)
        ctx.read_list([(segment[at:at], segment[0:0])] * 3, peer)
    ctx.write_list([], peer)
    ctx.read_list([], peer)
    ctx.write_notify(segment[64:64], peer, segment[64:64], 1, 11)
    ctx.read_notify(segment[64:64], peer, segment[0:0], 2, 12)
    ctx.write_list_notify([], peer, segment, 3, 13)
    ctx.read_list_notify([], peer, segment, 4, 14)
    for number in range(1, 5):
        assert ctx.notify_waitsome(segment, number, 1) == number
        assert ctx.notify_reset(segment, number) == 10 + number
    ctx.wait()
    assert (segment.numpy() == 7).all()
    with pytest.raises(pgasdl.SegmentError):
        ctx.write(segment[65:65], peer, segment[0:0])


@contract(ranks=3, on=ORDERING)
def test_read_notify(ctx: Any) -> None:
    """The local notification comes after the payload."""
    n = 5000
    segment = ctx.segment(n * (ctx.size + 1))
    rows = segment.numpy().reshape(ctx.size + 1, n)
    rows[ctx.size] = pattern(ctx.rank, n)
    ctx.barrier()
    for peer in range(ctx.size):
        here = segment[n * peer : n * (peer + 1)]
        ctx.read_notify(here, peer, segment[n * ctx.size : n * (ctx.size + 1)], peer, peer + 1)
    for _ in range(ctx.size):
        peer = ctx.notify_waitsome(segment, 0, ctx.size)
        assert ctx.notify_reset(segment, peer) == peer + 1
        assert (rows[peer] == pattern(peer, n)).all()
    ctx.barrier()
    ctx.wait()


@contract(ranks=2, on=ORDERING)
def test_lists(ctx: Any) -> None:
    """255 pieces of different lengths, some of them empty, in one request."""
    lengths = [0 if i % 5 == 0 else 1 + 3 * (i % 40) for i in range(LIST)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    total = starts[-1]
    segment = ctx.segment(2 * total, notifications=4)
    view = segment.numpy()
    view[:total] = pattern(ctx.rank, total)
    peer = 1 - ctx.rank
    expected = np.zeros(total, np.uint8)
    forth = []
    for i, n in enumerate(lengths):  # at the target the pieces lie in reverse order
        there = 2 * total - starts[i] - n
        forth.append((segment[starts[i] : starts[i] + n], segment[there : there + n]))
        at = there - total
        expected[at : at + n] = pattern(peer, total)[starts[i] : starts[i] + n]
    ctx.write_list_notify(forth, peer, segment, 0, 5)
    assert ctx.notify_waitsome(segment, 0, 1) == 0
    assert ctx.notify_reset(segment, 0) == 5
    assert (view[total:] == expected).all()
    ctx.wait()
    assert ctx.queue_size() == 0
    ctx.barrier()
    back = [(theirs, mine) for mine, theirs in forth]
    for form in range(3):
        view[total:] = 0
        if form == 0:
            ctx.read_list_notify(back, peer, segment, 1, 6)
            assert ctx.notify_waitsome(segment, 1, 1) == 1
            assert ctx.notify_reset(segment, 1) == 6
        elif form == 1:
            ctx.read_list(back, peer)
            ctx.wait()
        else:
            ctx.barrier()
            ctx.write_list(forth, peer)
            ctx.notify(peer, segment, 2)
            assert ctx.notify_waitsome(segment, 2, 1) == 2
        assert (view[total:] == expected).all()
        ctx.wait()
        ctx.barrier()


@contract(ranks=2)
def test_list_limits(ctx: Any) -> None:
    segment = ctx.segment(64)
    most = ctx.limits.list_elements
    pair = (segment[0:1], segment[8:9])
    forms = (
        lambda pairs: ctx.write_list(pairs, 0),
        lambda pairs: ctx.read_list(pairs, 0),
        lambda pairs: ctx.write_list_notify(pairs, 0, segment, 0),
        lambda pairs: ctx.read_list_notify(pairs, 0, segment, 0),
    )
    for form in forms:
        with pytest.raises(pgasdl.SegmentError):
            form([pair] * (most + 1))
        for bad in ([segment[0:1]], [(segment[0:1],)], [pair + pair], [(1, 2)], [[*pair]], ["ab"]):
            with pytest.raises((pgasdl.BufferRefusedError, TypeError)):
                form(bad)
        for bad in (5, None, segment):
            with pytest.raises(TypeError):
                form(bad)
        # One bad pair, and nothing of the list moves.
        segment.numpy()[0] = 1
        for last in (
            (segment[0:1], segment[64:65]),
            (segment[64:65], segment[0:1]),
            (segment[0:2], segment[0:1]),
        ):
            with pytest.raises(pgasdl.SegmentError):
                form([pair, last])
        assert segment.numpy().sum() == 1
    assert ctx.queue_size() == 0
    if ctx.transport_of(0) == "shm":
        ctx.write_list([pair] * most, ctx.rank)
        ctx.wait()
        assert segment.numpy()[8] == 1


@contract(ranks=2)
def test_sizes_must_agree(ctx: Any) -> None:
    segment = ctx.segment(64)
    for mine, theirs in ((4, 5), (5, 4), (0, 1), (64, 0)):
        with pytest.raises(pgasdl.SegmentError, match="bytes"):
            ctx.write(segment[0:mine], 0, segment[0:theirs])
        with pytest.raises(pgasdl.SegmentError, match="bytes"):
            ctx.read(segment[0:mine], 0, segment[0:theirs])


@contract(ranks=2, on=ORDERING)
def test_wait_frees_the_source(ctx: Any) -> None:
    """After wait(queue) the source may change; without it an adversary sends the new bytes."""
    segment = ctx.segment(2 * 4096)
    view = segment.numpy()
    peer = 1 - ctx.rank
    for turn in range(1, 16):
        view[:4096] = turn
        ctx.write(segment[0:4096], peer, segment[4096:8192])
        ctx.wait()
        view[:4096] = 0
        ctx.notify(peer, segment, 0, turn)
        assert ctx.notify_waitsome(segment, 0, 1) == 0
        assert ctx.notify_reset(segment, 0) == turn
        assert (view[4096:] == turn).all()
        ctx.barrier()


@contract(ranks=2)
def test_many_odd_writes(ctx: Any) -> None:
    """Writes at odd offsets, waiting when the queue is nearly full (16384 x 32 KiB scaled)."""
    n, nbytes = 2000, 1001
    segment, inbox = ctx.segment(nbytes), ctx.segment(n * nbytes + 1)
    segment.numpy()[:] = pattern(ctx.rank, nbytes)
    peer = 1 - ctx.rank
    for number in range(n):
        at = 1 + nbytes * number
        ctx.write(segment[0:nbytes], peer, inbox[at : at + nbytes])
        if ctx.queue_size() > ctx.limits.queue_depth - 10:
            ctx.wait()
    ctx.notify(peer, inbox, 0)
    ctx.notify_waitsome(inbox)
    assert (inbox.numpy()[1:].reshape(n, nbytes) == pattern(peer, nbytes)).all()
    ctx.wait()


@contract(ranks=3)
def test_right_and_left_neighbour(ctx: Any) -> None:
    segment = ctx.segment(3)
    segment.numpy()[2] = ctx.rank + 1
    ctx.write_notify(segment[2:3], (ctx.rank + 1) % ctx.size, segment[0:1], 0)
    ctx.write_notify(segment[2:3], (ctx.rank - 1) % ctx.size, segment[1:2], 1)
    for number in range(2):
        assert ctx.notify_waitsome(segment, number, 1) == number
    ctx.wait()
    ctx.barrier(timeout=5)
    left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
    assert segment.numpy().tolist() == [left + 1, right + 1, ctx.rank + 1]


@contract(ranks=2)
def test_pressure(ctx: Any) -> None:
    """Small writes, a notify, and everything read back (4 GiB scaled to 2 x 2 MiB)."""
    n = 1 << 20 if ctx.transport_of(0) == "shm" else 1 << 17
    segment, copy = ctx.segment(2 * n), ctx.segment(n)
    peer = 1 - ctx.rank
    for turn in range(2):
        segment.numpy()[:n] = pattern(10 * turn + ctx.rank, n)
        for at in range(0, n, 4096):
            ctx.write(segment[at : at + 4096], peer, segment[n + at : n + at + 4096])
            if ctx.queue_size() == ctx.limits.queue_depth:
                ctx.wait()
        ctx.notify(peer, segment, 0)
        ctx.notify_waitsome(segment)
        ctx.notify_reset(segment, 0)
        assert (segment.numpy()[n:] == pattern(10 * turn + peer, n)).all()
        ctx.wait()
        for at in range(0, n, n // 2):
            ctx.read(copy[at : at + n // 2], peer, segment[n + at : n + at + n // 2])
        ctx.wait()
        assert (copy.numpy() == segment.numpy()[:n]).all()
        ctx.barrier()


@contract(ranks=2, on=PROCESSES)
def test_read_back(ctx: Any) -> None:
    """A read returns what an earlier write_notify on the same queue has written."""
    n = 1000
    segment = ctx.segment(3 * n)
    source, _, copy = segment.numpy().reshape(3, n)
    peer = 1 - ctx.rank
    for turn in range(1, 201):
        source[:] = turn
        ctx.write_notify(segment[0:n], peer, segment[n : 2 * n], 0, turn)
        ctx.read(segment[2 * n : 3 * n], peer, segment[n : 2 * n])
        ctx.wait()
        assert (copy == turn).all()
