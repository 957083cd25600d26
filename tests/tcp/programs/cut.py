"""Rank 1 writes to rank 0 and reads from it by a connection that is cut: ``cut.py PROXY WHAT``."""

from __future__ import annotations

import sys

from rank_tools import report, say
from support.tcp_proxy import through

import pgasdl


def main() -> None:
    port, what = int(sys.argv[1]), sys.argv[2]
    with through(port), pgasdl.init() as ctx:
        segment = ctx.segment(64, notifications=4)
        view = segment.numpy()
        view[:16] = 7
        ctx.barrier()
        try:
            if ctx.rank == 1:
                for n in (0, 1):
                    place = segment[8 * n : 8 * n + 8]
                    if what == "write":
                        ctx.write_notify(place, 0, segment[32 + 8 * n : 40 + 8 * n], n, n + 1)
                    else:
                        ctx.read_notify(segment[32 + 8 * n : 40 + 8 * n], 0, place, n, n + 1)
                ctx.wait()
            ctx.notify_waitsome(segment, 3)  # which nobody raises
        except pgasdl.PgasError as error:
            report(ctx, error)
        flags = [ctx.notify_reset(segment, n) for n in (0, 1)]
        say("found", flags=flags, data=view[32:48].tolist())


if __name__ == "__main__":
    main()
