"""Thousands of calls that must leave nothing: ``repeats.py WHAT TIMES``.

Reports descriptors, mappings, threads and resident memory before and after.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from folder_store import FolderStore
from joins import use
from rank_tools import say

import pgasdl
from pgasdl import Context, GradientExchange, PgasTimeoutError


def held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    with open("/proc/self/maps", encoding="ascii") as file:
        mappings = sum(1 for _ in file)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "threads": len(os.listdir("/proc/self/task")),
        "kib": pages * 4,
    }


def settled(descriptors: int) -> dict[str, int]:
    """The things held once peers have taken back what they handed over, or after 5 s."""
    end = time.monotonic() + 5
    while (now := held())["descriptors"] > descriptors and time.monotonic() < end:
        time.sleep(0.01)
    return now


def calls(ctx: Context) -> dict[str, Callable[[], object]]:
    arrays = {plan: np.ones(2000, np.float32) for plan in ("gdraa", "tree", "staged")}
    kept = ctx.segment(4096)

    def reduce() -> None:
        for plan, array in arrays.items():
            ctx.allreduce(array, op="mean", plan=plan)
        ctx.world.combine(arrays["gdraa"][:10])

    def segment() -> None:
        each = ctx.segment(20_000, notifications=16)
        each.numpy()[:] = 1
        ctx.write_notify(each[0:100], (ctx.rank + 1) % ctx.size, each[100:200], 3)
        ctx.notify_waitsome(each)
        ctx.allreduce(each.numpy(np.float32), plan="gdraa-direct")
        each.delete()

    def bind() -> None:
        ctx.bind(np.zeros(5000, np.uint8), notifications=16).delete()

    def disagree() -> None:
        with contextlib.suppress(pgasdl.MismatchError):
            if ctx.rank == 0:
                ctx.segment(1 << 20)
            else:
                ctx.bind(arrays["gdraa"])
            raise AssertionError("a segment here and bound memory there was accepted")

    def group() -> None:
        each = ctx.group(range(ctx.size))
        ctx.allreduce(arrays["gdraa"], group=each)
        each.barrier()
        each.delete()

    def errors() -> None:
        with contextlib.suppress(PgasTimeoutError):
            ctx.notify_waitsome(kept, 1, 1, timeout=0)
        ctx.health()
        ctx.flight_record()

    def exchange() -> None:
        each = GradientExchange(ctx, [((100,), "float32")] * 3)
        for layer in range(3):
            each.ready(layer)
        each.finish()
        each.gradients.delete()
        ctx.state.servers.clear()

    numbers = itertools.count()
    folder = os.environ.get("STORE_FOLDER", "")

    def join() -> None:
        name = f"context {next(numbers)}"
        with pgasdl.join(FolderStore(folder), name, rank=ctx.rank, size=ctx.size) as each:
            use(each, 1)

    return {
        "allreduce": reduce,
        "join": join,
        "segment": segment,
        "bind": bind,
        "disagree": disagree,
        "group": group,
        "errors": errors,
        "exchange": exchange,
    }


def main(what: str, times: int) -> None:
    with pgasdl.init() as ctx:
        call = calls(ctx)[what]
        for _ in range(max(20, times // 5)):
            call()
        # Between two barriers: no peer's next descriptor is on its way.
        ctx.barrier()
        before = held()
        ctx.barrier()
        for _ in range(times):
            call()
        ctx.barrier()
        after = settled(before["descriptors"])
        say("held", before=before, after=after)
        ctx.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
