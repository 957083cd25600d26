"""Workers iterate, the last rank idles until one of them dies, then takes its place.

``rescue.py VICTIM``: after its fifth step the victim exits without closing its context.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from rank_tools import report, say

import pgasdl
from pgasdl import PeerLostError

STEPS = 10


def main(victim: int) -> None:
    with pgasdl.init() as ctx:
        idle = ctx.size - 1
        workers = list(range(idle))
        step = 0
        try:
            if ctx.rank == idle:
                ctx.passive_receive()
            group = ctx.group(workers)
            while step < STEPS:
                group.combine(np.array([step]))
                step += 1
                if step == 5 and ctx.rank == victim:
                    say("dying")
                    os._exit(1)
        except PeerLostError as error:
            report(ctx, error)
        group = ctx.survivors()
        # The idle rank learns which step the others were at.
        step = int(group.combine(np.array([step]), "max")[0])
        total = 0
        while step < STEPS:
            total = int(group.combine(np.array([step]))[0])
            step += 1
        say("finished", step=step, total=total, ranks=group.ranks, health=ctx.health())
        group.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]))
