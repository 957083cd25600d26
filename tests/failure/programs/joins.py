"""Contexts made again and again with other ranks: ``joins.py FOLDER GENERATIONS``."""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import ExitStack, suppress

import numpy as np
from folder_store import FolderStore
from rank_tools import say

import pgasdl
from pgasdl import Context, PgasError

SIZE = 4


def use(ctx: Context, generation: int) -> None:
    """Let bytes go round, and sums be right."""
    segment = ctx.segment(64, notifications=4)
    words = segment.numpy(np.int64)
    words[0] = 1000 * generation + ctx.rank
    ctx.write_notify(segment[0:8], (ctx.rank + 1) % ctx.size, segment[8:16], 3)
    ctx.notify_waitsome(segment, 3, 1)
    assert words[1] == 1000 * generation + (ctx.rank - 1) % ctx.size
    array = np.full(3000, ctx.rank + generation, np.float32)
    ctx.allreduce(array, op="sum")
    assert np.all(array == sum(rank + generation for rank in range(ctx.size)))


def abort(ctx: Context) -> None:
    """One rank aborts from another thread; nobody goes on waiting."""
    segment = ctx.segment(64, notifications=4)
    if ctx.rank == 0:
        threading.Timer(0.005, lambda: ctx.close(failed=True)).start()
    try:
        ctx.barrier()
        ctx.notify_waitsome(segment, 0, 1)
    except PgasError:
        ctx.close(failed=True)
    else:
        raise AssertionError("nobody notified")


def generations(store: FolderStore, me: int, first: int, last: int) -> None:
    with ExitStack() as kept:
        for generation in range(first, last):
            dice = random.Random(generation)
            members = dice.sample(range(SIZE), dice.randint(2, SIZE))
            if me not in members:
                continue
            place = {"rank": members.index(me), "size": len(members)}
            ctx = pgasdl.join(store, f"generation {generation}", **place)  # type: ignore[arg-type]
            use(ctx, generation)
            if generation % 7 == 0:
                abort(ctx)
            elif generation % 5 == 0:  # beside the next ones
                kept.enter_context(ctx)
            else:
                ctx.close()
                with suppress(PgasError):
                    ctx.barrier()
                    raise AssertionError("a closed context was used")
            if generation % 20 == 19:
                kept.close()


def main(folder: str, last: int) -> None:
    store, me = FolderStore(folder), int(os.environ["PGASDL_RANK"])
    generations(store, me, 0, last)
    with pgasdl.join(store, "all", rank=me, size=SIZE) as everyone:
        everyone.barrier()
        say("joined", rank=everyone.rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
