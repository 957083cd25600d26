"""``ctx.counters()``: exact numbers of all that a rank moves, over every transport the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contract_harness import MAPPED, ORDERING, contract
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import pgasdl
from pgasdl import Traffic
from pgasdl.collectives.pairwise import Pairs
from pgasdl.plans.algorithms.pairwise import Blocks

NOTHING = Traffic()


def moved(ctx: Any, program: Callable[[], object]) -> pgasdl.Counters:
    """Return what this rank moves in a program, which nobody begins or leaves early."""
    ctx.barrier()
    before = ctx.counters()
    program()
    counted = ctx.counters() - before
    ctx.barrier()
    return counted


def with_each_peer(ctx: Any, traffic: Traffic) -> tuple[Traffic, ...]:
    return tuple(NOTHING if rank == ctx.rank else traffic for rank in range(ctx.size))


@contract(ranks=2, on=ORDERING)
def test_operations(ctx: Any) -> None:
    segment = ctx.segment(256)
    peer = 1 - ctx.rank
    pairs = [(segment[n : 2 * n], segment[n : 2 * n]) for n in (8, 16, 32)]

    def counted(post: Callable[[], object]) -> Traffic:
        told = moved(ctx, lambda: (post(), ctx.wait()))
        assert told.peers[ctx.rank] == NOTHING
        assert told.registrations == 0
        assert told.total == told.peers[peer]
        return told.total

    a, b = segment[0:100], segment[100:200]
    word = segment[0:8]
    written, read = Traffic(100, 1), Traffic(0, 0, 100, 1)
    assert counted(lambda: ctx.write(a, peer, b)) == written
    assert counted(lambda: ctx.read(b, peer, a)) == read
    assert counted(lambda: ctx.write_notify(a, peer, b, 0)) == replace(written, notifications=1)
    assert counted(lambda: ctx.write_notify(word, peer, word, 0)) == Traffic(8, 1, notifications=1)
    assert counted(lambda: ctx.write_notify_add(a, peer, b, 1)) == replace(written, notifications=1)
    assert counted(lambda: ctx.notify(peer, segment, 0)) == Traffic(notifications=1)
    nothing = segment[0:0]
    assert counted(lambda: ctx.write_notify(nothing, peer, nothing, 0)) == Traffic(notifications=1)
    assert counted(lambda: ctx.read(nothing, peer, nothing)) == NOTHING
    assert counted(lambda: ctx.notify_add(peer, segment, 1)) == Traffic(notifications=1)
    assert counted(lambda: ctx.read_notify(b, peer, a, 2)) == read
    assert counted(lambda: ctx.write_list(pairs, peer)) == Traffic(56, 3)
    assert counted(lambda: ctx.read_list(pairs, peer)) == Traffic(0, 0, 56, 3)
    notified = Traffic(56, 3, notifications=1)
    assert counted(lambda: ctx.write_list_notify(pairs, peer, segment, 3)) == notified
    assert counted(lambda: ctx.atomic_fetch_add(word, peer, 1)) == Traffic(0, 1)
    assert counted(lambda: ctx.atomic_compare_swap(word, peer, 0, 1)) == Traffic(0, 1)


@contract(ranks=2)
def test_to_itself(ctx: Any) -> None:
    segment = ctx.segment(64)
    told = moved(ctx, lambda: ctx.write_notify(segment[0:8], ctx.rank, segment[8:16], 0))
    assert told.peers[ctx.rank] == told.total == Traffic(8, 1, notifications=1)


@contract(ranks=2, queue_depth=4)
def test_what_is_refused_is_not_counted(ctx: Any) -> None:
    segment = ctx.segment(64)
    peer = 1 - ctx.rank

    def post() -> None:
        for _ in range(4):
            ctx.write_notify(segment[0:8], peer, segment[8:16], 0)
        for timeout in (0, 0.01):
            with pytest.raises(pgasdl.SegmentError):
                ctx.write(segment[0:8], peer, segment[60:68], timeout=timeout)
        for _ in range(3):
            with pytest.raises(pgasdl.QueueFullError):
                ctx.write(segment[0:8], peer, segment[8:16], timeout=0)
        ctx.wait()

    assert moved(ctx, post).total == Traffic(32, 4, notifications=4)


@contract(ranks=(2, 3, 4))
def test_puts_of_a_plan(ctx: Any) -> None:
    """Plan gdraa sends 2(P-1)/P of the bytes, whether the array lies in a segment or not."""
    n = 64 * ctx.size
    block = 4 * n // ctx.size
    for array in (ctx.segment(4 * n).numpy(np.float32), np.ones(n, np.float32)):
        ctx.allreduce(array, plan="gdraa")  # makes the workspace
        told = moved(ctx, lambda array=array: ctx.allreduce(array, plan="gdraa"))
        assert told.peers == with_each_peer(ctx, Traffic(2 * block, 2, notifications=2))
        assert told.total.bytes_written == 2 * (ctx.size - 1) * array.nbytes // ctx.size
        assert told.registrations == 0


@contract(ranks=(2, 3, 4), on=MAPPED)
def test_loads_and_stores_of_a_plan(ctx: Any) -> None:
    """Plan gdraa-direct loads its block from every peer, and stores the result there."""
    n = 64 * ctx.size
    block = 4 * n // ctx.size
    array = ctx.segment(4 * n).numpy(np.float32)
    with ctx.allreduce_handle(array, plan="gdraa-direct") as handle:
        handle()
        told = moved(ctx, handle)
    assert told.peers == with_each_peer(ctx, Traffic(block, 1, block, 1, 2))


@contract(ranks=3, on=MAPPED)
def test_an_array_outside_of_the_pool(ctx: Any) -> None:
    """An execution that finds it there raises its flags, and neither loads nor stores anything."""
    ctx.pool(1 << 16)
    n = 64 * 64 * ctx.size
    block = 4 * n // ctx.size
    inside = ctx.zeros(n)
    in_place = moved(ctx, lambda: ctx.allreduce(inside))
    assert in_place.peers == with_each_peer(ctx, Traffic(block, 1, block, 1, 2))
    array = np.zeros(n, np.float32) if ctx.rank == 0 else inside
    first, second = (moved(ctx, lambda: ctx.allreduce(array)) for _ in range(2))
    assert (first - second).peers == with_each_peer(ctx, Traffic(notifications=2))


@contract(ranks=2)
@pytest.mark.parametrize("plan", ["gdraa", "tree", "ring", "halving-doubling"])
def test_every_execution_counts(ctx: Any, plan: str) -> None:
    array = np.ones(1000, np.float32)
    with ctx.allreduce_handle(array, plan=plan) as handle:
        handle()
        once = moved(ctx, handle)
        thrice = moved(ctx, lambda: [handle() for _ in range(3)])
    assert once.total.bytes_written > 0
    assert thrice.total == once.total + once.total + once.total
    assert thrice.registrations == 0


@contract(ranks=2)
def test_layers_of_an_exchange(ctx: Any) -> None:
    shapes = [((256,), np.float32), ((512,), np.float32)]
    with pgasdl.GradientExchange(ctx, shapes, plan="gdraa") as exchange:

        def step() -> None:
            for layer in range(2):
                exchange.gradient(layer)[:] = 1
                exchange.ready(layer)
            for layer in range(2):
                exchange.wait(layer)

        began = time.monotonic()
        step()
        told = moved(ctx, step)
        # Of no moment twice.
        spent = sum(each.computing + each.waiting for each in ctx.counters().layers.values())
        assert spent < 1.01 * (time.monotonic() - began)
        assert list(told.layers) == [(exchange.number, 0), (exchange.number, 1)]
        for times in told.layers.values():
            assert times.exchanges == 1
            assert min(times.computing, times.queued, times.exchanging, times.waiting) > 0
        assert all(each.exchanges == 2 for each in ctx.counters().layers.values())
        with pgasdl.GradientExchange(ctx, shapes, plan="gdraa") as second:
            assert second.number != exchange.number
            assert len(ctx.counters().layers) == 4
    assert told.peers == with_each_peer(ctx, Traffic(4 * (256 + 512), 4, notifications=4))
    assert ctx.counters().layers == {}


@contract(ranks=(2, 3))
def test_pairwise_collectives(ctx: Any) -> None:
    """The torch backend's: each block goes once, by a Put or by loads of its receiver."""
    calls = ctx._allreduces.begin_pairwise(ctx.world, 30.0).pairwise
    n = 1001
    gives, takes = (np.zeros((ctx.size, n), np.uint8) for _ in range(2))
    places = [row.ctypes.data for array in (gives, takes) for row in array]
    lengths = (n,) * ctx.size
    pairs = Pairs("all-to-all", "bytes", Blocks(lengths, lengths, n))

    def gather() -> None:
        for execution, _ in calls.bound(pairs, lambda: pairs).parts:
            execution.run_at((gives, takes), [*places, 0], timeout=30.0)

    gather()
    told = moved(ctx, gather)
    way = Traffic(0, 0, n, 1, 2) if ctx.mapped else Traffic(n, 1, notifications=2)
    assert told.peers == with_each_peer(ctx, way)
    calls.close()


@contract(ranks=2)
def test_registrations(ctx: Any) -> None:
    def changed(program: Callable[[], object]) -> int:
        return moved(ctx, program).registrations

    assert ctx.counters().registrations > 0  # the world's own memory
    assert changed(lambda: ctx.segment(64)) == 1
    assert changed(lambda: ctx.pool(1 << 16)) == 1
    assert changed(lambda: ctx.group([ctx.rank])) == 1
    array = np.ones(10_000, np.float32)
    ctx.allreduce(array)
    assert changed(lambda: [ctx.allreduce(array) for _ in range(20)]) == 0


def waited(told: pgasdl.Counters) -> dict[str, int]:
    """The causes for which there were waits, and how many."""
    assert all((each.number > 0) == (each.seconds > 0) for each in told.waits.values())
    return {cause: each.number for cause, each in told.waits.items() if each.number}


def no_flag_yet(ctx: Any, segment: Any) -> bool:
    try:
        ctx.notify_waitsome(segment, 0, 1, timeout=0)
    except pgasdl.PgasTimeoutError:
        return True
    return False


@contract(ranks=2)
def test_a_flag_that_is_there_is_no_wait(ctx: Any) -> None:
    segment = ctx.segment(64)

    def exchange() -> None:
        ctx.notify(1 - ctx.rank, segment, 0)
        while no_flag_yet(ctx, segment):
            pass
        assert ctx.notify_waitsome(segment, 0, 1) == 0
        ctx.notify_reset(segment, 0)

    exchange()  # else over verbs the first notification waits for a connection
    assert waited(moved(ctx, exchange)) == {}


@contract(ranks=2, queue_depth=4)
def test_waits_for_a_peer_that_is_late(ctx: Any) -> None:
    """Rank 1 does its part once rank 0's wait has timed out: one wait, however many pieces."""
    segment = ctx.segment(64)
    array = np.ones(8, np.float32)
    ctx.allreduce(array, plan="gdraa")

    def expect(cause: str, call: Callable[..., object], seconds: float = 0.01) -> None:
        if ctx.rank == 0:
            before = ctx.counters()
            with pytest.raises(pgasdl.PgasTimeoutError):
                call(timeout=seconds)
            assert waited(ctx.counters() - before) == {cause: 1}
            ctx.notify(1, segment, 9)
        ctx.notify_waitsome(segment, 9, 1)  # first on rank 1, whose answer comes back
        ctx.notify_reset(segment, 9)
        if ctx.rank == 1:
            ctx.notify(0, segment, 9)
        ctx.wait()

    expect(
        "notification", lambda timeout: ctx.notify_waitsome(segment, 0, 1, timeout=timeout), 0.12
    )
    expect("barrier", ctx.barrier)
    ctx.barrier()
    expect("plan", lambda timeout: ctx.allreduce(array, plan="gdraa", timeout=timeout))
    ctx.allreduce(array, plan="gdraa")
    expect("passive", ctx.passive_receive)
    expect("collective", lambda timeout: ctx.segment(64, timeout=timeout))
    ctx.segment(64)


@contract(ranks=2)
def test_openmetrics(ctx: Any) -> None:
    """A parser that is not ours reads what ``counters()`` says."""
    segment = ctx.segment(64)
    ctx.write(segment[0:8], 1 - ctx.rank, segment[8:16])
    ctx.wait()
    ctx.barrier()
    with pgasdl.GradientExchange(ctx, [((8,), np.float32)], plan="gdraa"):
        counters, text = ctx.counters(), ctx.openmetrics()
        families = {each.name: each for each in text_string_to_metric_families(text)}
    ctx.barrier()
    samples = {
        (each.name, *sorted(each.labels.items())): each.value
        for family in families.values()
        for each in family.samples
    }
    rank = ("rank", str(ctx.rank))
    peer = ("peer", str(1 - ctx.rank))
    name = "pgasdl_traffic_bytes_total"
    assert samples[name, ("direction", "write"), peer, rank] == counters.total.bytes_written
    assert samples["pgasdl_peers_lost_total", rank] == 0
    assert samples["pgasdl_registrations_total", rank] == counters.registrations
    for cause, each in counters.waits.items():
        assert samples["pgasdl_waits_total", ("cause", cause), rank] == each.number
        assert samples["pgasdl_wait_seconds_total", ("cause", cause), rank] == each.seconds
    assert len(families["pgasdl_layer_seconds"].samples) == 4
    for family in families.values():
        assert family.type == "counter" and family.documentation.endswith(".")
        unit = family.name.rpartition("_")[2]
        assert family.unit == (unit if unit in ("bytes", "seconds") else "")
        assert all(each.name == family.name + "_total" for each in family.samples)


@contract(ranks=2)
def test_differences_and_sums(ctx: Any) -> None:
    segment = ctx.segment(64)
    before = ctx.counters()
    nothing = before - before
    assert nothing.peers == (NOTHING,) * ctx.size
    assert (nothing.registrations, nothing.losses, waited(nothing)) == (0, 0, {})
    ctx.write(segment[0:8], 1 - ctx.rank, segment[8:16])
    ctx.wait()
    after = ctx.counters()
    assert after.total - before.total == (after - before).total == Traffic(8, 1)
    assert "8 bytes in 1 messages" in str(after - before)
    ctx.barrier()
