"""Two ranks answer each other for some seconds, and say how long the longest answer took.

``patient.py SECONDS``: what was sent while packets vanished arrives later, exactly once.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import pgasdl

_GO_ON, _LAST = 1, 2


def main(seconds: float) -> None:
    with pgasdl.init() as ctx:
        segment = ctx.segment(2 << 16, notifications=1)
        out, into = segment[: 1 << 16], segment[1 << 16 :]
        mine, theirs = np.split(segment.numpy(np.uint32), 2)
        ctx.barrier()
        print(json.dumps({"event": "running"}), flush=True)
        end = time.monotonic() + seconds
        longest, turn, value = 0.0, 0, _GO_ON
        while value != _LAST:
            began = time.monotonic()
            mine[:] = turn
            last = _LAST if time.monotonic() > end else _GO_ON
            if ctx.rank == 0:
                ctx.write_notify(out, 1, into, 0, value=last)
            assert ctx.notify_waitsome(segment) == 0
            value = ctx.notify_reset(segment, 0)
            assert (theirs == turn).all()
            if ctx.rank == 1:
                ctx.write_notify(out, 0, into, 0, value=value)
            longest = max(longest, time.monotonic() - began)
            ctx.wait()
            turn += 1
        print(json.dumps({"event": "longest", "seconds": longest, "turns": turn}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
