"""Tensors on a GPU in the backend of torch.distributed: a stand-in that shows missing orders."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_tools import drawn, options, ranks, run
from support.environment import environment
from support.starting import succeeded
from tiers import full

torch = pytest.importorskip("torch")

import late_gpu  # noqa: E402
from late_gpu import DEVICE, on_host  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl.collectives.state import CollectiveState  # noqa: E402
from pgasdl.torch import streams  # noqa: E402
from pgasdl.torch.backend.collectives import Collectives  # noqa: E402
from pgasdl.torch.backend.on_gpu import takes_gpus  # noqa: E402
from pgasdl.torch.work import GroupWork  # noqa: E402

SIZE = 2
Place = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cuda", late_gpu.gpu)
    monkeypatch.setattr(CollectiveState, "place_on", lambda *_: None)  # by way of the host


def how(kind: Any, later: bool, **values: Any) -> Any:
    return options(kind, asyncOp=later, **values)


def calls(group: Any, place: Place, count: int, later: bool) -> Iterator[tuple[str, Any, Any, Any]]:
    """Names, works, what was given, and where results come."""
    rank = group.rank()

    def part(seed: int, dtype: Any = torch.float32) -> Any:
        return place(drawn(10 * seed + rank, count, dtype))

    def room(n: int = count, dtype: Any = torch.float32) -> Any:
        return place(torch.zeros(n, dtype=dtype))

    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            mine = part(1, dtype)
            work = group.allreduce([mine], how(c10d.AllreduceOptions, later, reduceOp=op))
            yield f"all_reduce, {op}, {dtype}", work, [], [mine]
    mean = part(2)
    averaged = how(c10d.AllreduceOptions, later, reduceOp=ReduceOp.AVG)
    yield "mean", group.allreduce([mean], averaged), [], [mean]
    two = [part(3), part(4)]
    added = how(c10d.AllreduceCoalescedOptions, later, reduceOp=ReduceOp.SUM)
    yield "coalesced", group.allreduce_coalesced(two, added), [], two
    for root in range(SIZE):
        mine = part(5)
        work = group.broadcast([mine], how(c10d.BroadcastOptions, later, rootRank=root))
        yield "broadcast", work, [], [mine]
        mine = part(6)
        opts = how(c10d.ReduceOptions, later, reduceOp=ReduceOp.SUM, rootRank=root)
        yield "reduce", group.reduce([mine], opts), [], [mine]
        mine, out = part(7), [room() for _ in range(SIZE)] if rank == root else []
        opts = how(c10d.GatherOptions, later, rootRank=root)
        yield "gather", group.gather([out] if out else [], [mine], opts), [mine], out
        given, got = [part(8), part(9)] if rank == root else [], room()
        opts = how(c10d.ScatterOptions, later, rootRank=root)
        yield "scatter", group.scatter([got], [given] if given else [], opts), given, [got]
    gathers, scatters = how(c10d.AllgatherOptions, later), c10d.ReduceScatterOptions
    mine, out = part(10), [room() for _ in range(SIZE)]
    yield "all_gather", group.allgather([out], [mine], gathers), [mine], out
    mine, whole = part(11), room(SIZE * count)
    yield "into_tensor", group.all_gather_single(whole, mine, gathers), [mine], [whole]
    whole = room(SIZE * count)  # in place, as FSDP does it
    mine = whole[rank * count : (rank + 1) * count].fill_(rank + 3)
    yield "in place", group._allgather_base(whole, mine, gathers), [], [whole]
    two, wholes = [part(12), part(13)], [room(SIZE * count) for _ in range(2)]
    work = group.allgather_into_tensor_coalesced(wholes, two, gathers)
    yield "into_tensors", work, two, wholes
    two, out = [part(14), part(15)], [[room(), room()] for _ in range(SIZE)]
    work = group.allgather_coalesced(out, two, gathers)
    yield "all_gather_coalesced", work, two, [each for parts in out for each in parts]
    opts = how(scatters, later, reduceOp=ReduceOp.SUM)
    two, out = [part(16), part(17)], room()
    yield "reduce_scatter", group.reduce_scatter([out], [two], opts), two, [out]
    whole, out = place(drawn(18 + rank, SIZE * count, torch.float32)), room()
    yield "scatter_tensor", group.reduce_scatter_single(out, whole, opts), [whole], [out]
    two, out = [part(19), part(20)], [room(), room()]
    work = group.alltoall(out, two, how(c10d.AllToAllOptions, later))
    yield "all_to_all", work, two, out
    there, here = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
    for sizes in ((here, there), ([], [])):
        rows = place(drawn(rank, 4 * count, torch.float32).reshape(4, count))
        out = place(torch.zeros(4, count))
        opts = how(c10d.AllToAllOptions, later)
        yield "rows", group.all_to_all_single(out, rows, *sizes, opts), [rows], [out]
    turned = place(drawn(21 + rank, 2 * count, torch.float32).reshape(2, count)).t()
    added = how(c10d.AllreduceOptions, later, reduceOp=ReduceOp.SUM)
    yield "strided", group.allreduce([turned], added), [], [turned]
    out, got, other = part(22), room(), 1 - rank
    sent, received = group.send([out], other, 3), group.recv([got], other, 3)
    yield "send", sent, [], []
    yield "receive", received, [out], [got]
    out, got = part(23), room()
    sent, received = group.send([out], other), group.recv_anysource([got])
    sent.wait()
    yield "from anybody", received, [out], [got]
    assert received.source_rank() == other
    group._start_coalescing(DEVICE)
    three = [part(each) for each in (24, 25, 26)]
    for each in three[:2]:
        group.allreduce([each], how(c10d.AllreduceOptions, later))
    got = room()
    group.send([three[2]], other)
    group.recv([got], other)
    yield "together", group._end_coalescing(DEVICE), [], [*three[:2], got]
    group.barrier(options(c10d.BarrierOptions)).wait()


def waited(work: Any, outputs: list[Any]) -> list[Any]:
    assert work.wait()
    return outputs


def awaited(work: Any, outputs: list[Any]) -> list[Any]:
    """The future's; it has what a message brings, and not always in the lists' order."""
    work.get_future().wait()
    return outputs


def called_back(work: Any, outputs: list[Any]) -> list[Any]:
    seen = work.get_future().then(lambda _: [on_host(each) for each in outputs]).wait()
    return list(seen)


def polled(work: Any, outputs: list[Any]) -> list[Any]:
    while not work.is_completed():
        time.sleep(1e-4)
    assert work.is_success() and work.exception() is None
    return [late_gpu.bare(each) for each in outputs]


def results(
    group: Any, place: Place, count: int, later: bool, ended: Callable[..., list[Any]]
) -> list[tuple[str, list[Any]]]:
    found = []
    for name, work, given, outputs in calls(group, place, count, later):
        seen = ended(work, outputs)
        for each in given:  # whoever waited may write to it
            each.fill_(50)
        found.append((name, [on_host(each) for each in seen]))
    return found


@pytest.mark.parametrize("mapped", full([True, False], quick=1))
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("ended", [waited, awaited, called_back, polled])
@ranks(SIZE, "mapped")
def test_everything_gives_what_it_gives_on_the_host(
    group: Any, ended: Callable[..., list[Any]], later: bool, mapped: bool
) -> None:
    for count in (1, 70_001):
        right = results(group, torch.Tensor.clone, count, later, waited)
        found = results(group, late_gpu.on_gpu, count, later, ended)
        for (name, wanted), (_, outputs) in zip(right, found, strict=True):
            for one, other in zip(wanted, outputs, strict=True):
                assert torch.equal(one, other), (name, count, one, other)


@ranks(SIZE)
def test_several_at_once_in_their_order(group: Any) -> None:
    rank = group.rank()
    tensors = [late_gpu.on_gpu(torch.full((n,), float(rank))) for n in (3, 90_000, 1)]
    works = []
    for each in tensors:
        each.add_(1)  # behind it is the call, before it the copy
        works.append(group.allreduce([each], c10d.AllreduceOptions()))
    futures = [each.get_future() for each in works]
    for work, tensor in zip(reversed(works), reversed(tensors), strict=True):
        work.wait()
        tensor.mul_(2)
        assert (on_host(tensor) == 6).all()
    assert all((on_host(each.wait()[0]) == 6).all() for each in futures)
    assert all(a is b for a, b in zip(works[0].result(), tensors, strict=False))
    for each in tensors:
        assert late_gpu.bare(each).untyped_storage().data_ptr() in late_gpu.gpu.kept


def test_a_stream_reduces_what_peers_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what the program enqueued before, and before what it enqueues once it has waited."""

    def enqueue(_: Any, tensor: Any, reduction: Any, seconds: float) -> None:
        assert reduction.native in ("sum", "mean") and seconds > 0
        tensor.mul_(SIZE if reduction.native == "sum" else 1)  # ranks give the same

    monkeypatch.setattr(Collectives, "enqueue_all_reduce", enqueue)
    monkeypatch.setattr(CollectiveState, "place_on", lambda *_: 0)

    def program(group: Any) -> None:
        for later in (True, False):
            added = how(c10d.AllreduceOptions, later, reduceOp=ReduceOp.SUM)
            for ended in (waited, awaited, called_back, polled):
                tensors = [late_gpu.on_gpu(torch.full((n,), 3.0)) for n in (3, 90_000)]
                turned = late_gpu.on_gpu(torch.arange(6.0).reshape(2, 3)).t()
                works = [group.allreduce([each], added) for each in (*tensors, turned)]
                for work, tensor in zip(works, tensors, strict=False):
                    (found,) = ended(work, [tensor])
                    tensor.mul_(7)
                    if ended is not polled:
                        assert (on_host(found) == (6 if ended is called_back else 42)).all()
                works[-1].wait()
                assert on_host(turned).equal(2 * torch.arange(6.0).reshape(2, 3).t())
            together = how(c10d.AllreduceCoalescedOptions, later, reduceOp=ReduceOp.AVG)
            group.allreduce_coalesced(tensors, together).wait()
            assert all((on_host(each) == 42).all() for each in tensors)
            most = late_gpu.on_gpu(torch.full((3,), float(group.rank())))  # the host's, as before
            group.allreduce([most], how(c10d.AllreduceOptions, later, reduceOp=ReduceOp.MAX)).wait()
            assert (on_host(most) == SIZE - 1).all()

    run(SIZE, program)


def test_a_method_is_asked_for_copies_at_once() -> None:
    """Also where a rank takes nothing, and only what it gives tells that a GPU has it."""
    seen: list[torch.device] = []

    @takes_gpus(writes="outputs", reads="tensors")
    def method(group: Any, outputs: Any, tensors: Any, opts: Any = None) -> GroupWork:
        seen.extend(each.device for each in (*outputs, *tensors))
        return GroupWork([])

    def program(group: Any) -> None:
        given = late_gpu.on_gpu(torch.ones(2))
        method(group, [], [given])
        method(group, outputs=[given], tensors=[given])

    run(1, program)
    assert seen == [torch.device("cpu")] * 3


@ranks(SIZE)
def test_what_is_refused_is_so_at_once(group: Any) -> None:
    tensor, how_ = late_gpu.on_gpu(torch.ones(4)), options(c10d.AllgatherOptions)
    with pytest.raises(pgasdl.BufferRefusedError, match="cpu and cuda:0 in one call"):
        group.all_gather_single(torch.zeros(8), tensor, how_)
    with pytest.raises(pgasdl.BufferRefusedError, match="cpu and cuda:0 in one call"):
        group.allreduce_coalesced([torch.zeros(8), tensor])
    wide = late_gpu.on_gpu(torch.ones(1)).expand(4)
    with pytest.raises(pgasdl.BufferRefusedError, match="expanded tensor"):
        group.allreduce([wide], options(c10d.AllreduceOptions))
    with pytest.raises(ValueError, match="elements of shape"):
        group.all_gather_single(late_gpu.on_gpu(torch.zeros(7)), tensor, how_)
    with pytest.raises(pgasdl.BufferRefusedError, match="BXOR of"):
        group.allreduce([tensor], options(c10d.AllreduceOptions, reduceOp=ReduceOp.BXOR))
    with (
        late_gpu.gpu.capture(),
        pytest.raises(pgasdl.UnavailableError, match="cannot be captured into a CUDA graph"),
    ):
        group.allreduce([tensor], options(c10d.AllreduceOptions))
    group.allreduce([tensor], options(c10d.AllreduceOptions)).wait()
    assert (on_host(tensor) == SIZE).all()


NAMED = """
import sys
import torch
from torch import distributed
store = distributed.FileStore(sys.argv[2], 1)
distributed.init_process_group(sys.argv[1], store=store, rank=0, world_size=1)
world, numbers = distributed.group.WORLD, torch.ones(2)
distributed.all_reduce(numbers)
distributed.broadcast_object_list([1])
distributed.barrier()
types = [each.type for each in world._device_types]
assert types == ["cpu"] + ["cuda"] * torch.backends.cuda.is_built()
assert not world._get_backend(torch.device("cuda", 0)).supports_splitting
print(distributed.get_backend(), distributed.get_backend_config())
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["pgasdl", "cpu:pgasdl,cuda:pgasdl"])
def test_the_backend_is_that_of_both_devices(name: str, tmp_path: Path) -> None:
    """Also where there is no GPU."""
    command = [sys.executable, "-c", NAMED, name, str(tmp_path / "store")]
    told = succeeded(command, env=environment(), timeout=60)
    assert told.split() == [name, "cpu:pgasdl,cuda:pgasdl"]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    def program(group: Any) -> None:
        with FakeTensorMode(), pytest.raises(pgasdl.BufferRefusedError, match="without memory"):
            group.allreduce([torch.ones(2, device="cuda")], options(c10d.AllreduceOptions))

    run(1, program)


@ranks(SIZE)
def test_what_fails_on_the_host_fails(group: Any) -> None:
    tensor = late_gpu.on_gpu(torch.ones(4))
    work = group.recv([tensor], 1 - group.rank(), 5)
    future = work.get_future()
    group.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(RuntimeError, match="aborted"):
        future.wait()
    for later in (True, False):
        work = group.allreduce([tensor], options(c10d.AllreduceOptions, asyncOp=later))
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
    assert (on_host(tensor) == 1).all()
