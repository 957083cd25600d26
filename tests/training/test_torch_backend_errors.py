"""Errors of the backend of torch.distributed, and its end, on ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from backend_tools import options, ranks, reduced, run
from support.patience import PATIENCE
from support.ranks import on_ranks

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch.backend.group import ProcessGroup  # noqa: E402
from pgasdl.torch.backend.meet import SharedContext  # noqa: E402


def run_unequal(program: Callable[[Any], Any]) -> list[Any]:
    """As ``run``; ranks meet at the end without a collective."""
    met = threading.Barrier(2)

    def rank(ctx: Any) -> Any:
        shared = SharedContext(ctx, range(2), ours=False)
        group = ProcessGroup(shared, range(2), ctx.rank, timedelta(seconds=3))
        try:
            return program(group)
        finally:
            met.wait(PATIENCE)  # who leaves first ends the other's wait in another way
            group.shutdown()

    return loopback.run(2, rank)


unequal = on_ranks(2, run=lambda _, program: run_unequal(program))


def test_ranks_in_different_collectives_are_told() -> None:
    def program(group: Any) -> str:
        t = torch.ones(4)
        with pytest.raises(dist.DistBackendError) as caught:
            if group.rank() == 0:
                group.broadcast([t], options(c10d.BroadcastOptions, rootRank=1)).wait()
            else:
                how = options(c10d.GatherOptions, rootRank=0)
                group.gather([], [t], how).wait()
                group.allgather(
                    [[t.clone(), t.clone()]], [t], options(c10d.AllgatherOptions)
                ).wait()
        return str(caught.value)

    told = run_unequal(program)
    assert "broadcast of 16 bytes from rank 1: " in told[0]
    assert "rank 1 runs a different collective" in told[0]


@pytest.mark.parametrize("first", [True, False])
@unequal
def test_ranks_of_which_one_reduces_and_one_does_not_are_told(group: Any, first: bool) -> None:
    """At once, also in the first call, which makes the group's memory."""
    t = torch.ones(4)
    if not first:
        group.allreduce([t], reduced(ReduceOp.SUM)).wait()
    with pytest.raises(dist.DistBackendError, match="different collective"):
        if group.rank() == 0:
            group.allreduce([t], reduced(ReduceOp.SUM)).wait()
        else:
            group.broadcast([t], options(c10d.BroadcastOptions, rootRank=1)).wait()


@pytest.mark.parametrize("count", [4, 1 << 20, 3 << 20])
def test_ranks_that_reduce_different_lengths_are_told(count: int) -> None:
    """Also where the first pieces are alike."""

    def program(group: Any) -> str:
        mine = torch.ones(count << group.rank(), dtype=torch.uint8)
        with pytest.raises(dist.DistBackendError, match="runs a different collective") as caught:
            group.allreduce([mine], reduced(ReduceOp.SUM)).wait()
        return str(caught.value)

    for rank, told in enumerate(run_unequal(program)):
        assert f"all_reduce of {count << rank} bytes: " in told


@ranks(2)
def test_sizes_that_do_not_fit_are_told(group: Any) -> None:
    if group.rank() == 0:
        group.send([torch.ones(5)], 1).wait()
    else:
        with pytest.raises(
            dist.DistBackendError, match=r"expects 16 bytes with tag 0 from rank 0, which sends"
        ):
            group.recv([torch.ones(4)], 0).wait()
    with pytest.raises(ValueError, match=r"tensor 0 is torch\.int32, not torch\.float32"):
        wrong = [[torch.ones(1, dtype=torch.int32)] * 2]
        group.allgather(wrong, [torch.ones(1)], options(c10d.AllgatherOptions))
    with pytest.raises(ValueError, match=r"has 2 elements of shape"):
        group.all_gather_single(torch.ones(2), torch.ones(3), options(c10d.AllgatherOptions))
    with pytest.raises(ValueError, match="1 tensors: the group has 2 ranks"):
        group.allgather([[torch.ones(1)]], [torch.ones(1)], options(c10d.AllgatherOptions))
    t = torch.ones(2)  # and all goes on
    group.allreduce([t], reduced(ReduceOp.SUM)).wait()
    assert t.sum() == 4


def conjugated() -> Any:
    return torch.tensor([1 + 2j, 3 + 4j]).conj()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_taken_is_refused_and_all_goes_on() -> None:
    """Before anything starts, and on every rank."""
    one = torch.ones(2)
    gather, scatter = options(c10d.AllgatherOptions), options(c10d.ReduceScatterOptions)
    refused: dict[str, Callable[[Any], Any]] = {
        "expanded": lambda g: g.allreduce([one[:1].expand(2)], reduced(ReduceOp.SUM)),
        "expanded tensor": lambda g: g.allgather([[one, one[:1].expand(2)]], [one], gather),
        "SUM of torch.uint16": lambda g: g.allreduce([one.to(torch.uint16)]),
        "MAX of torch.float8_e4m3fn": lambda g: g.reduce_scatter(
            [one[:1].to(torch.float8_e4m3fn)],
            [list(one.to(torch.float8_e4m3fn).split(1))],
            options(c10d.ReduceScatterOptions, reduceOp=ReduceOp.MAX),
        ),
        "torch.int32 with factor": lambda g: g.allreduce(
            [one.int()], reduced(dist._make_nccl_premul_sum(0.5))
        ),
        "torch.sparse_csr": lambda g: g.allreduce([torch.eye(2).to_sparse_csr()]),
        "torch.sparse_coo": lambda g: g.all_gather_single(one, torch.eye(1).to_sparse(), gather),
        "MAX of sparse": lambda g: g.allreduce([one.to_sparse()], reduced(ReduceOp.MAX)),
        "quint8": lambda g: g.broadcast(
            [torch.quantize_per_tensor(one, 1.0, 0, torch.quint8)], options(c10d.BroadcastOptions)
        ),
        "nested": lambda g: g.send([torch.nested.nested_tensor([one])], 0),
        "on meta": lambda g: g.reduce_scatter_single(one, one.repeat(2).to("meta"), scatter),
        "without memory": lambda g: g.alltoall([one, one], [one, torch._efficientzerotensor(2)]),
        "resolve_conj": lambda g: g.send([conjugated()], 0),
        "tensor 1 is torch.int32": lambda g: g.reduce_scatter([one], [[one, one.int()]], scatter),
        "2 elements for this rank": lambda g: g.all_to_all_single(
            torch.empty(4), torch.empty(4), [3, 1] if g.rank() else [1, 3], [2, 2]
        ),
    }

    def program(group: Any) -> None:
        for why, call in refused.items():
            with pytest.raises(ValueError, match=why):
                call(group)
        t = torch.ones(2)
        group.allreduce([t], reduced(ReduceOp.SUM)).wait()
        assert t.sum() == 4

    run(2, program)


@ranks(2)
def test_views_and_tensors_of_inference_mode_are_taken(group: Any) -> None:
    how = options(c10d.ReduceScatterOptions)
    part = torch.zeros(1, dtype=torch.complex64)
    group.reduce_scatter_single(part, conjugated(), how).wait()
    assert part.item() == (6 - 8j if group.rank() else 2 - 4j)
    mine = conjugated()
    group.reduce([mine], options(c10d.ReduceOptions, rootRank=0)).wait()
    assert mine[0].item() == (1 - 2j if group.rank() else 2 - 4j)
    negative = conjugated().imag
    parts = [torch.zeros(2) for _ in range(2)]
    group.allgather([parts], [negative], options(c10d.AllgatherOptions)).wait()
    assert parts[1].tolist() == [-2, -4]
    group.allreduce([negative], reduced(ReduceOp.SUM)).wait()
    assert negative.tolist() == [-4, -8]
    parts[0].requires_grad_()
    group.allgather([parts], [torch.ones(1).expand(2)], options(c10d.AllgatherOptions)).wait()
    assert parts[0].tolist() == [1, 1]
    with torch.inference_mode():
        frozen = [torch.ones(3, 2, dtype=dtype).t() for dtype in (torch.float32, torch.int8)]
    for each in frozen:
        group.allreduce([each], reduced(ReduceOp.SUM)).wait()
        group.allreduce([each], c10d.AllreduceOptions()).wait()
        assert each.is_inference() and (each == 4).all()
    rows = torch.zeros(2, 2, dtype=torch.int8)
    group.reduce_scatter_single(rows, torch.ones(4, 2, dtype=torch.int8), how).wait()
    assert (rows == 2).all()


@unequal
def test_every_wait_has_a_deadline(group: Any) -> None:
    if group.rank() == 0:
        work = group.recv([torch.empty(3)], 1)
        with pytest.raises(dist.DistBackendError, match=r"Timed out .* 0 of 12 bytes"):
            work.wait(timedelta(milliseconds=50))
        assert work.is_completed() and "Timed out" in str(work.exception())
        with pytest.raises(RuntimeError, match="Timed out"):
            work.get_future().wait()
        how = reduced(ReduceOp.MAX)
        how.timeout = timedelta(milliseconds=50)
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            group.allreduce([torch.ones(2)], how).wait()
        with pytest.raises(dist.DistBackendError, match="Timed out"):  # half done, maybe
            group.allreduce([torch.ones(2)], how).wait()


@unequal
def test_futures_of_what_failed_fail_for_python_and_for_cpp(group: Any) -> None:
    """C++ waits for all of several futures."""
    if group.rank() == 0:
        group._start_coalescing(torch.device("cpu"))
        begun = group.allreduce([torch.ones(3)], c10d.AllreduceOptions())
        received = group.recv([torch.ones(3)], 1)
        works = [begun, received, group._end_coalescing(torch.device("cpu"))]
        futures = [work.get_future() for work in works]
        group.abort()
        works.append(group.barrier(c10d.BarrierOptions()))
        for future in (*futures, works[-1].get_future()):
            for waits in (future, torch.futures.collect_all([future])):
                with pytest.raises(RuntimeError, match=r"DistBackendError: .*was aborted"):
                    waits.wait()
            then = future.then(lambda done: done.value())
            with pytest.raises(RuntimeError, match=r"DistBackendError: .*was aborted"):
                then.wait()


@pytest.mark.parametrize("how", ["abort", "shutdown"])
@unequal
def test_an_end_ends_what_is_under_way(group: Any, how: str) -> None:
    if group.rank() == 0:
        works = [
            group.allreduce([torch.ones(3)], c10d.AllreduceOptions()),
            group.barrier(c10d.BarrierOptions()),
            group.recv([torch.ones(3)], 1),
        ]
        time.sleep(0.05)
        getattr(group, how)()
        for work in works:
            with pytest.raises(dist.DistBackendError, match=r"was aborted|was destroyed"):
                work.wait(timedelta(seconds=5))
        for again in (options(c10d.BarrierOptions), c10d.BarrierOptions()):
            with pytest.raises(dist.DistBackendError, match=r"was aborted|was destroyed"):
                group.barrier(again).wait(timedelta(seconds=5))
        with pytest.raises(dist.DistBackendError, match=r"was aborted|was destroyed"):
            group.send([torch.ones(3)], 1).wait()


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())

    def program(group: Any) -> None:
        for _ in range(5):
            group.allreduce([torch.ones(2)], c10d.AllreduceOptions()).get_future().wait()

    run(2, program)
    deadline = time.monotonic() + 10
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("mapped", [True, False])
@on_ranks(2, "mapped")
def test_a_group_that_some_could_not_make_shifts_no_later_one(ctx: Any, mapped: bool) -> None:
    shared = SharedContext(ctx, range(2), ours=False)
    world = ProcessGroup(shared, range(2), ctx.rank, timedelta(seconds=PATIENCE))
    for late in (1, 0, 1):
        for rank in (1 - late, late):
            if ctx.rank == rank:
                with pytest.raises(pgasdl.PgasTimeoutError):
                    ProcessGroup(shared, range(2), ctx.rank, timedelta(seconds=0.2))
            ctx.barrier()
    group = ProcessGroup(shared, range(2), ctx.rank, timedelta(seconds=PATIENCE))
    for each in (group, world):
        t = torch.ones(2)
        each.allreduce([t], reduced(ReduceOp.SUM)).wait()
        assert t.sum() == 4
    ctx.barrier()
    for each in (group, world):
        each.shutdown()


@on_ranks(2)
def test_members_come_in_rising_order(ctx: Any) -> None:
    shared = SharedContext(ctx, range(2), ours=False)
    with pytest.raises(pgasdl.RankError, match="in rising order"):
        ProcessGroup(shared, [1, 0], 1 - ctx.rank, timedelta(seconds=30))
