"""One-sided operations of ranks whose adapter reaches a GPU's memory, or why it does not.

``adapter.py``: all of them, and what came, on both ranks. ``adapter.py why``: rank 0 prints why
peers do not reach it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

import pgasdl

COUNT = 300_000  # more than one request, and no multiple of a page
BRIEF = 8  # bytes that would go inline from the host


def mine(rank: int) -> Any:
    return np.arange(COUNT, dtype=np.float32) * (rank + 1)


def transfers(ctx: Any) -> None:
    """Between GPU and GPU, GPU and host, long and short; to oneself, too."""
    nbytes = 4 * COUNT
    on_gpu = ctx.segment(2 * nbytes, device="cuda:0")
    host = ctx.segment(2 * nbytes)
    ends = {"gpu": on_gpu, "host": host}
    found = np.empty(COUNT, np.float32)
    for peer in (1 - ctx.rank, ctx.rank):
        for source in ends.values():
            for target in ends.values():
                for length in (nbytes, BRIEF):
                    source.copy_from(mine(ctx.rank))
                    target.copy_from(np.zeros(COUNT, np.float32), nbytes)
                    ctx.barrier()
                    there = target[nbytes : nbytes + length]
                    ctx.write_notify(source[:length], peer, there, 1)
                    assert ctx.notify_waitsome(target, 1, 1) == 1
                    assert ctx.notify_reset(target, 1)
                    target.copy_to(found, nbytes)
                    sender = 1 - ctx.rank if peer != ctx.rank else peer
                    wanted = mine(sender)
                    wanted[length // 4 :] = 0
                    assert (found == wanted).all(), (peer, length)
                    ctx.barrier()
                    ctx.read(target[nbytes : nbytes + length], peer, source[:length])
                    ctx.wait()
                    target.copy_to(found, nbytes)
                    assert (found[: length // 4] == mine(peer)[: length // 4]).all(), length
                    ctx.barrier()


def bound(ctx: Any) -> None:
    """Somebody else's memory, which begins in the middle of a page."""
    skip = 1200
    whole = Array(COUNT + skip, np.float32)
    stream = Stream()
    whole.fill(np.zeros(COUNT + skip, np.float32), stream)
    stream.synchronize()
    assert whole.address is not None
    segment = ctx.bind(Array(COUNT, np.float32, whole.address + 4 * skip))
    source = ctx.segment(4 * COUNT)
    source.copy_from(mine(ctx.rank))
    ctx.write_notify(source[:], 1 - ctx.rank, segment[:], 0)
    ctx.notify_wait_on(stream, segment, 0)
    values = whole.values(stream)
    assert (values[:skip] == 0).all() and (values[skip:] == mine(1 - ctx.rank)).all()
    ctx.barrier()
    segment.delete()


def main() -> None:
    with pgasdl.init(log="error") as ctx, Device():
        if sys.argv[1:] == ["why"]:
            assert not ctx.takes_devices
            if ctx.rank == 0:
                print(ctx.describe())
            return
        assert ctx.takes_devices and ctx.transport_of(1 - ctx.rank) == "verbs"
        for turn in (transfers, bound):
            turn(ctx)
        ctx.barrier()
        if ctx.rank == 0:
            print("right")


main()
