"""A halo exchange: heat in a rod whose parts lie on the ranks; neighbours write each other's edges.

pgasdl run -n 3 apps/cookbook/halo.py
"""

import argparse

import numpy as np

import pgasdl

CELLS, STEPS = 60, 200  # cells of a rank
FROM_LEFT, FROM_RIGHT = 0, 2  # notifications, each with one more for odd steps


def step(now: np.ndarray, then: np.ndarray) -> None:
    """Compute all inner cells of the next moment."""
    then[1:-1] = now[1:-1] + 0.25 * (now[:-2] - 2 * now[1:-1] + now[2:])


argparse.ArgumentParser(description=__doc__).parse_args()
with pgasdl.init(log="warning") as ctx:
    width = 8 * (CELLS + 2)  # bytes of a moment: an edge cell, mine, an edge cell
    segment = ctx.segment(2 * width, notifications=4)
    moments = segment.numpy(np.float64).reshape(2, CELLS + 2)
    if ctx.rank == 0:
        moments[0, 1] = 1000.0
    for number in range(STEPS):
        # Two moments by turns: a neighbour writes my edges of this one again only when it has those
        # of the next, which I send when I am done with this one.
        odd = number % 2
        base = odd * width
        awaited = []
        if ctx.rank > 0:  # my first cell is my left neighbour's right edge
            theirs = segment[base + width - 8 : base + width]
            ctx.write_notify(segment[base + 8 : base + 16], ctx.rank - 1, theirs, FROM_RIGHT + odd)
            awaited.append(FROM_LEFT + odd)
        if ctx.rank < ctx.size - 1:
            mine = segment[base + width - 16 : base + width - 8]
            ctx.write_notify(mine, ctx.rank + 1, segment[base : base + 8], FROM_LEFT + odd)
            awaited.append(FROM_RIGHT + odd)
        for flag in awaited:
            ctx.notify_waitsome(segment, flag, 1)
            ctx.notify_reset(segment, flag)
        step(moments[odd], moments[1 - odd])
        ctx.wait()  # my edge cells have left: the step after the next changes them

    whole = np.zeros((2, ctx.size * CELLS + 2))  # the same in one process
    whole[0, 1] = 1000.0
    for number in range(STEPS):
        step(whole[number % 2], whole[1 - number % 2])
    part = whole[STEPS % 2, 1 + ctx.rank * CELLS : 1 + (ctx.rank + 1) * CELLS]
    assert np.array_equal(moments[STEPS % 2, 1:-1], part)
    print(f"rank {ctx.rank}: {part.sum():.3f} of the heat")
