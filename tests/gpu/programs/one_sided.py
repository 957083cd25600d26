"""One-sided operations ordered on streams of a GPU, which the fake driver lets run late."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream, capturing, cupy

import pgasdl
from pgasdl import loopback

COUNT = 10_000
N_TURNS = 20


def numbers(rank: int, turn: int) -> Any:
    return np.arange(COUNT, dtype=np.float32) * (rank + 1) + turn


def rings(ctx: Any) -> None:
    """Streams alone pass it on: fill, write, notify; wait, take, reset, tell."""
    out, into = Stream(), Stream()
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    nbytes = 4 * COUNT
    segment = ctx.segment(2 * nbytes, device="cuda:0")
    source = Array(COUNT, np.float32, segment.address)
    inbox = Array(COUNT, np.float32, segment.address + nbytes)
    taken = [Array(COUNT, np.float32) for _ in range(N_TURNS)]
    full, empty = 1, 2
    before = ctx.counters()
    for turn in range(N_TURNS):
        source.fill(numbers(ctx.rank, turn), out)
        if turn > 0:  # the right neighbour has taken the earlier data
            ctx.notify_wait_on(out, segment, empty)
            ctx.notify_reset_on(out, segment, empty)
        ctx.write_notify_on(out, segment[:nbytes], right, segment[nbytes:], full, turn + 1)
        ctx.notify_wait_on(into, segment, full)
        into.copy(taken[turn].address, inbox.address, nbytes)
        ctx.notify_reset_on(into, segment, full)
        ctx.notify_on(into, left, segment, empty)
    posted = pgasdl.Traffic(N_TURNS * nbytes, N_TURNS, notifications=2 * N_TURNS)
    assert (ctx.counters() - before).total == posted
    for turn, array in enumerate(taken):
        assert (array.values(into) == numbers(left, turn)).all(), turn
    out.synchronize()
    ctx.wait()
    ctx.barrier()


def orders(ctx: Any) -> None:
    """A queue's order holds across streams, and between streams and the host."""
    first, second = Stream(), Stream()
    other = ctx.queue_create()
    peer = (ctx.rank + 1) % ctx.size
    nbytes = 4 * COUNT
    segment = ctx.segment(3 * nbytes, device="cuda:0")
    source = Array(COUNT, np.float32, segment.address)
    inbox = Array(COUNT, np.float32, segment.address + nbytes)
    for turn in range(N_TURNS):
        source.fill(numbers(ctx.rank, turn), first)
        ctx.write_notify_on(first, segment[:nbytes], peer, segment[nbytes : 2 * nbytes], 1)
        match turn % 3:
            case 0:  # the host's flag comes after the stream's bytes
                ctx.notify(peer, segment, 2)
            case 1:  # and another stream's flag, too
                ctx.notify_on(second, peer, segment, 2)
            case 2:  # wait() covers the queue's work on streams
                ctx.wait()
                ctx.notify(peer, segment, 2, queue=other)
        ctx.notify_waitsome(segment, 2, 1)
        assert ctx.notify_reset(segment, 2) == 1
        assert ctx.notify_reset(segment, 1) == 1
        mine = inbox.values(second)
        assert (mine == numbers((ctx.rank - 1) % ctx.size, turn)).all(), turn
        ctx.wait()
        ctx.barrier()


def resets(ctx: Any) -> None:
    """A wait that was met does not end again at its deadline, if the flag was reset since."""
    stream = Stream()
    segment = ctx.segment(64, device="cuda:0")
    ctx.barrier()
    ctx.notify_wait_on(stream, segment, 1, timeout=2)
    ctx.notify_reset_on(stream, segment, 1)
    ctx.notify((ctx.rank + 1) % ctx.size, segment, 1)
    stream.synchronize()
    try:
        raise AssertionError(f"flag {ctx.notify_waitsome(segment, 1, 1, timeout=2.5)} is nobody's")
    except pgasdl.PgasTimeoutError:
        pass
    ctx.notify_reset_on(stream, segment, 1)
    stream.synchronize()
    ctx.barrier()


def captures(ctx: Any) -> None:
    """Operations in which the host has a part are refused while a stream records a graph."""
    stream = Stream()
    segment = ctx.segment(64, device="cuda:0")
    array = Array(16, np.float32)
    handle = ctx.allreduce_handle(Array(16, np.float32, segment.address))
    with capturing(stream), cupy(stream):
        ctx.notify_reset_on(stream, segment, 1)  # belongs to the graph
        for call in (
            lambda: ctx.notify_wait_on(stream, segment, 1),
            lambda: handle.start(stream=stream),
            lambda: ctx.allreduce(array, stream=stream),
            lambda: segment.copy_from(bytes(64)),
            lambda: segment.copy_to(bytearray(64)),
        ):
            try:
                call()
            except pgasdl.UnavailableError as error:
                assert "CUDA graph" in str(error)
            else:
                raise AssertionError("a capture was not refused")
    handle.run(stream=stream)
    stream.synchronize()
    ctx.barrier()


def program(ctx: Any) -> None:
    with Device():
        for part in (rings, orders, resets, captures):
            part(ctx)


def main() -> None:
    size = int(sys.argv[1])
    if size:
        loopback.run(size, program)
    else:
        with pgasdl.init(log="warning", timeout=30) as ctx:
            program(ctx)
    print("right")


if __name__ == "__main__":
    main()
