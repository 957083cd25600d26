"""The last rank kills itself; the others wait for it."""

import os
import signal

import pgasdl

with pgasdl.init(log="warning") as ctx:
    ctx.barrier()
    if ctx.rank == ctx.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()
