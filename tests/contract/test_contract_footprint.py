"""A rank holds connections to those that it talks with, and no more."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from contract_harness import TRANSPORTS, contract

from pgasdl import _native
from pgasdl.collectives import pairwise
from pgasdl.plans import Put, build_all
from pgasdl.simulate import library

# Where nothing is mapped, so that a peer takes a connection.
UNMAPPED = tuple(row for row in TRANSPORTS if row.name in ("unmapped", "verbs", "tcp"))
THREADS = tuple(row for row in UNMAPPED if row.threads)
STARTED = tuple(row for row in TRANSPORTS if row.name in ("shm", "verbs", "tcp"))


def neighbours(plan: str, size: int, count: int) -> list[set[int]]:
    """Whom each rank sends to or gets from."""
    found: list[set[int]] = [set() for _ in range(size)]
    for mine in build_all(plan, size, count):
        for _, _, step in mine.steps():
            if isinstance(step, Put):
                found[mine.rank].add(step.peer)
                found[step.peer].add(mine.rank)
    return found


@contract(ranks=8, on=UNMAPPED)
def test_a_plan_connects_its_neighbours(ctx: Any) -> None:
    array = np.ones(1000, np.float32)
    assert ctx.footprint().plan_connections == 0
    with ctx.allreduce_handle(array, "sum", plan="tree") as handle:
        for _ in range(3):
            handle()
        ctx.barrier()
    wanted = neighbours("tree", ctx.size, array.size)
    assert ctx.footprint().plan_connections == len(wanted[ctx.rank]) <= 3
    assert ctx.footprint().program_connections == 0


@contract(ranks=2)
def test_it_is_described(ctx: Any) -> None:
    held = ctx.footprint()
    assert str(held) in ctx.describe()
    assert held.connections <= 3 * (ctx.size - 1)
    before = held.control_bytes
    group = ctx.group([ctx.rank])
    assert ctx.footprint().control_bytes > before > 0
    group.delete()
    ctx.barrier()


@contract(ranks=2)
def test_memory_of_plans_is_counted(ctx: Any) -> None:
    def held() -> int:
        return int(ctx.footprint().workspace_bytes)

    before = held()
    segment = ctx.segment(1 << 20)
    assert held() == before
    with ctx.allreduce_handle(np.ones(1000, np.float32), plan="gdraa") as handle:
        assert held() >= before + handle.inbox_bytes > before
        ctx.barrier()
    assert held() == before
    group = ctx.group(range(ctx.size))
    ctx._allreduces.begin_pairwise(group, 30.0)
    assert held() > before + pairwise.inbox_bytes(group)
    assert "pairwise" in ctx.describe()
    ctx.barrier()
    group.delete()
    assert held() == before
    segment.delete()


def memory_is_as_told(ctx: Any) -> None:
    """The figures that ``pgasdl sim`` prints of many ranks are those of a context of few ranks."""
    world = sum(library.memory(ctx.size, ctx.config).values())
    assert ctx.footprint().control_bytes == world
    if ctx.rank < 2:
        group = ctx.group([0, 1])
        more = sum(_native.group_memory(2, False, 0).values())
        assert ctx.footprint().control_bytes == world + more
        group.delete()
    ctx.barrier()


@contract(ranks=2)
def test_memory_of_two(ctx: Any) -> None:
    memory_is_as_told(ctx)


@contract(ranks=5)
def test_memory_of_five(ctx: Any) -> None:
    memory_is_as_told(ctx)


def come_to(ctx: Any, n_connections: int) -> None:
    """Have so many connections, of which heartbeats make some when they are due."""
    deadline = time.monotonic() + ctx.config.timeout
    while ctx.footprint().own_connections < n_connections:
        assert time.monotonic() < deadline, ctx.footprint()
        time.sleep(0.01)
    assert ctx.footprint().own_connections == n_connections, ctx.footprint()


@contract(ranks=16, on=THREADS)
def test_connections_of_many(ctx: Any) -> None:
    """The library's own connections: for heartbeats and a barrier, then all by the first segment.

    Between threads only the ranks count to which a rank posts; of 16 they are those it gets from.
    """
    told = library.connections(ctx.size)
    assert told == {"start-up": 9, "barrier": 9, "segment": 15}
    ctx.barrier()
    come_to(ctx, told["barrier"])
    ctx._job.exchange("counted", b"")  # the ranks meet, and nobody posts
    ctx.segment(64)
    come_to(ctx, told["segment"])


@contract(ranks=(17, 20, 33), on=THREADS)
def test_connections_of_more(ctx: Any) -> None:
    """No collective of the library's own needs other ranks than a barrier, with more than 16."""
    told = library.connections(ctx.size)
    ahead = {1 << k for k in range(6) if 1 << k < ctx.size}
    near = {1, 2, 3, 4} | ahead
    wanted = len(near | {ctx.size - step for step in near})
    assert told == {"start-up": wanted, "barrier": wanted, "segment": wanted}
    ctx.barrier()
    come_to(ctx, wanted)
    segment = ctx.segment(64)
    total = ctx.world.combine(np.arange(3000))
    assert (total == ctx.size * np.arange(3000)).all()
    assert segment.nbytes_of((ctx.rank + 7) % ctx.size) == 64
    ctx._job.exchange("counted", b"")  # nobody leaves before
    come_to(ctx, wanted)


@contract(ranks=2, on=STARTED)
def test_words_at_start_up(ctx: Any) -> None:
    """The values that ``pgasdl sim`` adds up are as long as those that a rank said."""
    values = library.values_said(ctx.transport_of(1 - ctx.rank), ctx.config)
    told = {value.key: value.nbytes for value in values}
    for key in ("endpoint", "world"):
        (said,) = ctx._job.store.gather(key, [ctx.rank])
        assert len(said) == told[key], key
