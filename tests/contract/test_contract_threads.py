"""Several threads of one rank: each notification is handed out once, queues can be shared."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl


def in_threads(n: int, work: Callable[[int], object]) -> list[Any]:
    """``work(0)`` to ``work(n - 1)`` at once; what they returned, or the first exception."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(work, range(n)))


@contract(ranks=2)
def test_reset_hands_each_value_out_once(ctx: Any) -> None:
    """Several threads poll reset, whatever waitsome says, while values arrive (5000, here 100)."""
    n = 100
    segment = ctx.segment(0, notifications=2)
    if ctx.rank == 0:
        for value in range(1, n + 1):
            ctx.notify(1, segment, 0, value)
            assert ctx.notify_waitsome(segment, 1, 1) == 1  # it was taken
            ctx.notify_reset(segment, 1)
    else:
        taken = Counter[int]()
        lock = threading.Lock()

        def poll(_: int) -> None:
            while sum(taken.values()) < n:
                with contextlib.suppress(pgasdl.PgasTimeoutError):
                    ctx.notify_waitsome(segment, 0, 1, timeout=0)
                if value := ctx.notify_reset(segment, 0):
                    with lock:
                        taken[value] += 1
                    ctx.notify(0, segment, 1)

        sys.setswitchinterval(1e-4)  # the pollers would keep the interpreter for 5 ms each
        in_threads(3, poll)
        sys.setswitchinterval(5e-3)
        assert taken == Counter(range(1, n + 1))


@contract(ranks=2)
def test_reset_races_with_overwriting_notifies(ctx: Any) -> None:
    """Values may be overwritten before they are taken, but none is ever seen twice."""
    n = 2000
    segment = ctx.segment(0, notifications=2)
    if ctx.rank == 0:
        for value in range(1, n + 1):
            ctx.notify(1, segment, 0, value)
        assert ctx.notify_waitsome(segment, 1, 1) == 1
    else:

        def poll(_: int) -> list[int]:
            mine: list[int] = []
            while not stop.is_set():
                try:
                    ctx.notify_waitsome(segment, 0, 1, timeout=0)
                except pgasdl.PgasTimeoutError:
                    continue
                if value := ctx.notify_reset(segment, 0):
                    mine.append(value)
                    if value == n:
                        stop.set()
            return mine

        stop = threading.Event()
        lists = in_threads(3, poll)
        ctx.notify(0, segment, 1)
        seen = [value for values in lists for value in values]
        assert len(seen) == len(set(seen))
        assert max(seen) == n
        assert all(values == sorted(values) for values in lists)


@contract(ranks=2)
def test_threads_wait_on_one_range(ctx: Any) -> None:
    """Every notification of the range wakes a thread, and exactly one thread gets it."""
    n, n_threads = 200, 4
    segment = ctx.segment(0, notifications=n + 1)
    if ctx.rank == 0:
        for number in range(n):
            ctx.notify(1, segment, number, number + 1)
        assert ctx.notify_waitsome(segment, n, 1) == n
    else:

        def consume(_: int) -> list[int]:
            mine = []
            for _ in range(n // n_threads):
                while True:
                    number = ctx.notify_waitsome(segment, 0, n)
                    if value := ctx.notify_reset(segment, number):
                        assert value == number + 1
                        mine.append(number)
                        break
            return mine

        lists = in_threads(n_threads, consume)
        assert sorted(number for mine in lists for number in mine) == list(range(n))
        ctx.notify(0, segment, n)


@contract(ranks=2)
def test_threads_post_to_one_queue(ctx: Any) -> None:
    """Writes of 1 B to 64 KiB from several threads on one queue (256 MiB scaled down)."""
    n_threads, nbytes = 3, 1 << 16
    segment = ctx.segment(2 * n_threads * nbytes, notifications=n_threads * 32)
    places = segment.numpy().reshape(2, n_threads, nbytes)
    peer = 1 - ctx.rank
    rng = np.random.default_rng(ctx.rank)
    places[0] = rng.integers(0, 256, places[0].shape)

    def post(thread: int) -> None:
        here = thread * nbytes
        there = (n_threads + thread) * nbytes
        for power in range(17):
            n = 1 << power
            ctx.write_notify(
                segment[here : here + n], peer, segment[there : there + n], 32 * thread + power
            )
            ctx.wait()

    in_threads(n_threads, post)
    for thread in range(n_threads):
        for power in range(17):
            number = 32 * thread + power
            assert ctx.notify_waitsome(segment, number, 1) == number
            assert ctx.notify_reset(segment, number) == 1
    expected = np.random.default_rng(peer).integers(0, 256, places[0].shape)
    assert (places[1] == expected).all()
    assert ctx.queue_size() == 0


@contract(ranks=2, queue_depth=8)
def test_threads_share_a_shallow_queue(ctx: Any) -> None:
    """With timeout=0 a thread may find the queue full; nothing is lost and nothing overruns."""
    n_threads, n = 4, 50
    segment = ctx.segment(8, notifications=n_threads * n)
    peer = 1 - ctx.rank

    def post(thread: int) -> None:
        for number in range(n):
            while True:
                try:
                    ctx.notify(peer, segment, thread * n + number, 1 + number, timeout=0)
                    break
                except pgasdl.QueueFullError:
                    ctx.wait()
            assert ctx.queue_size() <= 8

    in_threads(n_threads, post)
    for number in range(n_threads * n):
        assert ctx.notify_waitsome(segment, number, 1) == number
        assert ctx.notify_reset(segment, number) == 1 + number % n


@contract(ranks=2)
def test_atomics_of_threads(ctx: Any) -> None:
    segment = ctx.segment(8)
    olds = in_threads(4, lambda _: [ctx.atomic_fetch_add(segment[0:8], 0, 1) for _ in range(50)])
    mine = [old for some in olds for old in some]
    assert len(set(mine)) == 200
    ctx.barrier()
    if ctx.rank == 0:
        assert segment.numpy(np.uint64)[0] == 400


@contract(ranks=2)
def test_groups_of_threads(ctx: Any) -> None:
    """Two threads, a group each, barriers and allreduces at once (1000 scaled to 60)."""
    groups = [ctx.group(range(ctx.size)) for _ in range(2)]

    def work(thread: int) -> None:
        group = groups[thread]
        for turn in range(60):
            group.barrier()
            total = group.combine(np.arange(10, dtype=np.int64) * (ctx.rank + 1) + turn + thread)
            assert (total == np.arange(10) * 3 + 2 * (turn + thread)).all()
            try:
                group.barrier(timeout=0.01)
            except pgasdl.PgasTimeoutError:
                group.barrier()

    in_threads(2, work)


@contract(ranks=2)
def test_barrier_and_allreduce_in_flight_together(ctx: Any) -> None:
    """One collective of each kind may be under way in one group."""
    group = ctx.group(range(ctx.size))

    def barriers() -> None:
        for _ in range(100):
            group.barrier()

    def allreduces() -> None:
        for turn in range(100):
            assert group.combine(np.full(3, turn, np.float32))[0] == ctx.size * turn

    in_threads(2, lambda thread: (barriers, allreduces)[thread]())


@contract(ranks=2)
def test_same_collective_from_two_threads_is_refused(ctx: Any) -> None:
    """Two threads of one rank in one barrier: an error, never a mix-up."""
    group = ctx.group(range(ctx.size))
    segment = ctx.segment(0, notifications=1)
    if ctx.rank == 0:
        refusals = []

        def one(_: int) -> None:
            try:
                group.barrier()
            except pgasdl.MismatchError as error:
                refusals.append(str(error))
                ctx.notify(1, segment, 0)  # now the peer comes, and the other thread is done

        in_threads(2, one)
        assert len(refusals) == 1
        assert "two threads" in refusals[0]
    else:
        assert ctx.notify_waitsome(segment) == 0
        group.barrier()


@contract(ranks=2)
def test_second_thread_harms_nothing(ctx: Any) -> None:
    """The second is refused, at once or while the first waits; the first gets its result."""
    group = ctx.group(range(ctx.size))
    array = np.arange(5000.0)

    def reduced() -> None:
        assert (group.combine(array) == 2 * array).all()

    def created() -> None:
        segment = ctx.segment(4096, group=group)
        assert segment.nbytes == segment.nbytes_of(1 - ctx.rank) == 4096

    def bound() -> None:
        memory = np.zeros(100, np.uint8)
        assert ctx.bind(memory, group=group).nbytes_of(1 - ctx.rank) == 100

    def formed() -> None:
        assert ctx.group(range(ctx.size)).size == ctx.size

    calls = [reduced, created, bound, formed, group.barrier]
    for turn in range(2 * len(calls)):
        call = calls[turn // 2]
        ctx.barrier()
        if ctx.rank != 0:
            assert ctx.passive_receive() == (0, b"come")
            call()
            continue
        refused: list[str] = []

        def one(thread: int, turn: int = turn, refused: list[str] = refused) -> None:
            time.sleep(0.08 * thread * (turn % 2))  # at once, or while the first is inside
            try:
                calls[turn // 2]()
            except pgasdl.MismatchError as error:
                refused.append(str(error))
                ctx.passive_send(b"come", 1)

        in_threads(2, one)
        assert len(refused) == 1
        assert "two threads" in refused[0]


@contract(ranks=2)
def test_half_way_calls_are_continued_by_any_thread(ctx: Any) -> None:
    """No other call of their kind gets in between; memory that was being bound stays alive."""
    group = ctx.group(range(ctx.size))
    array = np.arange(3000.0)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.bind(np.zeros(100, np.uint8), group=group, timeout=0.01)
        with pytest.raises(pgasdl.PgasTimeoutError):
            group.combine(array, timeout=0.01)
        for _ in range(2):
            for wrong in (
                lambda: ctx.segment(100, group=group, timeout=0.01),
                lambda: ctx.bind(np.zeros(100, np.uint8), group=group, timeout=0.01),
                lambda: group.combine(array + 1, timeout=0.01),
                lambda: group.combine(array, "max", timeout=0.01),
            ):
                with pytest.raises(pgasdl.MismatchError, match="ended half way"):
                    wrong()
        ctx.barrier()
        results = in_threads(1, lambda _: group.combine(array))
        assert (results[0] == 2 * array).all()
    else:
        ctx.barrier()
        assert (group.combine(array) == 2 * array).all()


@contract(ranks=1)
def test_passive_to_self_from_a_thread(ctx: Any) -> None:
    """The receiver blocks, or polls."""

    def receive(timeout: float | None) -> Any:
        while True:
            with contextlib.suppress(pgasdl.PgasTimeoutError):
                return ctx.passive_receive(timeout=timeout)

    for timeout in (None, 0):
        works = (lambda: ctx.passive_send(b"to myself", 0), lambda: receive(timeout))  # noqa: B023
        assert in_threads(2, lambda thread: works[thread]())[1] == (0, b"to myself")  # noqa: B023


@contract(ranks=2)
def test_passive_receiver_answers_with_notify(ctx: Any) -> None:
    """A receiver thread answers each message by a notification (300 scaled to 100)."""
    n = 100
    segment = ctx.segment(0, notifications=n)

    def receive() -> None:
        for number in range(n):
            sender, message = ctx.passive_receive()
            assert int.from_bytes(message, "little") == number
            ctx.notify(sender, segment, number, number + 1)

    def send() -> None:
        peer = 1 - ctx.rank
        for number in range(n):
            ctx.passive_send(number.to_bytes(4, "little"), peer)
            assert ctx.notify_waitsome(segment, number, 1) == number
            assert ctx.notify_reset(segment, number) == number + 1

    in_threads(2, lambda thread: (receive, send)[thread]())


@contract(ranks=1)
def test_close_while_a_thread_waits(ctx: Any) -> None:
    """The waiter ends with ClosedError instead of waiting on."""
    segment = ctx.segment(0)
    started = threading.Event()

    def wait() -> None:
        started.set()
        with pytest.raises(pgasdl.ClosedError):
            ctx.notify_waitsome(segment, timeout=10)

    def close() -> None:
        started.wait()
        ctx.close()

    begin = time.monotonic()
    in_threads(2, lambda thread: (wait, close)[thread]())
    assert time.monotonic() - begin < 5
