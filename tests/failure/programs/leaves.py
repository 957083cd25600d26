"""Rank 1 leaves, the others wait for it: ``leaves.py HOW WHERE``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
from rank_tools import report, say

import pgasdl
from pgasdl import Context, PgasError


def leave(how: str) -> None:
    say("leaving")
    if how == "exception":
        raise ValueError("on purpose")
    if how == "sys.exit(0)":
        sys.exit(0)
    if how == "sys.exit(3)":
        sys.exit(3)
    if how == "os._exit":
        os._exit(0)


def places(ctx: Context) -> dict[str, Callable[[], object]]:
    segment = ctx.segment(4096)
    array = np.ones(5000, np.float32)
    return {
        "barrier": ctx.barrier,
        "waitsome": lambda: ctx.notify_waitsome(segment),
        "passive": ctx.passive_receive,
        "world.combine": lambda: ctx.world.combine(array),
        "allreduce": lambda: ctx.allreduce(array, op="mean", plan="gdraa"),
        "staged": lambda: ctx.allreduce(array, op="mean"),
        "segment": lambda: ctx.segment(64),
        "group": lambda: ctx.group(range(ctx.size)),
        "notify": lambda: [ctx.notify(1, segment, 1, timeout=None) for _ in iter(int, 1)],
    }


def main(how: str, where: str) -> None:
    with pgasdl.init() as ctx:
        # The first call makes what the second needs. Rank 1 may leave while another is in it, or
        # still in the creation of the segment.
        first = where in ("allreduce", "staged")
        if ctx.rank == 1:
            wait = places(ctx)[where]
            if first:
                wait()
            leave(how)
            return
        try:
            wait = places(ctx)[where]
            for _ in range(1 + first):
                wait()
            say("returned")
        except PgasError as error:
            report(ctx, error)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
