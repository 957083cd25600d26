"""init, close, what stays behind, fork, Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract_harness import PROCESSES, SETTINGS, TRANSPORTS, contract
from support.patience import until

import pgasdl


def every_call(ctx: Any) -> dict[str, Callable[[], Any]]:
    """Every method that needs an open context, on objects made before."""
    segment, group = ctx.segment(64), ctx.group(range(ctx.size))
    a, b = segment[0:8], segment[8:16]
    array = np.ones(8, np.float32)
    handle = ctx.allreduce_handle(array, op="mean")
    ctx.allreduce(array, op="mean")
    return {
        "segment": lambda: ctx.segment(8),
        "bind": lambda: ctx.bind(bytearray(8)),
        "pool": lambda: ctx.pool(64, timeout=1),
        "empty": lambda: ctx.empty(3),
        "zeros": lambda: ctx.zeros(3),
        "empty_like": lambda: ctx.empty_like(array),
        "write": lambda: ctx.write(a, 0, b),
        "read": lambda: ctx.read(a, 0, b),
        "write_list": lambda: ctx.write_list([(a, b)], 0),
        "read_list": lambda: ctx.read_list([(a, b)], 0),
        "notify": lambda: ctx.notify(0, segment, 0),
        "write_notify": lambda: ctx.write_notify(a, 0, b, 0),
        "read_notify": lambda: ctx.read_notify(a, 0, b, 0),
        "write_list_notify": lambda: ctx.write_list_notify([], 0, segment, 0),
        "read_list_notify": lambda: ctx.read_list_notify([], 0, segment, 0),
        "notify_waitsome": lambda: ctx.notify_waitsome(segment, timeout=1),
        "notify_reset": lambda: ctx.notify_reset(segment, 0),
        "wait": ctx.wait,
        "queue_size": ctx.queue_size,
        "queue_create": ctx.queue_create,
        "queue_delete": lambda: ctx.queue_delete(1),
        "atomic_fetch_add": lambda: ctx.atomic_fetch_add(a, 0, 1),
        "atomic_compare_swap": lambda: ctx.atomic_compare_swap(a, 0, 0, 1),
        "passive_send": lambda: ctx.passive_send(b"x", 0, timeout=1),
        "passive_receive": lambda: ctx.passive_receive(timeout=1),
        "barrier": lambda: ctx.barrier(timeout=1),
        "group": lambda: ctx.group([ctx.rank], timeout=1),
        "allreduce": lambda: ctx.allreduce(array, op="mean", timeout=1),
        "allreduce-new": lambda: ctx.allreduce(np.ones(3, np.float32), op="mean", timeout=1),
        "allreduce_handle": lambda: ctx.allreduce_handle(array, op="mean", timeout=1),
        "handle": handle,
        "handle.start": handle.start,
        "group.barrier": lambda: group.barrier(timeout=1),
        "group.combine": lambda: group.combine(array, timeout=1),
        "group.allgather": lambda: group.allgather("x", b"", timeout=1),
        "transport_of": lambda: ctx.transport_of(0),
        "ping": lambda: ctx.ping(0),
        "kill": lambda: ctx.kill((ctx.rank + 1) % max(2, ctx.size)),
        "survivors": lambda: ctx.survivors(timeout=1),
        "segment.delete": segment.delete,
        "segment.nbytes_of": lambda: segment.nbytes_of(0),
    }


def outcomes(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The calls that did not raise ClosedError, and what they did instead."""
    wrong = {}
    for name, call in calls.items():
        try:
            call()
            wrong[name] = "nothing"
        except pgasdl.ClosedError:
            pass
        except BaseException as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong


@contract(ranks=2)
def test_use_after_close(ctx: Any) -> None:
    calls = every_call(ctx)
    ctx.barrier()
    ctx.close()
    assert ctx.closed
    wrong = outcomes(calls)
    assert wrong == {}
    ctx.close()
    ctx.close(failed=True)
    # Functions that only describe the context still answer.
    assert (ctx.rank in (0, 1), ctx.size, ctx.timeout) == (True, 2, 15)
    assert "closed" in repr(ctx)
    assert "rank" in ctx.flight_record()
    assert len(ctx.health()) == 2
    assert ctx.limits.queues == 16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [pgasdl.Context, pgasdl.Segment])
def test_what_is_not_made_yet_can_be_shown(kind: type) -> None:
    """A report of an exception of ``__init__`` shows it with all other variables."""
    assert repr(kind.__new__(kind)).startswith(f"<{kind.__name__}, not ")


@contract(ranks=2)
def test_what_a_context_says_of_itself(ctx: Any) -> None:
    assert [ctx.transport_of(peer) for peer in range(2)] == [ctx.transport_of(0)] * 2
    assert ctx.health() == ("healthy", "healthy")
    for peer in range(2):
        ctx.ping(peer)
    text = ctx.describe()
    assert f"rank {ctx.rank} of 2" in text
    assert ctx.transport_of(0) in text
    assert repr(ctx) == f"<Context rank {ctx.rank} of 2, {ctx.transport_of(0)}>"
    with pytest.raises(AttributeError):
        ctx.rank = 5
    with pytest.raises(AttributeError):
        ctx.timeout = 5


@contract(ranks=3, meet=False)
def test_init_and_leave_at_once(ctx: Any) -> None:
    """A rank that leaves at once hangs nobody: ranks that wait for it get an error."""
    if ctx.rank == 0:
        return
    begin = time.monotonic()
    with pytest.raises(pgasdl.PeerLostError) as caught:
        ctx.barrier()
        ctx.barrier()
    assert time.monotonic() - begin < 5
    assert caught.value.rank in (0, 1, 2)


@contract(ranks=2, meet=False)
def test_what_was_posted_still_arrives(ctx: Any) -> None:
    """A rank posts and closes; its peer sees everything, then that it left."""
    segment = ctx.segment(1 << 16)
    if ctx.rank == 0:
        segment.numpy()[:] = 7
        for at in range(0, 1 << 16, 4096):
            ctx.write(segment[at : at + 4096], 1, segment[at : at + 4096])
        ctx.notify(1, segment, 9, 3)
    else:
        assert ctx.notify_waitsome(segment, 9, 1) == 9
        assert (segment.numpy() == 7).all()
        ctx.notify_reset(segment, 9)
        with pytest.raises(pgasdl.PeerLostError, match="left"):
            ctx.notify_waitsome(segment)
        assert ctx.health()[0] == "closed"


@contract(ranks=2, meet=False)
def test_created_and_left_at_once(ctx: Any) -> None:
    """Rank 0 deletes the segment, and leaves, before rank 1 has looked at it."""
    segment = ctx.segment(64)
    if ctx.rank == 0:
        segment.delete()
    else:
        assert segment.nbytes == 64


@contract(ranks=2, meet=False)
def test_who_has_left_disturbs_nobody(ctx: Any) -> None:
    """Its messages are here, its memory as it left it; only what it owes is an error."""
    segment = ctx.segment(64)
    handle = ctx.collective_handle("broadcast", np.full(9, ctx.rank, np.float32), root=0)
    if ctx.rank == 0:
        segment.numpy()[:] = 7
        ctx.passive_send(b"last words", 1)
        ctx.write_notify(segment[0:8], 1, segment[0:8], 3)
        return
    assert until(lambda: ctx.health()[0] == "closed")
    assert ctx.passive_receive() == (0, b"last words")
    assert ctx.notify_waitsome(segment, 3, 1) == 3
    assert (segment.numpy()[:8] == 7).all()
    assert segment.nbytes_of(0) == 64
    if segment.address_of(0):
        assert (segment.numpy(peer=0) == 7).all()
    ctx.wait()
    with pytest.raises(pgasdl.PeerLostError, match="rank 0"):
        handle()


@contract(ranks=2, on=PROCESSES, bare=True)
def test_second_init(join: Any) -> None:
    with join() as ctx:
        with pytest.raises(pgasdl.ClosedError, match="open context"):
            join()
        ctx.barrier()
    for _ in range(3):
        with join() as ctx:
            ctx.barrier()


@contract(ranks=1, on=PROCESSES, bare=True)
def test_init_refuses(join: Any) -> None:
    """Wrong settings are named; a failed init leaves room for a good one."""
    for bad, error in (
        ({"transport": "carrier pigeon"}, pgasdl.ConfigError),
        ({"timeout": -1}, pgasdl.ConfigError),
        ({"timeout": float("nan")}, pgasdl.ConfigError),
        ({"queue_depth": 0}, pgasdl.ConfigError),
        ({"queue_depht": 5}, pgasdl.ConfigError),
        ({"rank": 1}, pgasdl.ConfigError),
        ({"rank": -1}, pgasdl.ConfigError),
        ({"size": 0}, pgasdl.ConfigError),
        ({"transport": "loopback"}, pgasdl.UnavailableError),
    ):
        with pytest.raises(error):
            join(**bad)
    with join() as ctx:
        ctx.barrier()
        with pytest.raises(AttributeError):
            ctx.config.timeout = 5


@contract(ranks=2, on=PROCESSES, bare=True)
def test_init_without_the_others(join: Any) -> None:
    """A rank that comes alone gets a timeout that names the missing rank."""
    if join.rank == 0:
        begin = time.monotonic()
        with pytest.raises(pgasdl.PgasTimeoutError, match="rank 1"):
            join(timeout=0.3)
        assert time.monotonic() - begin < 5


def n_shared_regions() -> int:
    gc.collect()
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum("memfd" in line for line in maps)


@contract(ranks=2, on=PROCESSES, bare=True)
def test_nothing_is_left(join: Any) -> None:
    """After ten contexts there are as many descriptors, threads and mappings as before."""

    def round_trip() -> None:
        with join() as ctx:
            segment = ctx.segment(1 << 16)
            ctx.group([0, 1]).barrier()
            ctx.allreduce(np.ones(100, np.float32), op="mean")
            ctx.allreduce_handle(np.ones(100, np.float32), op="mean")()
            ctx.notify(1 - ctx.rank, segment, 0)
            ctx.notify_waitsome(segment)
            ctx.barrier()

    def left() -> tuple[int, int, int]:
        n_regions = n_shared_regions()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), n_regions

    round_trip()
    before = left()
    for _ in range(10):
        round_trip()
    after = left()
    assert after == before
    assert not [name for name in os.listdir("/dev/shm") if "pgasdl" in name]


@contract(ranks=2, on=[row for row in TRANSPORTS if row.name in ("shm", "verbs")])
@pytest.mark.parametrize("what", ["group", "handle"])
def test_a_context_keeps_nothing_of_what_has_ended(ctx: Any, what: str) -> None:
    """The memory of groups' arrays and of handles goes with them, not with the context."""

    def make_and_end() -> None:
        array = np.full(100, 1, np.float32)
        if what == "group":
            group = ctx.group([0, 1])
            ctx.allreduce(array, group=group)
            group.delete()
        else:
            handle = ctx.allreduce_handle(array)
            handle()
            handle.close()
        assert (array == 2).all()

    make_and_end()
    ctx.barrier()
    before = n_shared_regions()
    for _ in range(10):
        make_and_end()
    ctx.barrier()
    assert n_shared_regions() <= before


@contract(ranks=2, on=PROCESSES)
def test_fork(ctx: Any) -> None:
    """A forked child gets ClosedError from every call; its parent is untouched."""
    calls = every_call(ctx)
    calls |= {"health": ctx.health, "describe": ctx.describe}
    segment = ctx.segment(64)
    segment.numpy()[:] = 5
    for end in ("exit", "close", "collect"):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer = outcomes(calls) if end == "exit" else {}
                if end == "close":
                    ctx.close()
                if end == "collect":
                    del ctx, segment, calls
                    gc.collect()
                os.write(write, json.dumps(answer).encode())
            except BaseException as error:
                os.write(write, json.dumps({"child": repr(error)}).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = json.loads(pipe.read() or b'{"child": "died"}')
        _, status = os.waitpid(child, 0)
        assert status == 0
        # Calls that only describe may answer instead.
        assert {k: v for k, v in answer.items() if k not in ("health", "describe")} == {}
        ctx.notify(1 - ctx.rank, segment, 1)
        assert ctx.notify_waitsome(segment, 1, 1) == 1
        ctx.notify_reset(segment, 1)  # not after the barrier: the next may be raised
        ctx.barrier()
        assert (segment.numpy() == 5).all()
        assert ctx.health() == ("healthy", "healthy")
    assert ctx.allreduce(np.ones(5, np.float32), "sum")[0] == 2


test_fork_beside_a_progress_thread = contract(ranks=2, on=PROCESSES, progress="thread")(
    test_fork.program  # type: ignore[attr-defined]
)


@contextlib.contextmanager
def interrupted() -> Any:
    """Ctrl-C a moment after the block began must end it, long before the deadline of its call."""
    sent = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.08, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
        time.sleep(1)  # for an interpreter that notices late
    assert time.monotonic() - sent[0] < SETTINGS["timeout"] - 3
    timer.join()


@contract(ranks=2, on=PROCESSES)
def test_keyboard_interrupt(ctx: Any) -> None:
    """Every blocking call ends with KeyboardInterrupt, and can be repeated as after a timeout."""
    flag, board = ctx.segment(0), ctx.segment(0)
    array, bound = np.ones(1000, np.float32), np.zeros(64)
    handle = ctx.allreduce_handle(np.ones(1000, np.float32), op="mean")
    blocking: dict[str, Callable[[], Any]] = {
        "notify_waitsome": lambda: ctx.notify_waitsome(board, 5, 1),
        "barrier": ctx.barrier,
        "group.combine": lambda: ctx.world.combine(np.ones(3000)),
        "allgather": lambda: ctx.world.allgather("x", b"x"),
        "segment": lambda: ctx.segment(128),
        "bind": lambda: ctx.bind(bound),
        "group": lambda: ctx.group([0, 1]),
        "survivors": ctx.survivors,
        "allreduce": lambda: ctx.allreduce(array, op="mean"),
        "handle.wait": handle.wait,
        "passive_receive": ctx.passive_receive,
    }
    for turn, (name, call) in enumerate(blocking.items()):
        if ctx.rank == 0:
            if name == "handle.wait":
                handle.start()
            with interrupted():
                call()
            ctx.notify(1, flag, turn)
            call()
        else:
            ctx.notify_waitsome(flag, turn, 1)
            if name == "notify_waitsome":
                ctx.notify(0, board, 5)
            elif name == "passive_receive":
                ctx.passive_send(b"at last", 0)
            elif name == "handle.wait":
                handle()
            else:
                call()
    if ctx.rank == 0:
        ctx.passive_send(b"first", 1)
        with interrupted():
            ctx.passive_send(b"second", 1)
        ctx.notify(1, flag, 100)
        ctx.passive_send(b"third", 1)
    else:
        ctx.notify_waitsome(flag, 100, 1)
        assert [ctx.passive_receive()[1] for _ in range(2)] == [b"first", b"third"]


@contract(ranks=2, on=PROCESSES, bare=True)
def test_keyboard_interrupt_in_init(join: Any) -> None:
    if join.rank == 0:
        with interrupted():
            join()


@contract(ranks=2, meet=False)
def test_exceptions_reach_the_others(ctx: Any) -> None:
    """A with-block left by an exception: ranks that wait get an error that names the rank."""
    if ctx.rank == 0:
        ctx.barrier()  # else the other may still be in init
        ctx.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    else:
        with pytest.raises(pgasdl.PeerLostError, match="rank 0 failed") as caught:
            ctx.barrier()
            ctx.passive_receive()
        assert caught.value.rank == 0
        assert ctx.health()[0] == "failed"
        assert ctx.survivors().ranks == (1,)
