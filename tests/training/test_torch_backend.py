"""Collectives of the backend of torch.distributed, on ranks that are threads."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from backend_tools import BITS, DTYPES, OPERATORS, drawn, expected, options, ranks, reduced
from tiers import full

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from pgasdl.errors import UnavailableError  # noqa: E402
from pgasdl.torch.backend.group import ProcessGroup  # noqa: E402
from pgasdl.torch.backend.refused import REFUSED  # noqa: E402

# Few elements, more than one piece of a message, and an uneven number of them.
COUNTS = (1, 17, 150_001)


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_pytorch_finds_it_by_entry_points(group: str) -> None:
    """At import, and, from 2.14 on, by name; a second registration changes nothing."""
    (entry,) = (each for each in entry_points(group=group) if each.name == "pgasdl")
    for _ in range(2):
        entry.load()()
    assert dist.Backend.PGASDL == "pgasdl"  # type: ignore[attr-defined]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("size", full([3, 1, 2, 5], quick=1))
@ranks(None, "mapped")
def test_every_operator_reduces_every_dtype(group: Any, size: int, mapped: bool) -> None:
    for dtype in DTYPES:
        for op in OPERATORS:
            if op in BITS and dtype.is_floating_point:
                continue
            for count in COUNTS if dtype in (torch.int16, torch.float32) else COUNTS[:2]:
                parts = [drawn(7 * r + count, count, dtype) for r in range(size)]
                mine = parts[group.rank()].clone()
                group.allreduce([mine], reduced(getattr(ReduceOp, op))).wait()
                assert torch.equal(mine, expected(op, parts)), (dtype, op, count)


@ranks(3)
def test_means_factors_bools_and_complex_numbers(group: Any) -> None:
    rank = group.rank()
    mean = torch.full((3,), float(rank))
    group.allreduce([mean], reduced(ReduceOp.AVG)).wait()
    assert mean.tolist() == [1.0] * 3
    half = torch.full((3,), float(rank), dtype=torch.float64)
    group.allreduce([half], reduced(dist._make_nccl_premul_sum(0.5))).wait()
    assert half.tolist() == [1.5] * 3
    for op, what in ((ReduceOp.SUM, [True, True, False]), (ReduceOp.PRODUCT, [False] * 3)):
        bits = torch.tensor([rank == 1, True, False])
        bits[1] = bits[1] and op == ReduceOp.SUM
        group.allreduce([bits], reduced(op)).wait()
        assert bits.tolist() == what
    numbers = torch.tensor([1 + 2j, rank * 1j])
    group.allreduce([numbers], reduced(ReduceOp.SUM)).wait()
    assert numbers.tolist() == [3 + 6j, 3j]
    for op, dtype in ((ReduceOp.BAND, torch.float32), (ReduceOp.AVG, torch.int32)):
        with pytest.raises(ValueError, match=f"of {dtype} is not defined"):
            group.allreduce([torch.ones(2, dtype=dtype)], reduced(op))
    with pytest.raises(ValueError, match="no order"):
        group.allreduce([numbers], reduced(ReduceOp.MAX))
    with pytest.raises(ValueError, match="on meta: backend pgasdl takes those of the host"):
        group.allreduce([torch.ones(2, device="meta")], reduced(ReduceOp.SUM))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16, torch.bool])
@ranks(3, "mapped")
def test_everything_reaches_whom_it_is_meant_for(group: Any, dtype: Any, mapped: bool) -> None:
    size = 3
    rank = group.rank()

    def part(source: int, target: int, count: int) -> Any:
        return drawn(10 * source + target, count, dtype)

    for count in (0, 1, 17, 150_001):
        mine = part(rank, 0, count)
        root = count % size
        sent = mine.clone()
        group.broadcast([sent], options(c10d.BroadcastOptions, rootRank=root)).wait()
        assert torch.equal(sent, part(root, 0, count))

        parts = [torch.empty_like(mine) for _ in range(size)]
        group.allgather([parts], [mine], options(c10d.AllgatherOptions)).wait()
        assert all(torch.equal(each, part(r, 0, count)) for r, each in enumerate(parts))

        whole = torch.empty(size * count, dtype=dtype)
        group.all_gather_single(whole, mine, options(c10d.AllgatherOptions)).wait()
        assert torch.equal(whole, torch.cat(parts))

        parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else []
        how = options(c10d.GatherOptions, rootRank=root)
        group.gather([parts] if parts else [], [mine], how).wait()
        assert all(torch.equal(each, part(r, 0, count)) for r, each in enumerate(parts))

        given = [[part(root, r, count) for r in range(size)]] if rank == root else []
        got = torch.empty_like(mine)
        group.scatter([got], given, options(c10d.ScatterOptions, rootRank=root)).wait()
        assert torch.equal(got, part(root, rank, count))

        parts = [torch.empty_like(mine) for _ in range(size)]
        given = [part(rank, r, count) for r in range(size)]
        group.alltoall(parts, given, options(c10d.AllToAllOptions)).wait()
        assert all(torch.equal(each, part(r, rank, count)) for r, each in enumerate(parts))
    group.barrier(options(c10d.BarrierOptions)).wait()


@ranks(3)
def test_reductions_of_parts(group: Any) -> None:
    size = 3
    rank = group.rank()
    for dtype in (torch.float32, torch.int16):
        for op in ("SUM", "MAX"):
            parts = [[drawn(r + 5 * t, 1000, dtype) for t in range(size)] for r in range(size)]
            how = options(c10d.ReduceScatterOptions, reduceOp=getattr(ReduceOp, op))
            right = expected(op, [each[rank] for each in parts])
            out = torch.empty(1000, dtype=dtype)
            group.reduce_scatter([out], [parts[rank]], how).wait()
            assert torch.equal(out, right)
            group.reduce_scatter_single(out.zero_(), torch.cat(parts[rank]), how).wait()
            assert torch.equal(out, right)
            mine = parts[rank][0].clone()
            how = options(c10d.ReduceOptions, reduceOp=getattr(ReduceOp, op), rootRank=1)
            group.reduce([mine], how).wait()
            others = parts[rank][0]  # keep what they had
            right = expected(op, [each[0] for each in parts]) if rank == 1 else others
            assert torch.equal(mine, right)


@ranks(3)
def test_what_is_long_is_reduced_in_pieces(group: Any) -> None:
    """Tensors of several pieces and an uneven rest, in no memory that is longer than one."""
    size, counts = 3, (900_000, 1, 2_500_001)
    rank, count = group.rank(), counts[-1]
    parts = [drawn(r, count, torch.int8) for r in range(size)]
    given = [[drawn(r + 5 * t, counts[t], torch.int8) for t in range(size)] for r in range(size)]
    mine, at_root = parts[rank].clone(), parts[rank].clone()
    out = torch.empty(counts[rank], dtype=torch.int8)
    half = torch.full((count,), 2.0 * rank)
    with Allocations() as made:
        group.allreduce([mine], reduced(ReduceOp.SUM)).wait()
        how = options(c10d.ReduceOptions, reduceOp=ReduceOp.MAX, rootRank=1)
        group.reduce([at_root], how).wait()
        how = options(c10d.ReduceScatterOptions, reduceOp=ReduceOp.SUM)
        group.reduce_scatter([out], [given[rank]], how).wait()
        group.allreduce([half], reduced(dist._make_nccl_premul_sum(0.5))).wait()
    assert made.longest < 3 << 19
    assert torch.equal(mine, expected("SUM", parts))
    assert torch.equal(at_root, expected("MAX", parts) if rank == 1 else parts[rank])
    assert torch.equal(out, expected("SUM", [each[rank] for each in given]))
    assert (half == 3).all()


class Allocations(TorchDispatchMode):
    """The longest memory that PyTorch makes in this thread."""

    longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        known = {each.untyped_storage().data_ptr() for each in given}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known:
                self.longest = max(self.longest, each.untyped_storage().nbytes())
        return out


@ranks(3)
def test_rows_of_unequal_numbers_go_to_all(group: Any) -> None:
    size = 3
    rank = group.rank()
    outgoing = [r + 1 for r in range(size)]
    incoming = [rank + 1] * size
    rows = torch.arange(sum(outgoing) * 2.0).reshape(-1, 2) + 100 * rank
    out = torch.empty(sum(incoming), 2)
    how = options(c10d.AllToAllOptions)
    group.all_to_all_single(out, rows, incoming, outgoing, how).wait()
    first = sum(outgoing[:rank])
    right = [
        (torch.arange(sum(outgoing) * 2.0).reshape(-1, 2) + 100 * r)[first : first + rank + 1]
        for r in range(size)
    ]
    assert torch.equal(out, torch.cat(right))
    with pytest.raises(ValueError, match="4 rows cannot be split equally between 3 ranks"):
        group.all_to_all_single(torch.empty(4), torch.empty(4), [], [], how)
    with pytest.raises(ValueError, match="one for each of 3 ranks, 4 in all"):
        group.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1, 1], [2, 1, 1], how)


@ranks(2)
def test_strided_tensors_are_taken_as_what_they_show(group: Any) -> None:
    rank = group.rank()
    table = torch.zeros(4, 6)
    column = table[:, 1]
    column.fill_(rank + 1)
    group.allreduce([column], reduced(ReduceOp.SUM)).wait()
    assert table.sum() == 4 * 3 and (table[:, 1] == 3).all()
    turned = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
    group.broadcast([turned], options(c10d.BroadcastOptions, rootRank=1)).wait()
    assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).t() * 2)
    parts = [torch.zeros(2, 2).t() for _ in range(2)]
    mine = torch.tensor([[1.0, 2], [3, 4]]).t() + rank
    group.allgather([parts], [mine], options(c10d.AllgatherOptions)).wait()
    assert torch.equal(parts[1], torch.tensor([[1.0, 3], [2, 4]]) + 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@ranks(3)
def test_sparse_tensors_are_added_up(group: Any) -> None:
    rank = group.rank()
    mine = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (5,))
    group.allreduce([mine], reduced(ReduceOp.SUM)).wait()
    assert mine.to_dense().tolist() == [3, 2, 2, 2, 0]


@ranks(2)
def test_several_at_once_and_their_futures(group: Any) -> None:
    how = c10d.AllreduceOptions()
    assert how.asyncOp
    tensors = [torch.full((n,), float(group.rank() + n)) for n in (1, 5, 200_000, 3)]
    works = [group.allreduce([each], how) for each in tensors]
    futures = [work.get_future().then(lambda f: f.value()[0] * 2) for work in works]
    for n, future, work in zip((1, 5, 200_000, 3), futures, works, strict=True):
        assert (future.wait() == 2 * (2 * n + 1)).all()
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert work.result()[0].shape == (n,)
    group._start_coalescing(torch.device("cpu"))
    for each in tensors[:2]:
        group.allreduce([each], reduced(ReduceOp.SUM))
    group.allgather([[torch.empty(1)] * 2], [torch.ones(1)], options(c10d.AllgatherOptions))
    together = group._end_coalescing(torch.device("cpu"))
    assert together.wait() and together.is_success() and together.exception() is None
    assert tensors[0].item() == together.get_future().wait()[0].item() == 6


@ranks(2)
def test_callbacks_may_wait_for_other_calls(group: Any) -> None:
    """As those of PyTorch's PowerSGD do; they never hold up what makes calls."""
    rank = group.rank()

    def total(number: float) -> Any:
        work = group.allreduce([torch.tensor([number])], c10d.AllreduceOptions())
        return work.get_future().then(lambda done: done.value()[0].item())

    def wait_for_two(done: Any) -> float:
        first = total(done.value())
        return first.then(lambda one: total(one.value() + 1).wait()).wait()

    def message(done: Any) -> float:
        got = torch.zeros(1)
        work = group.recv([got], 1 - rank, 7)
        group.send([done.value()[0] + 1], 1 - rank, 7).wait()
        work.wait()
        return got.item()

    assert total(1.0).then(wait_for_two).wait() == 10
    received = group.recv([torch.zeros(1)], 1 - rank).get_future().then(message)
    failed = group.recv([torch.zeros(1)], 1 - rank).get_future().then(lambda done: 1 / 0)
    group.barrier(options(c10d.BarrierOptions)).wait()  # no callback runs here, in this thread
    for _ in range(2):
        group.send([torch.ones(1)], 1 - rank).wait()
    assert received.wait() == 2
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failed.wait()
    assert total(1.0).wait() == 2


@ranks(3)
def test_one_rank_gets_all_tensors_one_behind_the_other(group: Any) -> None:
    rank = group.rank()
    mine = torch.full((2, 3), float(rank))
    opts = options(c10d.GatherOptions, rootRank=1)
    whole = torch.zeros(6, 6)[:, ::2] if rank == 1 else None
    group.gather_single(whole, mine, opts).wait()
    if whole is not None:
        assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        with pytest.raises(ValueError, match=r"output of shape \[4, 3\]: give 3 times n rows"):
            group.gather_single(torch.zeros(4, 3), mine, opts)
    assert group._get_sequence_number_for_group() == 1


# What PyTorch's class has beside its calls: names, what it keeps itself, and what asks no backend.
HARMLESS = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_backend_id",
    "_enable_collectives_timing", "_get_backend_name", "_has_hooks", "_id", "_register_backend",
    "_pybind11_conduit_v1_", "_set_default_backend", "_set_group_desc", "_set_group_name",
    "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name", "unbox",
    "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


# What PyTorch's class has beside its calls: names, what it keeps itself, and what asks no backend.
HARMLESS = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_backend_id",
    "_enable_collectives_timing", "_get_backend_name", "_has_hooks", "_id", "_register_backend",
    "_pybind11_conduit_v1_", "_set_default_backend", "_set_group_desc", "_set_group_name",
    "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name", "unbox",
    "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


def test_what_the_class_of_pytorch_has_is_there_or_refused() -> None:
    theirs, own = c10d.ProcessGroup, set()
    for kind in ProcessGroup.__mro__[: ProcessGroup.__mro__.index(theirs)]:
        own |= set(vars(kind))
    left = {name for name in dir(theirs) if not name.startswith("__")} - own - HARMLESS
    assert not left, "a new PyTorch: write them, or refuse them by name (refused.py)"


@ranks(1)
def test_what_is_not_there_is_refused_by_name(group: Any) -> None:
    for name in REFUSED:
        with pytest.raises(UnavailableError, match=f'backend "pgasdl" has no {name}: '):
            getattr(group, name)(1)
