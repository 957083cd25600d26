"""Messages of the backend of torch.distributed, and ranks that leave, as threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from backend_tools import options, ranks, reduced, run
from support.patience import PATIENCE, until

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from pgasdl import loopback  # noqa: E402
from pgasdl.torch.backend.group import ProcessGroup  # noqa: E402
from pgasdl.torch.backend.meet import SharedContext  # noqa: E402

NIC = {"mapped": False, "seed": 7, "delay": 20, "late_source": True, "completion_first": True}


@pytest.mark.parametrize("mapped", [True, False])
@ranks(3, "mapped")
def test_messages_in_a_ring_and_to_oneself(group: Any, mapped: bool) -> None:
    size = 3
    rank = group.rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 3, 700_001):
        out = torch.arange(float(count)) + rank
        into = torch.empty(count)
        works = [group.send([out], right), group.recv([into], left)]
        for work in works:
            work.wait()
        assert torch.equal(into, torch.arange(float(count)) + left)
    own = torch.zeros(4)
    work = group.recv([own], rank, 9)
    group.send([torch.ones(4)], rank, 9).wait()
    work.wait()
    assert own.sum() == 4


@ranks(3)
def test_tags_choose_and_anybody_may_send(group: Any) -> None:
    count = 400_000  # more than fits into the slots
    rank = group.rank()
    if rank == 0:
        for tag in (3, 2, 1):  # came in the order 1, 2, 3
            into = torch.empty(count)
            group.recv([into], 1, tag).wait()
            assert (into == tag).all()
        seen = set()
        for _ in range(2):
            into = torch.empty(2)
            work = group.recv_anysource([into], 7)
            work.wait()
            assert (into == work._source_rank()).all()
            seen.add(work._source_rank())
        assert seen == {1, 2}
    else:
        if rank == 1:
            sent = [group.send([torch.full((count,), float(t))], 0, t) for t in (1, 2, 3)]
            for work in sent:
                work.wait()
        group.send([torch.full((2,), float(rank))], 0, 7).wait()
    with pytest.raises(ValueError, match="contiguous"):
        group.send([torch.ones(4, 4).t()[:2]], 0)
    with pytest.raises(ValueError, match="ranks 0 to 2"):
        group.send([torch.ones(4)], 3)


@ranks(2)
def test_a_message_that_is_only_looked_at_comes_behind_a_long_wait(group: Any) -> None:
    if group.rank() == 0:
        into = torch.zeros(1), torch.zeros(800_000)
        first, second = (group.recv([each], 1, tag) for tag, each in enumerate(into))
        first.wait()
        assert until(second.is_completed) and into[1].all()
    else:
        time.sleep(0.3)  # the other rank's thread for messages sleeps meanwhile
        sent = [group.send([torch.ones(n)], 0, tag) for tag, n in enumerate((1, 800_000))]
        for work in sent:
            work.wait()


@ranks(2)
def test_a_wait_that_an_exception_ends_swallows_no_message(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is over holds nothing: its tensors go at once."""
    rank, swallowed, into = group.rank(), torch.zeros(1), torch.zeros(1)
    work = group.recv([swallowed], 1 - rank, 1)
    with monkeypatch.context() as patch:
        patch.setattr(group._messages, "_look", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    assert "KeyboardInterrupt" in str(work.exception())
    group.barrier().wait()
    sent = group.send([torch.ones(1)], 1 - rank, 1)
    received = group.recv([into], 1 - rank, 1)
    for each in (sent, received):
        each.wait()
    assert (swallowed, into) == (0, 1)
    over = weakref.ref(received)
    del received, each
    assert over() is None


@ranks(2)
def test_a_signal_handler_that_comes_in_is_refused_where_it_would_do_harm(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While pieces are moved; and a wait, which would wait for what it interrupted."""
    messages, into = group._messages, torch.zeros(1)
    if group.rank() == 0:
        once(monkeypatch, messages, "_post", lambda: refused(group))
        group.send([torch.ones(1)], 1).wait()
        once(monkeypatch, messages, "_next", lambda: (group.send([into + 2], 1), refused(group, 1)))
        group.recv([into], 1, 1).wait()
        assert into == 3
    else:
        for value in (1, 2):
            group.recv([into], 0).wait()
            assert into == value
        group.send([torch.full((1,), 3.0)], 0, 1).wait()


def refused(group: Any, first: int = 0) -> None:
    calls = (
        lambda: group.send([torch.ones(1)], 1).wait(),
        lambda: group.recv([torch.zeros(1)], 1, 1).wait(),
    )
    for call in calls[first:]:
        with pytest.raises(dist.DistBackendError, match="a handler of a signal"):
            call()


def once(patch: pytest.MonkeyPatch, of: Any, name: str, call: Callable[[], Any]) -> None:
    """Make ``call`` in the next call of a method, as a handler of a signal."""
    method = getattr(of, name)

    def interrupted(*given: Any) -> Any:
        patch.setattr(of, name, method)
        call()
        return method(*given)

    patch.setattr(of, name, interrupted)


@ranks(2)
def test_an_exception_while_a_message_is_moved_ends_all(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who went on would write a piece twice, or lose one."""
    once(monkeypatch, group._messages, "_post", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.send([torch.zeros(1)], 1 - group.rank())
    with pytest.raises(dist.DistBackendError, match="KeyboardInterrupt came while messages"):
        group.send([torch.zeros(1)], 1 - group.rank())


@ranks(2)
def test_a_send_whose_wait_failed_sends_nothing_that_changed_since(group: Any) -> None:
    """What had begun comes as it was then, what had not never. Gloo closes the connection."""
    count, into = 700_001, torch.zeros(700_001)
    if group.rank() == 0:
        tensors = torch.ones(2, count)
        begun, queued = (group.send([each], 1, tag) for tag, each in enumerate(tensors))
        for work in (begun, queued):
            with pytest.raises(dist.DistBackendError, match="Timed out"):
                work.wait(timedelta(milliseconds=50))
        assert queued.is_completed() and not begun.is_completed()
        tensors.fill_(2)
        group.context.barrier()
        group.send([torch.full((count,), 3.0)], 1, 1).wait()
        begun.wait()
    else:
        group.context.barrier()
        for tag, value in enumerate((1, 3)):
            group.recv([into], 0, tag).wait()
            assert (into == value).all()


@pytest.mark.parametrize("late", [0, 2])
@ranks(3)
def test_a_monitored_barrier_that_failed_leaves_nothing_posted(group: Any, late: int) -> None:
    """A receive that stays lets all later messages from there be taken in, wanted or not."""

    rank = group.rank()

    def fails(seconds: float) -> None:
        told = f"Rank {rank} successfully reached" if rank else "Rank [12] failed to pass"
        with pytest.raises(dist.DistBackendError, match=told):
            group.monitored_barrier(timedelta(seconds=seconds))
        assert not group._messages.busy

    if rank != late:
        fails(0.2)
    group.context.barrier()
    if rank == late == 2:
        fails(PATIENCE)  # rank 0's answer lies here
    elif rank == late:
        group.monitored_barrier()  # all had come
    group.context.barrier()
    into = torch.zeros(1)
    group.send([torch.full((1,), float(rank))], (rank + 1) % 3).wait()
    group.recv([into], (rank - 1) % 3).wait()
    assert into == (rank - 1) % 3


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@ranks(2)
def test_messages_pass_while_collectives_run(group: Any) -> None:
    """A send that nobody receives yet holds up no collective."""
    other = 1 - group.rank()
    sent = group.send([torch.full((800_000,), float(group.rank()))], other)
    for _ in range(20):
        t = torch.ones(3)
        group.allreduce([t], reduced(ReduceOp.SUM)).wait()
        parts = [torch.empty(50_000) for _ in range(2)]
        group.allgather([parts], [torch.ones(50_000)], options(c10d.AllgatherOptions)).wait()
    into = torch.empty(800_000)
    group.recv([into], other).wait()
    sent.wait()
    assert (into == other).all()


@ranks(3, seed=5, delay=20, reorder=True, late_source=True)
def test_an_adversary_changes_nothing(group: Any) -> None:
    rank = group.rank()
    for step in range(10):
        mine = torch.arange(70_000, dtype=torch.int16) + rank + step
        parts = [torch.empty_like(mine) for _ in range(3)]
        group.allgather([parts], [mine], options(c10d.AllgatherOptions)).wait()
        assert all((each[0] == r + step).all() for r, each in enumerate(parts))
        group.allreduce([mine], reduced(ReduceOp.MAX)).wait()
        assert mine[0] == 2 + step
        work = group.recv([into := torch.empty(90_000)], (rank - 1) % 3)
        group.send([torch.full((90_000,), float(rank))], (rank + 1) % 3).wait()
        work.wait()
        assert (into == (rank - 1) % 3).all()


# --- who has left


@pytest.mark.parametrize("options", [{"mapped": True}, {"mapped": False}, NIC])
def test_members_destroy_a_group_when_they_like(options: dict[str, Any]) -> None:
    """What a message's receiver tells its sender comes when that has destroyed the group.

    An adapter refuses what comes for memory that is gone, and the connection is broken.
    """
    size = 3

    def program(world: Any) -> None:
        shared, ctx, rank = world._shared, world.context, world.rank()
        world.allreduce([torch.ones(2)]).wait()
        before = ctx.footprint().workspace_bytes
        for turn in range(4):
            group = ProcessGroup(shared, range(size), rank, timedelta(seconds=30))
            first = turn % size
            if rank == first:
                works = [group.send([torch.ones(5)], each) for each in range(size) if each != rank]
                for work in works:
                    work.wait()
                group.shutdown()
            world.barrier().wait()
            if rank != first:
                group.recv([into := torch.zeros(5)], first).wait()
                assert into.sum() == 5
                group.shutdown()
            ctx.wait()  # nothing was refused
            world.allreduce([torch.ones(2)]).wait()
            world.send([into := torch.zeros(2)], (rank + 1) % size).wait()
            world.recv([into], (rank - 1) % size).wait()
        assert until(lambda: shared.look() or ctx.footprint().workspace_bytes == before)

    run(size, program, **options)


def run_leaving(
    size: int, program: Callable[[Any], Any], *, before: bool = True, **settings: Any
) -> list[Any]:
    """As ``run``, but rank 1 leaves at its end, and only then rank 0 begins, if ``before``."""

    def rank(ctx: Any) -> Any:
        shared = SharedContext(ctx, range(size), ours=True)
        group = ProcessGroup(shared, range(size), ctx.rank, timedelta(seconds=30))
        if ctx.rank == 0 and before:
            assert until(lambda: ctx.health()[1] == "closed")
        try:
            return program(group)
        finally:
            group.shutdown()

    return loopback.run(size, rank, **settings)


def last_of(kind: str, group: Any, count: int) -> Any:
    """Make a call in which rank 0 needs something of rank 1, and not the other way round."""
    rank = group.rank()
    mine = torch.full((count,), float(rank + 1))
    parts = [torch.empty(count) for _ in range(2)]
    if kind == "broadcast":
        group.broadcast([mine], options(c10d.BroadcastOptions, rootRank=1)).wait()
    elif kind == "gather":
        how = options(c10d.GatherOptions, rootRank=0)
        group.gather([] if rank else [parts], [mine], how).wait()
        mine = parts[1]
    elif kind == "scatter":
        given = [[mine, mine]] if rank else []
        group.scatter([parts[0]], given, options(c10d.ScatterOptions, rootRank=1)).wait()
        mine = parts[0]
    elif kind == "reduce":
        how = options(c10d.ReduceOptions, reduceOp=ReduceOp.MAX, rootRank=0)
        group.reduce([mine], how).wait()
    elif rank:
        group.send([mine], 0).wait()
    else:
        group.recv([mine], 1).wait()
    return mine


@pytest.mark.parametrize("mapped", [True, False])
def test_what_a_rank_sent_last_is_received_though_it_has_left(mapped: bool) -> None:
    def program(group: Any) -> Any:
        return last_of("send", group, 100_000)

    assert (run_leaving(2, program, mapped=mapped)[0] == 2).all()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", ["broadcast", "gather", "scatter", "reduce"])
def test_a_rank_may_leave_when_its_last_call_has_ended(kind: str, mapped: bool) -> None:
    def program(group: Any) -> Any:
        return last_of(kind, group, 2_000_000)

    for _ in range(5):
        assert (run_leaving(2, program, before=False, mapped=mapped)[0] == 2).all()


@pytest.mark.parametrize("mapped", [True, False])
def test_only_what_a_rank_that_has_left_owes_fails(mapped: bool) -> None:
    told = threading.Event()

    def program(group: Any) -> None:
        rank = group.rank()
        t = torch.full((3,), float(rank))
        if rank == 1:
            group.send([t], 0).wait()
        elif rank == 2:
            assert told.wait(PATIENCE)
            group.send([t], 0).wait()
        else:
            try:
                not_of_one(group, t)
            finally:
                told.set()
            group.recv([t], 2).wait()
            assert t.tolist() == [2] * 3
            for work in (group.recv([t], 1), group.recv_anysource([t], 4)):
                with pytest.raises(dist.DistBackendError, match="has left"):
                    work.wait()
            own = group.recv([t], 0, 5)
            group.send([torch.zeros(3)], 0, 5).wait()
            own.wait()
            assert t.tolist() == [0] * 3

    def not_of_one(group: Any, t: Any) -> None:
        lost = group.recv([torch.empty(3)], 1, 9)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 has left: .* 0 of 12 bytes"):
            lost.wait()
        with pytest.raises(dist.DistBackendError, match="rank 1, which has closed"):
            group.send([t], 1).wait()
        group.recv([t], 1).wait()
        assert t.tolist() == [1] * 3

    run_leaving(3, program, mapped=mapped)
