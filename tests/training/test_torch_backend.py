"""The backend of torch.distributed: its process group, on ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.patience import PATIENCE, until
from tiers import full

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import pgasdl  # noqa: E402
from pgasdl import loopback  # noqa: E402
from pgasdl.torch.backend.group import ProcessGroup  # noqa: E402
from pgasdl.torch.backend.meet import SharedContext  # noqa: E402

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
OPERATORS: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
BITS = ("BAND", "BOR", "BXOR")


def run(size: int, program: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Call ``program(group)`` on every rank."""

    def rank(ctx: Any) -> Any:
        shared = SharedContext(ctx, range(size), ours=False)
        group = ProcessGroup(shared, range(size), ctx.rank, timedelta(seconds=30))
        try:
            return program(group)
        finally:
            ctx.barrier()
            group.shutdown()

    return loopback.run(size, rank, **options)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    made.asyncOp = False
    for name, value in values.items():
        setattr(made, name, value)
    return made


def reduced(op: Any) -> Any:
    return options(c10d.AllreduceOptions, reduceOp=op)


def drawn(seed: int, count: int, dtype: Any) -> Any:
    """Small whole numbers: every dtype adds and multiplies them exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def expected(op: str, parts: list[Any]) -> Any:
    total = parts[0].clone()
    for part in parts[1:]:
        total = OPERATORS[op](total, part)
    return total


# Few elements, more than one piece of a message, and an uneven number of them.
COUNTS = (1, 17, 150_001)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("size", full([3, 1, 2, 5], quick=1))
def test_every_operator_reduces_every_dtype(size: int, mapped: bool) -> None:
    def program(group: Any) -> None:
        for dtype in DTYPES:
            for op in OPERATORS:
                if op in BITS and dtype.is_floating_point:
                    continue
                for count in COUNTS if dtype in (torch.int16, torch.float32) else COUNTS[:2]:
                    parts = [drawn(7 * r + count, count, dtype) for r in range(size)]
                    mine = parts[group.rank()].clone()
                    group.allreduce([mine], reduced(getattr(ReduceOp, op))).wait()
                    assert torch.equal(mine, expected(op, parts)), (dtype, op, count)

    run(size, program, mapped=mapped)


def test_means_factors_bools_and_complex_numbers() -> None:
    def program(group: Any) -> None:
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
        with pytest.raises(ValueError, match="on meta: backend pgasdl takes host memory only"):
            group.allreduce([torch.ones(2, device="meta")], reduced(ReduceOp.SUM))

    run(3, program)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16, torch.bool])
def test_everything_reaches_whom_it_is_meant_for(dtype: Any, mapped: bool) -> None:
    size = 3

    def program(group: Any) -> None:
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

    run(size, program, mapped=mapped)


def test_reductions_of_parts() -> None:
    size = 3

    def program(group: Any) -> None:
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

    run(size, program)


def test_what_is_long_is_reduced_in_pieces() -> None:
    """Tensors of several pieces and an uneven rest, in no memory that is longer than one."""
    size, counts = 3, (900_000, 1, 2_500_001)

    def program(group: Any) -> None:
        rank, count = group.rank(), counts[-1]
        parts = [drawn(r, count, torch.int8) for r in range(size)]
        given = [
            [drawn(r + 5 * t, counts[t], torch.int8) for t in range(size)] for r in range(size)
        ]
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

    run(size, program)


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


def test_rows_of_unequal_numbers_go_to_all() -> None:
    size = 3

    def program(group: Any) -> None:
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

    run(size, program)


def test_strided_tensors_are_taken_as_what_they_show() -> None:
    def program(group: Any) -> None:
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

    run(2, program)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_are_added_up() -> None:
    def program(group: Any) -> None:
        rank = group.rank()
        mine = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (5,))
        group.allreduce([mine], reduced(ReduceOp.SUM)).wait()
        assert mine.to_dense().tolist() == [3, 2, 2, 2, 0]

    run(3, program)


def test_several_at_once_and_their_futures() -> None:
    def program(group: Any) -> None:
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

    run(2, program)


def test_callbacks_may_wait_for_other_calls() -> None:
    """As those of PyTorch's PowerSGD do; they never hold up what makes calls."""

    def program(group: Any) -> None:
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

    run(2, program)


# --- messages


@pytest.mark.parametrize("mapped", [True, False])
def test_messages_in_a_ring_and_to_oneself(mapped: bool) -> None:
    size = 3

    def program(group: Any) -> None:
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

    run(size, program, mapped=mapped)


def test_tags_choose_and_anybody_may_send() -> None:
    size = 3
    count = 400_000  # more than fits into the slots

    def program(group: Any) -> None:
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

    run(size, program)


def test_messages_pass_while_collectives_run() -> None:
    """A send that nobody receives yet holds up no collective."""

    def program(group: Any) -> None:
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

    run(2, program)


def test_an_adversary_changes_nothing() -> None:
    def program(group: Any) -> None:
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

    run(3, program, seed=5, delay=20, reorder=True, late_source=True)


# --- who has left


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


# --- what goes wrong


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


def test_sizes_that_do_not_fit_are_told() -> None:
    def program(group: Any) -> None:
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

    run(2, program)


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


def test_views_and_tensors_of_inference_mode_are_taken() -> None:
    def program(group: Any) -> None:
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

    run(2, program)


def test_every_wait_has_a_deadline() -> None:
    def program(group: Any) -> None:
        if group.rank() == 0:
            work = group.recv([torch.empty(3)], 1)
            with pytest.raises(dist.DistBackendError, match=r"Timed out .* 0 of 12 bytes"):
                work.wait(timedelta(milliseconds=50))
            how = reduced(ReduceOp.MAX)
            how.timeout = timedelta(milliseconds=50)
            with pytest.raises(dist.DistBackendError, match="Timed out"):
                group.allreduce([torch.ones(2)], how).wait()
            with pytest.raises(dist.DistBackendError, match="Timed out"):  # half done, maybe
                group.allreduce([torch.ones(2)], how).wait()

    run_unequal(program)


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_an_end_ends_what_is_under_way(how: str) -> None:
    def program(group: Any) -> None:
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

    run_unequal(program)


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


def test_members_come_in_rising_order() -> None:
    def program(ctx: Any) -> None:
        shared = SharedContext(ctx, range(2), ours=False)
        with pytest.raises(pgasdl.RankError, match="in rising order"):
            ProcessGroup(shared, [1, 0], 1 - ctx.rank, timedelta(seconds=30))

    loopback.run(2, program)
