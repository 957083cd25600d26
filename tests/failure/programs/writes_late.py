"""Rank 2 writes to rank 0 without end; the others go on without it, and watch that memory."""

from __future__ import annotations

import signal

from rank_tools import report, say, until

import pgasdl
from pgasdl import PeerLostError

BYTES = 64 << 20


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    with pgasdl.init() as ctx:
        segment = ctx.segment(BYTES)
        data = segment.numpy()
        data[:] = ctx.rank
        ctx.barrier()
        try:
            while ctx.rank == 2:
                ctx.write(segment[:], 0, segment[:])
                ctx.wait(0)
            if ctx.rank == 0 and until(lambda: bool(data[-1] == 2)):
                say("written")
            ctx.barrier()
        except PeerLostError as error:
            report(ctx, error)
            if error.rank == ctx.rank:
                return
            survivors = ctx.survivors()
            data[:] = 7
            survivors.barrier()
            say("watching")
            signal.sigwait([signal.SIGUSR2])
            survivors.barrier()  # nor does it say that others are lost
            say("untouched", same=bool((data == 7).all()))


if __name__ == "__main__":
    main()
