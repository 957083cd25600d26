"""Published weights: rank 0 trains, the others pull its newest weights when they like.

Rank 0 takes no part in a pull, and never waits for one.

pgasdl run -n 3 apps/cookbook/publish.py
"""

import argparse
import time

import numpy as np

import pgasdl

NUMBERS, VERSIONS, COPIES = 10_000, 50, 3
COUNTER, DATA = 8, 4 * NUMBERS  # bytes
DONE = 0  # a notification


def pull(ctx: pgasdl.Context, published: pgasdl.Segment, mine: pgasdl.Segment) -> int:
    """Read the newest version from rank 0; return its number."""
    number = mine.numpy(np.int64, shape=1)
    for _ in range(1000):
        ctx.read(mine[:COUNTER], 0, published[:COUNTER])
        ctx.wait()
        version = int(number[0])
        begin = COUNTER + version % COPIES * DATA
        ctx.read(mine[COUNTER:], 0, published[begin : begin + DATA])
        ctx.wait()
        ctx.read(mine[:COUNTER], 0, published[:COUNTER])
        ctx.wait()
        if int(number[0]) < version + COPIES - 1:  # else rank 0 may have begun to overwrite it
            return version
    raise RuntimeError("rank 0 publishes faster than this rank can read")


argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init(log="warning") as ctx:
    published = ctx.segment(COUNTER + COPIES * DATA, notifications=ctx.size)
    mine = ctx.segment(COUNTER + DATA)
    ctx.barrier()
    if ctx.rank == 0:
        copies = published.numpy(np.float32, COUNTER).reshape(COPIES, NUMBERS)
        for version in range(1, VERSIONS + 1):
            time.sleep(0.001)  # a training step
            copies[version % COPIES] = version
            # A rank that sees the new number sees the weights: the atomic follows these stores.
            ctx.atomic_fetch_add(published[:COUNTER], 0, 1)
        for rank in range(1, ctx.size):
            ctx.notify_waitsome(published, rank, 1)
    else:
        version = pulls = 0
        while version < VERSIONS:
            version = pull(ctx, published, mine)
            weights = mine.numpy(np.float32, COUNTER)
            assert (weights == version).all(), "half of one version and half of another"
            pulls += 1
        ctx.notify(0, published, ctx.rank)
        print(f"rank {ctx.rank}: {pulls} pulls, the last of version {version}")
