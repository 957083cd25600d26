"""An all-reduce that rank 2's end has failed must not touch the survivors' memory any more.

``late.py kept``: their array is in a segment, and they use it again. ``freed``: it is NumPy's, and
they free it while a peer that was stopped has not taken its part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

import pgasdl

kept = sys.argv[1] == "kept"
with pgasdl.init(timeout=60, log="error") as ctx:
    array: Any = ctx.segment(32 << 20).numpy(np.float32) if kept else np.ones(16 << 20, np.float32)
    reduce = ctx.allreduce_handle(array, plan="gdraa") if kept else None
    if not kept:
        ctx.allreduce(array, plan="gdraa-private")
    array[:] = 1
    ctx.barrier()
    if ctx.rank == 1 and not kept:
        subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if ctx.rank == 2:
        subprocess.Popen(["sh", "-c", f"sleep {'2' if kept else '0.7'}; kill -9 {os.getpid()}"])
    try:
        reduce() if reduce else ctx.allreduce(array, plan="gdraa-private")
        sys.exit("the all-reduce ended")
    except pgasdl.PeerLostError:
        pass
    if not kept:
        del array
        time.sleep(1.0 if ctx.rank == 0 else 0.2)
    left = ctx.survivors()
    if kept:
        array[:] = 5
        left.barrier()
        time.sleep(2.5)
        assert (array == 5).all()
    ones = np.ones(1000, np.float32)
    ctx.allreduce(ones, group=left)
    assert (ones == 2).all()
    print(f"rank {ctx.rank} goes on")
