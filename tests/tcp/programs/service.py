"""What a peer that ends, refuses or forks does to requests: ``service.py WHAT``."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import numpy as np
from rank_tools import say

import pgasdl
from pgasdl import Context, PeerLostError, PgasTimeoutError, SegmentError


def atomics(ctx: Context) -> None:
    """Each returns what was there, or raises."""
    segment = ctx.segment(64)
    ctx.barrier()
    if ctx.rank == 0:
        time.sleep(0.3)
        return
    n = 0
    try:
        while ctx.atomic_fetch_add(segment[0:8], 0, 1) == n:
            n += 1
        say("wrong", after=n)
    except PeerLostError:
        say("raised")


def read(ctx: Context) -> None:
    """All bytes are there, or it raises."""
    segment = ctx.segment(64 << 20, notifications=4)
    segment.numpy()[:] = 7 * (ctx.rank == 0)
    ctx.barrier()
    if ctx.rank == 0:
        return
    try:
        ctx.read_notify(segment[:], 0, segment[:], 1)
        ctx.wait()
        say("raised" if segment.numpy().all() else "wrong")
    except PeerLostError:
        say("raised")


def refused(ctx: Context) -> None:
    """No flag tells of bytes that did not come."""
    one, other = (ctx.segment(64, notifications=4) for _ in range(2))
    ctx.barrier()
    if ctx.rank == 0:
        other.delete()
    ctx.barrier()
    if ctx.rank == 1:
        ctx.read_notify(one[0:8], 0, other[0:8], 1)
        try:
            ctx.wait()
        except SegmentError:
            say("raised")
        with contextlib.suppress(PgasTimeoutError):
            say("wrong", flag=ctx.notify_waitsome(one, 0, 4, timeout=0))
    ctx.barrier()


def written(ctx: Context) -> None:
    """Who deletes bound memory may use it at once, and who writes there hears of it."""
    for _ in range(5):
        array = np.zeros(32 << 20, np.uint8)
        segment = ctx.bind(array)
        ctx.barrier()
        if ctx.rank == 0:
            while not array[0]:
                time.sleep(0)
            segment.delete()
            kept = array.copy()
            ctx.barrier()
            ctx.barrier()
            if not np.array_equal(array, kept):
                say("wrong", now=int(array.sum()), then=int(kept.sum()))
            continue
        array[:] = 7
        ctx.write(segment[:], 0, segment[:])
        with contextlib.suppress(SegmentError):
            ctx.wait()
        ctx.barrier()
        ctx.write(segment[:8], 0, segment[:8])
        try:
            ctx.wait()
            say("wrong", wait="passed")
        except SegmentError:
            say("raised")
        ctx.barrier()
        segment.delete()


def forks(ctx: Context) -> None:
    """A child's child keeps the files that the child has opened."""
    ctx.barrier()
    if ctx.rank == 1 and os.fork() == 0:
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
        if os.fork() == 0:
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{each}") for each in files))
        os._exit(os.wait()[1] != 0)
    if ctx.rank == 1:
        say("raised" if os.wait()[1] == 0 else "wrong")
    ctx.barrier()


with pgasdl.init() as made:
    {each.__name__: each for each in (atomics, read, refused, written, forks)}[sys.argv[1]](made)
