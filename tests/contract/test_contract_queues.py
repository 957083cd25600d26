"""Queues: full, waited for, created, deleted, many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl


@contract(ranks=2, queue_depth=16)
@pytest.mark.parametrize("form", ["write", "read", "write_notify", "write_list_notify", "mixed"])
def test_full(ctx: Any, form: str) -> None:
    """Every posting form is one entry; a full queue answers QueueFullError, and can be reused."""
    segment = ctx.segment(64)
    peer = 1 - ctx.rank
    a, b = segment[0:8], segment[32:40]
    forms = {
        "write": lambda: ctx.write(a, peer, b, timeout=0),
        "read": lambda: ctx.read(b, peer, a, timeout=0),
        "write_notify": lambda: ctx.write_notify(a, peer, b, 0, timeout=0),
        "write_list_notify": lambda: ctx.write_list_notify(
            [(a, b), (segment[0:1], segment[50:51])], peer, segment, 1, timeout=0
        ),
    }
    posts = list(forms.values()) if form == "mixed" else [forms[form]]
    for _ in range(3):
        for number in range(16):
            assert ctx.queue_size() == number
            posts[number % len(posts)]()
        for post in forms.values():
            with pytest.raises(pgasdl.QueueFullError, match="16 requests"):
                post()
        with pytest.raises(pgasdl.QueueFullError):
            ctx.notify(peer, segment, 5, timeout=0)
        assert ctx.queue_size() == 16
        ctx.wait()
        assert ctx.queue_size() == 0
        ctx.barrier()
        # The refused write was not posted.
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.notify_waitsome(segment, 5, 1, timeout=0)


@contract(ranks=2, queue_depth=4)
def test_waits_for_a_place(ctx: Any) -> None:
    """With time to wait, a posting call completes the queue itself."""
    segment = ctx.segment(0, notifications=100)
    peer = 1 - ctx.rank
    for number in range(100):
        ctx.notify(peer, segment, number, number + 1, timeout=(None, 5, 0.5)[number % 3])
        assert ctx.queue_size() <= 4
    for number in range(100):
        assert ctx.notify_waitsome(segment, number, 1) == number
        assert ctx.notify_reset(segment, number) == number + 1


@contract(ranks=2, queue_depth=4)
def test_another_queue_when_full(ctx: Any) -> None:
    segment = ctx.segment(0)
    other = ctx.queue_create()
    for number in range(4):
        ctx.notify(1 - ctx.rank, segment, number, timeout=0)
    with pytest.raises(pgasdl.QueueFullError):
        ctx.notify(1 - ctx.rank, segment, 4, timeout=0)
    ctx.notify(1 - ctx.rank, segment, 4, queue=other, timeout=0)
    assert (ctx.queue_size(0), ctx.queue_size(other)) == (4, 1)
    ctx.wait(other)
    assert (ctx.queue_size(0), ctx.queue_size(other)) == (4, 0)
    for number in range(5):
        assert ctx.notify_waitsome(segment, number, 1) == number


@contract(ranks=2)
def test_one_try_at_a_time(ctx: Any) -> None:
    """Everything with timeout=0, retried; the queue ends empty."""
    segment = ctx.segment(4096)
    segment.numpy()[:2048] = ctx.rank + 1
    for number in range(64):
        at = 32 * number
        while True:
            try:
                ctx.write(
                    segment[at : at + 32], 1 - ctx.rank, segment[2048 + at : 2080 + at], timeout=0
                )
                break
            except pgasdl.QueueFullError:
                pass
    tries = 0
    while True:
        try:
            ctx.wait(timeout=0)
            break
        except pgasdl.PgasTimeoutError:
            tries += 1
            assert tries < 100_000
    assert ctx.queue_size() == 0
    ctx.barrier()
    ctx.notify(1 - ctx.rank, segment, 0)
    ctx.notify_waitsome(segment)
    assert (segment.numpy()[2048:] == 2 - ctx.rank).all()


@contract(ranks=2, queues=6)
def test_create_delete_and_use(ctx: Any) -> None:
    """Queues up to the limit, one more fails; ids are used again; every queue works."""
    assert ctx.limits.queues == 6
    segment = ctx.segment(64 * 8)
    segment.numpy(np.int64)[:8] = np.arange(8) + 10 * ctx.rank
    for _ in range(3):
        made = [ctx.queue_create() for _ in range(5)]
        assert sorted([0, *made]) == list(range(6))
        with pytest.raises(pgasdl.QueueError, match="6"):
            ctx.queue_create()
        ctx.barrier()
        for queue in (0, *made):
            at = 8 * queue
            here, there = segment[at : at + 8], segment[64 + at : 72 + at]
            ctx.write_notify(here, 1 - ctx.rank, there, queue, queue + 1, queue=queue)
            ctx.read(segment[128 + at : 136 + at], 1 - ctx.rank, here, queue=queue)
        for queue in (0, *made):
            ctx.wait(queue)
            assert ctx.notify_waitsome(segment, queue, 1) == queue
            assert ctx.notify_reset(segment, queue) == queue + 1
            words = segment.numpy(np.int64)
            assert words[8 + queue] == words[16 + queue] == queue + 10 * (1 - ctx.rank)
        # Queues are deleted in any order, and their ids used again.
        for queue in (made[3], made[0], made[4]):
            ctx.queue_delete(queue)
        again = {ctx.queue_create() for _ in range(3)}
        assert again == {made[3], made[0], made[4]}
        for queue in made:
            ctx.queue_delete(queue)
        ctx.barrier()


@contract(ranks=2)
def test_no_such_queue(ctx: Any) -> None:
    segment = ctx.segment(64)
    gone = ctx.queue_create()
    ctx.queue_delete(gone)
    piece = segment[0:8]
    # 16 and 17 are the library's own.
    for queue in (gone, -1, 15, 16, 17, 18, 2**31, 2**32, 2**63, 2**64 - 1):
        for use in (
            ctx.wait,
            lambda queue: ctx.wait(queue, timeout=0),
            ctx.queue_size,
            ctx.queue_delete,
            lambda queue: ctx.write(piece, 0, segment[8:16], queue=queue),
            lambda queue: ctx.read(piece, 0, segment[8:16], queue=queue),
            lambda queue: ctx.notify(0, segment, 0, queue=queue),
            lambda queue: ctx.write_notify(piece, 0, segment[8:16], 0, queue=queue),
            lambda queue: ctx.read_notify(piece, 0, segment[8:16], 0, queue=queue),
            lambda queue: ctx.write_list([(piece, piece)], 0, queue=queue),
            lambda queue: ctx.read_list([(piece, piece)], 0, queue=queue),
            lambda queue: ctx.write_list_notify([], 0, segment, 0, queue=queue),
            lambda queue: ctx.read_list_notify([], 0, segment, 0, queue=queue),
        ):
            with pytest.raises(pgasdl.QueueError):
                use(queue)
    with pytest.raises(pgasdl.QueueError, match="queue 0"):
        ctx.queue_delete(0)
    ctx.barrier()
    with pytest.raises(pgasdl.PgasTimeoutError):
        ctx.notify_waitsome(segment, timeout=0)


@contract(ranks=2)
def test_delete_with_requests_under_way(ctx: Any) -> None:
    """A deleted queue's requests still arrive, and its id starts empty when it is made again."""
    segment = ctx.segment(64)
    segment.numpy()[0] = 5
    queue = ctx.queue_create()
    ctx.write_notify(segment[0:1], 1 - ctx.rank, segment[8:9], 0, queue=queue)
    ctx.queue_delete(queue)
    assert ctx.queue_create() == queue
    assert ctx.queue_size(queue) == 0
    assert ctx.notify_waitsome(segment) == 0
    assert segment.numpy()[8] == 5
    ctx.wait(queue)
