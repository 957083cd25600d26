"""A call that ends half way is continued by the same call, or is over for good."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract_harness import MAPPED, contract

import pgasdl


def arange(ctx: Any, n: int, turn: int) -> Any:
    """This rank's contribution, and the sum of all."""
    mine = np.arange(n) % 5 + ctx.rank + turn
    everybody = ctx.size * (np.arange(n) % 5 + turn) + ctx.size * (ctx.size - 1) // 2
    return mine.astype(np.float64), everybody.astype(np.float64)


def works(ctx: Any, n: int = 100) -> None:
    """Every kind of collective gives the right result."""
    mine, everybody = arange(ctx, n, 0)
    x = mine.copy()
    ctx.allreduce(x)
    assert (x == everybody).all()
    with ctx.allreduce_handle(x) as handle:
        x[:] = mine
        handle()
        assert (x == everybody).all()
    with pgasdl.GradientExchange(ctx, [((n,), np.float64)], kind="sum") as exchange:
        exchange.gradient(0)[...] = mine
        exchange.ready(0)
        exchange.wait(0)
        assert (exchange.gradient(0) == everybody).all()
    ctx.segment(64).delete()


@contract(ranks=(2, 3))
@pytest.mark.parametrize("bad", [-1, float("nan"), "x"], ids=["negative", "nan", "text"])
def test_a_bad_timeout_changes_nothing(ctx: Any, bad: Any) -> None:
    """It is refused before anything begins, however far the execution is."""
    x = np.full(3, ctx.rank, np.float64)
    with pytest.raises((ValueError, TypeError)):
        ctx.allreduce(x, timeout=bad)
    handle = ctx.allreduce_handle(x)
    exchange = pgasdl.GradientExchange(ctx, [((8,), np.float64)], kind="sum")
    exchange.gradient(0)[...] = ctx.rank
    with pytest.raises((ValueError, TypeError)):
        handle(timeout=bad)
    exchange.ready(0)
    for wait in (exchange.wait, exchange.finish):
        with pytest.raises((ValueError, TypeError)):
            wait(*[0] if wait == exchange.wait else [], timeout=bad)
    exchange.wait(0)
    handle()
    total = ctx.size * (ctx.size - 1) // 2
    assert (exchange.gradient(0) == total).all()
    assert (x == total).all()
    works(ctx)


WRONG: dict[str, Callable[[Any], object]] = {
    "allreduce, dtype": lambda ctx: ctx.allreduce(np.ones(4, np.complex64)),
    "allreduce, strided": lambda ctx: ctx.allreduce(np.ones(8, np.float32)[::2]),
    "allreduce, operator": lambda ctx: ctx.allreduce(np.ones(4), op="x"),
    "allreduce, plan": lambda ctx: ctx.allreduce(np.ones(4), plan="none"),
    "allreduce, kind of plan": lambda ctx: ctx.allreduce(np.ones(4), plan="all-to-all"),
    "allreduce, place": lambda ctx: ctx.allreduce(np.ones(4), plan="gdraa-direct"),
    "handle, plan": lambda ctx: ctx.allreduce_handle(np.ones(4), plan="none"),
    "handle, operator": lambda ctx: ctx.allreduce_handle(np.ones(4), op="x"),
    "handle, dtype": lambda ctx: ctx.allreduce_handle(np.ones(4, np.complex64)),
    "handle, kind": lambda ctx: ctx.collective_handle("none", np.ones(4)),
    "handle, root": lambda ctx: ctx.collective_handle("broadcast", np.ones(4), root=99),
    "handle, option": lambda ctx: ctx.allreduce_handle(np.ones(4), plan="gdraa", x=1),
    "handle, out": lambda ctx: ctx.allreduce_handle(np.ones(4), out=np.ones(5)),
    "handle, timeout": lambda ctx: ctx.allreduce_handle(np.ones(4), timeout=-1),
    "group, twice": lambda ctx: ctx.group([0, 0]),
    "group, no such rank": lambda ctx: ctx.group([0, 99]),
    "group, timeout": lambda ctx: ctx.group([0, 1], timeout=-1),
    "segment, size": lambda ctx: ctx.segment(-5),
    "segment, timeout": lambda ctx: ctx.segment(5, timeout=-1),
    "bind, read-only": lambda ctx: ctx.bind(b"abc"),
    "barrier, timeout": lambda ctx: ctx.barrier(timeout=float("nan")),
    "exchange, plan": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), "f4")], plan="none"),
    "exchange, kind": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), "f4")], kind="none"),
    "exchange, dtype": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), np.complex64)]),
    "exchange, update": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), "f4")], kind="update"),
    "exchange, option": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), "f4")], plan="tree", x=1),
    "exchange, timeout": lambda ctx: pgasdl.GradientExchange(ctx, [((4,), "f4")], timeout=-1),
    "exchange, candidates": lambda ctx: pgasdl.GradientExchange(
        ctx, [((4,), "f4")], candidates=["tree", "tree"]
    ),
    "passive, rank": lambda ctx: ctx.passive_send(b"x", 99),
}


@contract(ranks=2)
def test_what_one_rank_does_wrong_is_its_own_error(ctx: Any) -> None:
    """It is refused before it meets a peer: the next collective of all ranks is right."""
    for name, call in WRONG.items():
        if ctx.rank == 0:
            with pytest.raises((pgasdl.PgasError, ValueError, TypeError)):
                call(ctx)
        x = np.ones(3)
        ctx.allreduce(x)
        assert (x == 2).all(), name
        ctx.barrier()
    works(ctx)


@contract(ranks=(2, 3))
@pytest.mark.parametrize("plan", [None, "gdraa", "tree", "ring"])
def test_a_handle_that_timed_out_is_continued(ctx: Any, plan: str | None) -> None:
    """By the same call, also if the execution ended meanwhile; its array is not read again."""
    mine = random.Random(ctx.rank)
    for n in (4096, 100_000):
        x = np.zeros(n, np.float64)
        with ctx.allreduce_handle(x, plan=plan) as handle:
            for turn in range(12):
                x[:], everybody = arange(ctx, n, turn)
                time.sleep(mine.random() * 0.002)
                for attempt in range(6):
                    try:
                        handle(timeout=0 if attempt < 5 else None)
                        break
                    except pgasdl.PgasTimeoutError:
                        with pytest.raises(pgasdl.PlanError, match="under way"):
                            handle.start()
                assert (x == everybody).all(), (plan, n, turn)


@contract(ranks=2)
def test_the_making_of_a_collective_is_continued(ctx: Any) -> None:
    """The same call continues it; until then another call is refused."""
    flag = ctx.segment(0)
    x = np.ones(10)
    layers = [((10,), np.float64)]
    makers: list[Callable[..., Any]] = [
        lambda **timeout: ctx.allreduce_handle(x, plan="gdraa", **timeout),
        lambda **timeout: pgasdl.GradientExchange(ctx, layers, plan="tree", **timeout),
    ]
    for turn, make in enumerate(makers):
        if ctx.rank == 0:
            for _ in range(3):
                with pytest.raises(pgasdl.PgasTimeoutError):
                    make(timeout=0)
            with pytest.raises(pgasdl.MismatchError, match="timed out"):
                ctx.collective_handle("broadcast", x)
            ctx.notify(1, flag, turn)
            while True:
                try:
                    made = make(timeout=0)
                    break
                except pgasdl.PgasTimeoutError:
                    time.sleep(0.001)
        else:
            ctx.notify_waitsome(flag, turn, 1)
            made = make()
        works(ctx)
        made.close()


@contract(ranks=2)
def test_a_first_allreduce_is_continued(ctx: Any) -> None:
    """Also if it timed out while its workspace was made; until then another call is refused."""
    flag = ctx.segment(0)
    x = np.full(10, 1.0 + ctx.rank)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.allreduce(x, timeout=0)
        with pytest.raises(pgasdl.MismatchError, match="timed out"):
            ctx.allreduce(np.ones(5))
        ctx.notify(1, flag, 0)
    else:
        ctx.notify_waitsome(flag)
    ctx.allreduce(x)
    assert (x == 3).all()
    works(ctx)


def until_inside(ctx: Any) -> None:
    """Return once another thread of this rank is in an allreduce."""
    deadline = time.monotonic() + 10
    while not ctx._allreduces._groups[ctx.world]._numbers.under_way:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contract(ranks=2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_second_thread_in_an_allreduce_is_refused(ctx: Any, inside: bool) -> None:
    """It is refused at once, and the first thread's result is right."""
    flag = ctx.segment(0)
    works(ctx)
    for turn in range(5):
        segment = ctx.segment(8 * 5000)
        x = segment.numpy(np.float64) if inside else np.empty(5000)
        x[:] = turn + 1
        if ctx.rank == 0:
            first = threading.Thread(target=ctx.allreduce, args=(x,))
            first.start()
            until_inside(ctx)
            with pytest.raises(pgasdl.MismatchError, match="two threads"):
                ctx.allreduce(np.full(5000, -1000.0), timeout=0)
            ctx.notify(1, flag, turn)
            first.join()
        else:
            ctx.notify_waitsome(flag, turn, 1)
            ctx.allreduce(x)
        assert (x == 2 * (turn + 1)).all(), turn
        segment.delete()


@contract(ranks=2)
def test_what_is_refused_in_a_known_call_leaves_no_mark(ctx: Any) -> None:
    """A second thread and a bad timeout are refused while a known call is under way."""
    flag = ctx.segment(0)
    x, y = np.ones(100), np.ones(200)
    for array in (x, y):
        ctx.allreduce(array)
    for turn in range(5):
        x[:] = y[:] = turn
        if ctx.rank == 0:
            first = threading.Thread(target=ctx.allreduce, args=(x,))
            first.start()
            until_inside(ctx)
            with pytest.raises(pgasdl.MismatchError, match="two threads"):
                ctx.allreduce(y, timeout=0)
            with pytest.raises(ValueError, match="timeout"):
                ctx.allreduce(y, timeout=-1)
            ctx.notify(1, flag, turn)
            first.join()
        else:
            ctx.notify_waitsome(flag, turn, 1)
            ctx.allreduce(x)
        ctx.allreduce(y)  # another call: nothing is left of what was refused
        assert (x == 2 * turn).all() and (y == 2 * turn).all(), turn


@contract(ranks=3)
def test_an_update_that_waits_disturbs_no_allreduce(ctx: Any) -> None:
    """A rank that waits for the allreduce runs the update, and its wait goes on."""
    exchange = pgasdl.GradientExchange(
        ctx, [((1000,), "f4")], kind="update", plan="tree", update=lambda block: None
    )
    for turn in range(20):
        exchange.ready(0)
        x = np.full(1000, ctx.rank + turn, "f4")
        ctx.allreduce(x, plan="gdraa")
        assert (x == 3 + 3 * turn).all(), (ctx.rank, turn, x[0])
        exchange.wait(0)
    exchange.close()


@contract(ranks=2)
def test_an_update_that_raises_ends_its_exchange_alone(ctx: Any) -> None:
    """The call that waits raises the update's exception; everything else goes on."""
    if ctx.rank == 0:

        def update(block: Any) -> None:
            raise KeyError("on purpose")
    else:

        def update(block: Any) -> None:
            block.weights -= block.gradient

    flag = ctx.segment(0)
    exchange = pgasdl.GradientExchange(
        ctx, [((100,), "f4")], kind="update", plan="tree", update=update
    )
    if ctx.rank == 0:
        with pytest.raises(KeyError, match="on purpose"):
            exchange.ready(0)
            exchange.wait(0)
        with pytest.raises(pgasdl.ClosedError, match="on purpose"):
            exchange.ready(0)
        ctx.notify(1, flag, 0)
    else:
        exchange.ready(0)
        told = False
        while not told:  # these turns send the gradient
            exchange.turn()
            with contextlib.suppress(pgasdl.PgasTimeoutError):
                told = ctx.notify_waitsome(flag, timeout=0.001) == 0
    works(ctx)
    exchange.close(finish=False)
    works(ctx)


@contract(ranks=(2, 4))
def test_an_update_that_raises_is_told_to_the_peers(ctx: Any) -> None:
    """In every wait for the exchange, for whatever layer, and also to one that only tries."""

    def update(block: Any) -> None:
        raise KeyError("on purpose")

    flag = ctx.segment(0, notifications=1)
    exchange = pgasdl.GradientExchange(
        ctx, [((100,), "f4")] * 3, kind="update", plan="tree", update=update
    )
    if ctx.rank == 0:
        with pytest.raises(KeyError, match="on purpose"):
            exchange.ready(0)
            exchange.wait(0)
        ctx.notify_wait_count(flag, 0, ctx.size - 1)  # it neither leaves nor closes
        exchange.close()
    else:
        exchange.ready(0)
        exchange.ready(1)

        def try_until_told() -> None:
            while True:
                with contextlib.suppress(pgasdl.PgasTimeoutError):
                    exchange.wait(1, timeout=0)

        told = r"rank 0 .*update of bucket 0 raised KeyError\('on purpose'\)"
        for call in (lambda: exchange.wait(0), try_until_told, exchange.finish, exchange.close):
            with pytest.raises(pgasdl.PeerLostError, match=told) as caught:
                call()
            assert caught.value.rank == 0
        ctx.notify_add(0, flag, 0)
    works(ctx)


@contract(ranks=(2, 3))
def test_two_groups_of_the_same_ranks(ctx: Any) -> None:
    """Each has its own workspace: a fast rank overwrites nothing that a slow one still reads."""
    groups = [ctx.world, ctx.group(range(ctx.size)), ctx.group(range(ctx.size))]
    for turn in range(30):
        for number, group in enumerate(groups):
            x, everybody = arange(ctx, 700, turn + number)
            ctx.allreduce(x, group=group)
            assert (x == everybody).all(), (turn, number)


@contract(ranks=2)
def test_numbers_that_come_again(ctx: Any) -> None:
    """A notification of a size used once is not taken for that of 4095 executions later."""
    ctx.allreduce(np.ones(1 << 18, np.float32))
    small = np.zeros(16, np.float32)
    for _ in range(4095):
        ctx.allreduce(small)
    with ctx.allreduce_handle(small) as handle:
        for _ in range(4100):
            handle()
    works(ctx, 1 << 18)


@contract(ranks=2, spin_us=0, yield_us=0)
def test_ranks_that_sleep_are_woken(ctx: Any) -> None:
    """A flag wakes those that wait: sleeps up to their limit, 50 ms, would miss the deadline."""
    x = np.zeros(16, np.float32)
    for _ in range(1000):
        ctx.allreduce(x)


@contract(ranks=2, on=MAPPED, spin_us=0, yield_us=0)
def test_ranks_do_not_sleep_while_they_work(ctx: Any) -> None:
    """A long reduction goes in passes, for which nobody would wake the rank: here 8."""
    x = ctx.segment(32 << 20).numpy(np.float32)
    with ctx.allreduce_handle(x, plan="gdraa-direct") as handle:
        for _ in range(600):
            handle()


@contract(ranks=(2, 3))
def test_handles_give_back_what_they_take(ctx: Any) -> None:
    """close() gives back notifications and memory; a closed handle says that it is closed."""
    x = np.zeros(50)
    for turn in range(40):
        with ctx.allreduce_handle(x, plan="tree") as handle:
            x[:], everybody = arange(ctx, 50, turn)
            handle()
            assert (x == everybody).all()
        assert handle._segment.deleted
    handle.close()
    for call in (handle, handle.start):
        with pytest.raises(pgasdl.ClosedError):
            call()


@contract(ranks=2)
def test_segments_close(ctx: Any) -> None:
    """``with`` closes them, or close() any number of times; their ids are given up."""
    with ctx.segment(64) as segment:
        segment.numpy()[:] = 7
    assert segment.deleted
    segment.close()
    with pytest.raises(pgasdl.SegmentError):
        segment.delete()
    bound = ctx.bind(np.ones(8))
    bound.close()
    bound.close()
    with pytest.raises(KeyError, match="on purpose"), ctx.segment(64) as another:
        raise KeyError("on purpose")
    assert another.deleted
    works(ctx)


@contract(ranks=2)
def test_a_handle_that_is_closed_under_way_is_over(ctx: Any) -> None:
    """No other execution gets its notifications, and nothing writes to its array any more."""
    flag = ctx.segment(0)
    for plan in ("gdraa", "tree", None):
        x = np.full(3000, 5.0 + ctx.rank)
        handle = ctx.allreduce_handle(x, plan=plan)
        if ctx.rank == 0:
            handle.start()
            with pytest.raises(pgasdl.PgasTimeoutError):
                handle.wait(timeout=0)
            handle.close()
            ctx.notify(1, flag, 0)
        else:
            ctx.notify_waitsome(flag)
            ctx.notify_reset(flag, 0)
            handle.start()
            handle.close()
        works(ctx)
        assert (x[:] == 5.0 + ctx.rank).all() or plan is None


@contract(ranks=3, meet=False)
def test_an_allreduce_that_a_loss_interrupts_goes_on(ctx: Any) -> None:
    """If none of its own ranks is lost; its array lives until then, even if the caller drops it."""
    pair = None
    if ctx.rank < 2:
        pair = ctx.group([0, 1])
        ctx.allreduce(np.ones(4), group=pair)
    flag = ctx.segment(0)
    if ctx.rank == 2:
        # Both others have done all that needs this rank.
        for number in range(2):
            ctx.notify_waitsome(flag, number, 1)
        ctx.close(failed=True)
        return
    x = np.full(40_000, ctx.rank + 1.0)
    ctx.notify(2, flag, ctx.rank)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PeerLostError, match="rank 2"):
            ctx.allreduce(x, group=pair)
    else:
        with pytest.raises(pgasdl.PeerLostError, match="rank 2"):
            ctx.notify_waitsome(flag)
    left = ctx.survivors()
    left.barrier()
    ctx.allreduce(x, group=pair)
    assert (x == 3).all()
    y = np.full(10, ctx.rank + 1.0)
    ctx.allreduce(y, group=left)
    assert (y == 3).all()
