"""Creates, uses and deletes segments until all ranks are told to stop."""

from __future__ import annotations

import os
import signal

import numpy as np
from rank_tools import say

import pgasdl


def main() -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    with pgasdl.init() as ctx:
        ctx.segment(64).delete()
        ctx.barrier()
        before = len(os.listdir("/proc/self/fd"))
        say("running")
        made = 0
        while not ctx.world.combine(np.array([len(told)]), "min")[0]:
            segment = ctx.segment(4096, notifications=4)
            segment.numpy()[:] = ctx.rank + 1
            ctx.barrier()
            ctx.read(segment[0:100], 1 - ctx.rank, segment[100:200])
            ctx.wait()
            assert (segment.numpy()[:100] == 2 - ctx.rank).all()
            ctx.barrier()
            segment.delete()
            made += 1
            if made % 20 == 0:
                say("made", segments=made)
        after = len(os.listdir("/proc/self/fd"))
        say(
            "complete",
            segments=made,
            descriptors_before=before,
            descriptors_after=after,
            health=ctx.health(),
        )
        ctx.barrier()


if __name__ == "__main__":
    main()
