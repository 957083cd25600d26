"""Ranks repeat writes, barriers and allreduces; one of them is stopped: ``stopped.py SECONDS``.

Each iteration adds what only a complete, correct exchange gives; the sum is reported at the end.
"""

from __future__ import annotations

import signal
import sys
import time

import numpy as np
import numpy.typing as npt
from rank_tools import report, say

import pgasdl
from pgasdl import ClosedError, PeerLostError, PgasError


def main(seconds: float) -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    with pgasdl.init() as ctx:
        segment = ctx.segment(4096)
        data = segment.numpy(np.uint32)
        array = np.zeros(10_000, np.float32)
        say("running")
        began = time.monotonic()
        total, step = 0.0, 0
        try:
            while True:
                step += 1
                array[:] = step
                ctx.allreduce(array, "sum", plan="gdraa")
                assert (array == step * ctx.size).all()
                total += float(array[0])
                # All go on or none: the first rank whose time is up decides.
                go_on = time.monotonic() - began < seconds
                if ctx.world.combine(np.array([int(go_on)]), "min")[0] == 0:
                    break
                ctx.write_notify(segment[0:64], (ctx.rank + 1) % ctx.size, segment[64:128], 5, step)
                ctx.notify_waitsome(segment, 5, 1)
                assert ctx.notify_reset(segment, 5) == step
                ctx.barrier()
            say("complete", steps=step, total=total, health=ctx.health())
        except PeerLostError as error:
            report(ctx, error)
            if error.rank != ctx.rank:
                # Nothing that the fenced rank tries from here on may change these bytes.
                survivors = ctx.survivors()
                data[:] = 7
                survivors.barrier()
                say("watching")
                # Go on until the test says that the late rank has finished.
                while not survivors.combine(np.array([len(told)]), "min")[0]:
                    time.sleep(0.01)
                say("untouched", same=bool((data == 7).all()), health=ctx.health())
                return
            fenced(ctx, segment, array, error)


def fenced(
    ctx: pgasdl.Context,
    segment: pgasdl.Segment,
    array: npt.NDArray[np.float32],
    error: PeerLostError,
) -> None:
    """Try everything that a fenced rank could try."""
    attempts = {
        "write": lambda: ctx.write(segment[0:64], 0, segment[0:64]),
        "write_notify": lambda: ctx.write_notify(segment[0:64], 0, segment[0:64], 1),
        "notify": lambda: ctx.notify(0, segment, 1),
        "fetch_add": lambda: ctx.atomic_fetch_add(segment[0:8], 0, 1),
        "passive_send": lambda: ctx.passive_send(b"x", 0),
        "passive_receive": ctx.passive_receive,
        "barrier": ctx.barrier,
        "allreduce": lambda: ctx.allreduce(array, "sum", plan="gdraa"),
        "world.combine": lambda: ctx.world.combine(np.ones(10)),
        "segment": lambda: ctx.segment(64),
        "group": lambda: ctx.group(range(ctx.size)),
        "survivors": ctx.survivors,
        "notify_waitsome": lambda: ctx.notify_waitsome(segment, 7, 1),
        "ping": lambda: ctx.ping(0),
    }
    ends = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            ends[name] = "allowed"
        except PeerLostError as lost:
            ends[name] = "fenced" if lost.rank == ctx.rank else str(lost)
        except (PgasError, ClosedError) as other:
            ends[name] = repr(other)
    say("fenced", ends=ends, text=str(error), health=ctx.health())


if __name__ == "__main__":
    main(float(sys.argv[1]))
