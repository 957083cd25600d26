"""Rank 0 blocks in one call and is interrupted; the others stay away: ``interrupted.py WHERE``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import numpy as np
from rank_tools import say, until

import pgasdl
from pgasdl import Context


def calls(ctx: Context) -> dict[str, Callable[[], object]]:
    segment = ctx.segment(4096)
    array = np.ones(5000, np.float32)
    handle = ctx.allreduce_handle(segment.numpy(np.float32), "sum", plan="gdraa-direct")

    def start_and_wait() -> None:
        handle.start()
        handle.wait()

    def fill_the_mailbox() -> None:
        while True:
            ctx.passive_send(b"x", 1)

    return {
        "notify_waitsome": lambda: ctx.notify_waitsome(segment),
        "barrier": ctx.barrier,
        "world.allreduce": lambda: ctx.world.allreduce(array),
        "allreduce": lambda: ctx.allreduce(array, op="mean", plan="gdraa"),
        "handle": start_and_wait,
        "passive_receive": ctx.passive_receive,
        "passive_send": fill_the_mailbox,
        "segment": lambda: ctx.segment(64),
        "bind": lambda: ctx.bind(np.zeros(64)),
        "group": lambda: ctx.group(range(ctx.size)),
        "survivors": ctx.survivors,
    }


def main(where: str) -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    if where == "init":
        say("blocking")
        try:
            pgasdl.init()
        except KeyboardInterrupt:
            say("interrupted")
            raise
    with pgasdl.init() as ctx:
        call = calls(ctx)[where]
        if ctx.rank != 0:
            until(lambda: bool(told))
            return
        say("blocking")
        try:
            call()
        except KeyboardInterrupt:
            say("interrupted")
            raise


if __name__ == "__main__":
    main(sys.argv[1])
