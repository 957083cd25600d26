"""Notified writes to a segment that its owner still makes, while other threads look.

Arguments: how many segments.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

import pgasdl


def main() -> None:
    """Every rank writes to the next rank as soon as it may."""
    with pgasdl.init(log="warning", timeout=60) as ctx:
        base = ctx.segment(64, notifications=4)
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                ctx.notify_reset(base, 0)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        right = (ctx.rank + 1) % ctx.size
        try:
            for turn in range(int(sys.argv[1])):
                segment = ctx.segment(64, notifications=4)
                words = segment.numpy(np.int64)
                words[0] = 1000 * turn + ctx.rank
                ctx.write_notify(segment[0:8], right, segment[8:16], 1)
                ctx.notify_waitsome(segment, 1, 1)
                assert words[1] == 1000 * turn + (ctx.rank - 1) % ctx.size
                ctx.barrier()
                segment.delete()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        if ctx.rank == 0:
            print("right", flush=True)


if __name__ == "__main__":
    main()
