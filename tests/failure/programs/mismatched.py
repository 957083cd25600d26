"""The ranks call different collectives: ``mismatched.py CASE``. Each says how its call ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import numpy as np
from rank_tools import reporting, say, until

import pgasdl
from pgasdl import Context, GradientExchange


def cases(ctx: Context, odd: bool) -> dict[str, Callable[[], object]]:
    """Run a collective; the odd rank does it differently."""
    size = 1000 + odd
    dtype = np.float64 if odd else np.float32
    segment = ctx.segment(1 << 16)
    floats = segment.numpy(np.float32)

    def reduce(array: object, plan: str | None = "gdraa", op: str = "sum") -> object:
        return ctx.allreduce(array, op, plan=plan)

    return {
        "group size": lambda: ctx.world.allreduce(np.ones(size)),
        "group dtype": lambda: ctx.world.allreduce(np.ones(1000, dtype)),
        "group op": lambda: ctx.world.allreduce(np.ones(1000), "max" if odd else "min"),
        "size": lambda: reduce(np.ones(size, np.float32)),
        "dtype": lambda: reduce(np.ones(1000, dtype)),
        "op": lambda: reduce(np.ones(1000, np.float32), op="mean" if odd else "sum"),
        "size, up and down a tree": lambda: reduce(np.ones(size, np.float32), "tree"),
        "plan": lambda: reduce(np.ones(1000, np.float32), "tree" if odd else "gdraa"),
        "size in segment": lambda: reduce(floats[:size], "gdraa-direct"),
        "place in segment": lambda: reduce(floats[odd : 1000 + odd], "gdraa-direct"),
        "segment or array": lambda: reduce(floats[:9000] if odd else np.ones(9000, "f4"), None),
        "default, size": lambda: reduce(np.ones(size, np.float32), None),
        "default, small or large": lambda: reduce(np.ones(10 if odd else 10**5, "f4"), None),
        "segment or bind": lambda: ctx.bind(np.ones(64)) if odd else ctx.segment(64),
        "segment or handle": lambda: (
            ctx.allreduce_handle(floats, "sum", plan="tree") if odd else ctx.segment(64)
        ),
        "handle": lambda: ctx.allreduce_handle(floats[:size], "sum", plan="tree"),
        "layers": lambda: GradientExchange(ctx, [((size,), "float32")]),
        "number of layers": lambda: GradientExchange(ctx, [((8,), "float32")] * (2 + odd)),
    }


def main(case: str) -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    with pgasdl.init() as ctx:
        call = cases(ctx, odd=ctx.rank == ctx.size - 1)[case]
        # A correct collective comes first, so that what it makes is there.
        ctx.allreduce(np.ones(64, np.float32), op="mean", plan="gdraa")
        ctx.barrier()
        say("calling")
        with reporting(ctx, "refused"):
            call()
            say("returned")
        # The others must notice the mismatch, not the end of this rank.
        until(lambda: bool(told))


if __name__ == "__main__":
    main(sys.argv[1])
