"""Windows whose members do not all come at once to make them. Arguments: which way."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time

import numpy as np

import pgasdl

SEGMENTS = 15
LARGE = 32 << 20


def use(ctx: pgasdl.Context, group: pgasdl.Group, segment: pgasdl.Segment, mark: int) -> None:
    """Every member writes to the next, and finds what the previous one has written."""
    words = segment.numpy(np.int64)
    right = group.ranks[(group.rank + 1) % group.size]
    words[0] = 1000 * mark + group.rank
    ctx.write_notify(segment[0:8], right, segment[8:16], 1)
    ctx.notify_waitsome(segment, 1, 1)
    assert words[1] == 1000 * mark + (group.rank - 1) % group.size
    group.barrier()


def too_late(ctx: pgasdl.Context, group: pgasdl.Group, seconds: float) -> None:
    """One more try to create a segment, which ends in PgasTimeoutError."""
    begin = time.monotonic()
    try:
        ctx.segment(64, group=group, timeout=seconds)
    except pgasdl.PgasTimeoutError:
        assert time.monotonic() - begin < 20, "not by its own timeout"
        return
    raise AssertionError("a member came that could not")


def again(ctx: pgasdl.Context, *, described: bool) -> None:
    """Each rank in turn comes late; `described`: before, it tried once with timeout 0."""
    flags = ctx.segment(8)
    for number, group in enumerate((ctx.world, ctx.group(range(ctx.size)))):
        for late in range(ctx.size):
            mark = 1 + 10 * number + late
            if ctx.rank == late:
                if described:
                    too_late(ctx, group, 0)
                    for peer in range(ctx.size):
                        ctx.notify(peer, flags, 2)
                others = ctx.size - 1
                while ctx.atomic_fetch_add(flags[0:8], late, 0) < others * (number + 1):
                    time.sleep(0.01)
            else:
                if described:
                    ctx.notify_waitsome(flags, 2, 1)
                    ctx.notify_reset(flags, 2)
                too_late(ctx, group, 0.2)
                too_late(ctx, group, 0.1)
                ctx.atomic_fetch_add(flags[0:8], late, 1)
            use(ctx, group, ctx.segment(64, group=group), mark)
            use(ctx, group, ctx.segment(64, group=group), mark + 1)
            if ctx.rank == late and described:
                ctx.notify_reset(flags, 2)
            ctx.barrier()


def never(ctx: pgasdl.Context, *, described: bool) -> None:
    """The last rank does not come; the others go on without it."""
    everybody = ctx.group(range(ctx.size))
    absent = ctx.size - 1
    if described and ctx.rank == absent:
        too_late(ctx, everybody, 0)
    ctx.barrier()
    if ctx.rank != absent:
        too_late(ctx, everybody, 0.3)
        present = ctx.group(range(absent))
        for mark in range(3):
            use(ctx, present, ctx.segment(64, group=present), mark)
    ctx.barrier()
    for mark in range(3):
        use(ctx, ctx.world, ctx.segment(64), mark)


def at_once(ctx: pgasdl.Context, teams: list[tuple[int, ...]]) -> None:
    """One thread for each group; the threads create segments in any order."""
    groups = [ctx.group(team) if ctx.rank in team else None for team in teams]
    failures: list[BaseException] = []

    def work(number: int, group: pgasdl.Group) -> None:
        pause = np.random.default_rng(100 * number + ctx.rank)
        try:
            for turn in range(SEGMENTS):
                time.sleep(pause.uniform(0, 0.01))
                segment = ctx.segment(64, group=group)
                use(ctx, group, segment, SEGMENTS * number + turn)
                if turn % 2:
                    segment.delete()
        except BaseException as failure:
            failures.append(failure)

    threads = [
        threading.Thread(target=work, args=(number, group))
        for number, group in enumerate(groups)
        if group is not None
    ]
    for thread in threads[:: 1 if ctx.rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    ctx.barrier()


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def freed(ctx: pgasdl.Context) -> None:
    """Windows dropped by groups that make no more go with the next window of all ranks."""
    teams = [team for team in itertools.combinations(range(ctx.size), 2) if ctx.rank in team]
    before = resident()
    for team in teams:
        group = ctx.group(team)
        segment = ctx.segment(LARGE, group=group)
        segment.numpy(np.uint8)[:] = 1
        group.barrier()
        segment.delete()
        group.delete()
        del segment, group
    gc.collect()
    ctx.barrier()
    ctx.segment(64)
    grown = resident() - before
    assert grown < LARGE / 2, f"rank {ctx.rank}: {grown} bytes more"


def killed(ctx: pgasdl.Context) -> None:
    """Rank 1 is killed while segments are made; the others learn of it, or MPI ends them."""
    print(f"holds </proc/{os.getpid()}>", flush=True)
    ctx.barrier()
    if ctx.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        segment = ctx.segment(64)
        ctx.barrier()
        segment.delete()


def main() -> None:
    """Go the way that the command line names."""
    way = sys.argv[1]
    with pgasdl.init(log="warning", timeout=60) as ctx:
        everybody = tuple(range(ctx.size))
        if way in ("again", "described"):
            again(ctx, described=way == "described")
        elif way in ("never", "went"):
            never(ctx, described=way == "went")
        elif way == "same":
            at_once(ctx, [everybody, everybody])
        elif way == "freed":
            freed(ctx)
        elif way == "overlapping":
            at_once(ctx, [everybody[:-1], everybody[1:], everybody])
        else:
            killed(ctx)
        if ctx.rank == 0:
            print("right", flush=True)


if __name__ == "__main__":
    main()
