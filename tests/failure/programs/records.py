"""Does some operations, then ends one way: ``records.py HOW``."""

from __future__ import annotations

import os
import sys

import numpy as np
from rank_tools import say, until

import pgasdl


def main(how: str) -> None:
    with pgasdl.init() as ctx:
        segment = ctx.segment(4096)
        right = (ctx.rank + 1) % ctx.size
        ctx.write(segment[0:100], right, segment[200:300])
        ctx.read(segment[0:8], right, segment[16:24])
        ctx.write_notify(segment[0:77], right, segment[200:277], 41)
        ctx.notify(right, segment, 42)
        ctx.notify_add(right, segment, 43)
        ctx.write_notify_add(segment[0:77], right, segment[200:277], 43)
        ctx.notify_wait_count(segment, 43, 2)
        ctx.wait(0)
        ctx.notify_waitsome(segment, 41, 1)
        ctx.atomic_fetch_add(segment[8:16], right, 1)
        ctx.passive_send(b"hello", right)
        ctx.passive_receive()
        ctx.world.combine(np.ones(3))
        ctx.allreduce(np.ones(500, np.float32), op="mean", plan="gdraa")
        ctx.barrier()
        say("running", segment=segment.id, trace=os.environ.get("PGASDL_TRACE"))
        if how == "timeout":
            ctx.notify_waitsome(segment, 7, 1, timeout=0.1)
        elif how == "caught":
            try:
                ctx.notify_waitsome(segment, 7, 1, timeout=0.05)
            except pgasdl.PgasTimeoutError:
                say("caught")
            ctx.barrier()
        elif how == "lost":
            ctx.notify_waitsome(segment, 7, 1)
        else:
            until(lambda: bool(ctx.notify_reset(segment, 99)))


if __name__ == "__main__":
    main(sys.argv[1])
