"""Survivors form a group and go on, loss after loss: ``goes_on.py LOSSES``."""

from __future__ import annotations

import sys

import numpy as np
from rank_tools import report, say

import pgasdl
from pgasdl import Context, Group, PeerLostError


def regroup(ctx: Context) -> Group:
    """Repeat survivors() until a group holds: another rank may be lost while it is formed."""
    while True:
        try:
            group = ctx.survivors()
            group.barrier()
            return group
        except PeerLostError as error:
            report(ctx, error, "again")


def use(ctx: Context, group: Group) -> dict[str, object]:
    """Everything a group offers, on new memory."""
    segment = ctx.segment(8192, notifications=16, group=group)
    view = segment.numpy(np.uint32)
    right = group.ranks[(group.rank + 1) % group.size]
    view[0] = 100 + ctx.rank
    ctx.write_notify(segment[0:4], right, segment[4:8], 3, ctx.rank + 1)
    ctx.wait(0)
    assert ctx.notify_waitsome(segment, 3, 1) == 3
    left = ctx.notify_reset(segment, 3) - 1
    assert view[1] == 100 + left and left == group.ranks[group.rank - 1]
    group.barrier()
    for rank in group.ranks:
        ctx.atomic_fetch_add(segment[8:16], rank, 1)
    group.barrier()
    counted = int(segment.numpy(np.uint64)[1])
    array = np.full(5000, ctx.rank, np.float32)
    ctx.allreduce(array, "sum", group=group, plan="gdraa")
    default = np.full(5000, ctx.rank, np.float32)
    ctx.allreduce(default, "sum", group=group)
    small = group.combine(np.array([ctx.rank, 1]))
    segment.delete()
    return {
        "ranks": group.ranks,
        "counted": counted,
        "sums": [float(array[17]), float(default[4999]), int(small[0]), int(small[1])],
    }


def main(losses: int) -> None:
    with pgasdl.init() as ctx:
        group = ctx.world
        say("working", **use(ctx, group))
        for loss in range(losses):
            try:
                while True:
                    group.barrier()
                    group.combine(np.arange(10))
            except PeerLostError as error:
                report(ctx, error)
            group = regroup(ctx)
            say(f"recovered {loss}", **use(ctx, group), health=ctx.health())
        group.barrier()
    say("done")


if __name__ == "__main__":
    main(int(sys.argv[1]))
