"""Rank 0, which served the start-up, kills itself; the others go on without it."""

import contextlib
import os
import signal
import sys

import numpy as np

import pgasdl

with pgasdl.init(log="warning") as ctx:
    with contextlib.suppress(pgasdl.PeerLostError):
        ctx.barrier()
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.barrier()
    left = ctx.survivors()
    array = np.full(1000, ctx.rank + 1, np.float32)
    ctx.allreduce(array, group=left)
    sys.stdout.write(f"rank {ctx.rank} of {left.size} sums to {array[0]:.0f}\n")  # in one piece
    sys.stdout.flush()
    left.barrier()
