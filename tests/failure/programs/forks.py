"""A rank forks with its context open: ``forks.py HOW``, the way in which the child ends."""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np
from rank_tools import say

import pgasdl
from pgasdl import ClosedError, Context, Segment


def refusals(ctx: Context, segment: Segment) -> dict[str, str]:
    """How each call ends in the child."""
    array = np.ones(100, np.float32)
    attempts = {
        "write": lambda: ctx.write(segment[0:8], 0, segment[0:8]),
        "read": lambda: ctx.read(segment[0:8], 0, segment[0:8]),
        "write_list": lambda: ctx.write_list([(segment[0:8], segment[8:16])], 0),
        "notify": lambda: ctx.notify(0, segment, 1),
        "write_notify": lambda: ctx.write_notify(segment[0:8], 0, segment[0:8], 1),
        "read_notify": lambda: ctx.read_notify(segment[0:8], 0, segment[0:8], 1),
        "notify_waitsome": lambda: ctx.notify_waitsome(segment, timeout=0),
        "notify_reset": lambda: ctx.notify_reset(segment, 0),
        "wait": ctx.wait,
        "queue_create": ctx.queue_create,
        "fetch_add": lambda: ctx.atomic_fetch_add(segment[0:8], 0, 1),
        "compare_swap": lambda: ctx.atomic_compare_swap(segment[0:8], 0, 0, 1),
        "passive_send": lambda: ctx.passive_send(b"x", 0),
        "passive_receive": lambda: ctx.passive_receive(timeout=0),
        "barrier": ctx.barrier,
        "world.allreduce": lambda: ctx.world.allreduce(array),
        "allreduce": lambda: ctx.allreduce(array, op="mean"),
        "segment": lambda: ctx.segment(64),
        "bind": lambda: ctx.bind(array),
        "group": lambda: ctx.group([ctx.rank]),
        "survivors": ctx.survivors,
        "ping": lambda: ctx.ping(0),
        "kill": lambda: ctx.kill(1 - ctx.rank),
        "transport_of": lambda: ctx.transport_of(0),
        "delete": segment.delete,
    }
    ends = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            ends[name] = "allowed"
        except ClosedError as error:
            ends[name] = "closed" if "parent" in str(error) else str(error)
        except Exception as error:  # which must not be
            ends[name] = repr(error)
    return ends


def in_child(ctx: Context, segment: Segment, how: str) -> None:
    say("child", ends=refusals(ctx, segment))
    if how == "close":
        ctx.close()
    if how == "_exit":
        os._exit(0)


def main(how: str) -> None:
    with pgasdl.init() as ctx:
        segment = ctx.segment(4096)
        array = np.full(1000, ctx.rank + 1, np.float32)
        ctx.allreduce(array, op="mean")
        ctx.barrier()
        if how == "process":
            child = multiprocessing.get_context("fork").Process(
                target=in_child, args=(ctx, segment, how)
            )
            child.start()
            child.join()
            status = child.exitcode
        else:
            pid = os.fork()
            if pid == 0:
                in_child(ctx, segment, how)
                sys.exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # The parent works as before.
        ctx.barrier()
        ctx.allreduce(array, op="mean")
        ctx.write_notify(segment[0:8], 1 - ctx.rank, segment[8:16], 1)
        assert ctx.notify_waitsome(segment, 1, 1) == 1
        group = ctx.group(range(ctx.size))
        group.barrier()
        say("parent", status=status, value=float(array[0]), health=ctx.health())
        ctx.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
