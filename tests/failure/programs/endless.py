"""Repeats one kind of call until a loss ends it: ``endless.py POINT``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
from rank_tools import report, say, until

import pgasdl
from pgasdl import Context, GradientExchange, PgasError

Step = Callable[[], object]


def peers(ctx: Context) -> list[int]:
    return [rank for rank in range(ctx.size) if rank != ctx.rank]


def waitsome(ctx: Context) -> Step:
    segment = ctx.segment(64)
    return lambda: ctx.notify_waitsome(segment, 3, 100)


def wait_count(ctx: Context) -> Step:
    """All others add; one comes no more."""
    segment = ctx.segment(64)
    for peer in peers(ctx):
        ctx.notify_add(peer, segment, 3)
    return lambda: ctx.notify_wait_count(segment, 3, ctx.size)


def counts(ctx: Context) -> Step:
    segment = ctx.segment(64)

    def step() -> None:
        for peer in peers(ctx):
            ctx.write_notify_add(segment[0:8], peer, segment[8:16], 3)
        ctx.notify_wait_count(segment, 3, ctx.size - 1)

    return step


def barrier(ctx: Context) -> Step:
    return ctx.barrier


def group_allreduce(ctx: Context) -> Step:
    array = np.arange(3000.0)  # several chunks
    return lambda: ctx.world.combine(array, "sum")


def atomic(ctx: Context) -> Step:
    segment = ctx.segment(64, notifications=1)

    def step() -> None:
        for peer in peers(ctx):
            ctx.atomic_fetch_add(segment[0:8], peer, 1)
            ctx.atomic_compare_swap(segment[8:16], peer, 0, ctx.rank)

    return step


def passive(ctx: Context) -> Step:
    def step() -> None:
        ctx.passive_send(bytes(1000), (ctx.rank + 1) % ctx.size)
        ctx.passive_receive()

    return step


def segments(ctx: Context) -> Step:
    return lambda: ctx.segment(10_000, notifications=64).delete()


def groups(ctx: Context) -> Step:
    def step() -> None:
        group = ctx.group(range(ctx.size))
        group.barrier()
        group.delete()

    return step


def allreduce(plan: str, in_segment: bool = False) -> Callable[[Context], Step]:
    def prepare(ctx: Context) -> Step:
        array = np.ones(60_000, np.float32)
        if in_segment:
            array = ctx.segment(array.nbytes, notifications=1).numpy(np.float32)
        return lambda: ctx.allreduce(array, "mean", plan=plan)

    return prepare


def handle(ctx: Context) -> Step:
    segment = ctx.segment(1 << 20, notifications=1)
    handles = [
        ctx.allreduce_handle(segment.numpy(np.float32, start, 50_000), "sum", plan=plan)
        for start, plan in ((0, "tree"), (1 << 19, "gdraa-direct"))
    ]

    def step() -> None:
        segment.numpy()[:] = 0
        for each in handles:
            each.start()
        for each in reversed(handles):
            each.wait()

    return step


def exchange(ctx: Context) -> Step:
    layers = [((100, 10 + i), "float32") for i in range(8)]
    gradients = GradientExchange(ctx, layers)

    def step() -> None:
        order = list(range(len(layers)))
        random.shuffle(order)
        for layer in order:
            gradients.ready(layer)
        for layer in range(len(layers)):
            gradients.wait(layer)
        gradients.finish()

    return step


def storm(ctx: Context) -> Step:
    segment = ctx.segment(1 << 16)

    def step() -> None:
        for number in range(300):
            peer = random.choice(peers(ctx))
            target = segment[number * 64 : number * 64 + 64]
            ctx.write_notify(segment[0:64], peer, target, notification=number)
        ctx.wait(0)
        ctx.notify_reset(segment, ctx.notify_waitsome(segment) or 0)

    return step


def read(ctx: Context) -> Step:
    segment = ctx.segment(1 << 20)
    half = 1 << 19

    def step() -> None:
        for peer in peers(ctx):
            ctx.read_notify(segment[0:half], peer, segment[half : 2 * half], 1)
            ctx.wait(0)
            ctx.notify_reset(segment, ctx.notify_waitsome(segment, 1, 1) or 0)

    return step


def bound(ctx: Context) -> Step:
    memory = np.zeros(1 << 18, np.uint8)
    segment = ctx.bind(memory)

    def step() -> None:
        for peer in peers(ctx):
            ctx.write(segment[0:65536], peer, segment[65536:131072])
            ctx.wait(0)

    return step


POINTS: dict[str, Callable[[Context], Step]] = {
    "waitsome": waitsome,
    "wait_count": wait_count,
    "counts": counts,
    "barrier": barrier,
    "group-allreduce": group_allreduce,
    "atomic": atomic,
    "passive": passive,
    "segment": segments,
    "group": groups,
    "staged": allreduce("staged"),
    "gdraa": allreduce("gdraa"),
    "tree": allreduce("tree"),
    "direct": allreduce("gdraa-direct", in_segment=True),
    "handle": handle,
    "exchange": exchange,
    "storm": storm,
    "read": read,
    "bound": bound,
}


def main(point: str) -> None:
    with pgasdl.init() as ctx:
        try:
            # The victim may be through its first step, and harmed, before this rank is.
            step = POINTS[point](ctx)
            if point not in ("waitsome", "wait_count"):
                step()
            say("running")
            while True:
                step()
        except PgasError as error:
            # A write may find that the process is gone before the detector does.
            report(ctx, error)
            until(lambda: "died" in ctx.health() or "stopped" in ctx.health(), 2)
            say("health", health=ctx.health(), losses=ctx.counters().losses)


if __name__ == "__main__":
    main(sys.argv[1])
