"""Rank 1 is killed, or fails; the others wait for it. Arguments: how."""

from __future__ import annotations

import os
import signal
import sys
import time

import pgasdl


def main() -> None:
    """Wait for what never comes."""
    with pgasdl.init(log="warning", timeout=60) as ctx:
        segment = ctx.segment(64)
        ctx.barrier()
        if ctx.rank == 1:
            time.sleep(0.3)
            if sys.argv[1] == "fails":
                raise ZeroDivisionError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "survives":
            try:
                ctx.notify_waitsome(segment)
            except pgasdl.PeerLost as error:
                print(f"rank {ctx.rank} goes on without rank {error.rank}", flush=True)
                assert ctx.survivors().ranks == (0, 2)
            return
        ctx.notify_waitsome(segment)


if __name__ == "__main__":
    main()
