"""ctx.pool: arrays that each rank allocates by itself, and handles that reduce them in place."""

from __future__ import annotations

import gc
import random
import threading
import time
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract_harness import can_run, contract

import pgasdl
from pgasdl.buffers import Memory, memory_of
from pgasdl.plans import PLANS, blocks

SIZES = (5, 70_001, 333, 4096)


def free_bytes(ctx: Any) -> int:
    """The bytes that ``describe`` says are free."""
    line = next(line for line in ctx.describe().splitlines() if line.startswith("pool of"))
    return int(line.split(": ")[1].split()[0])


def whole(ctx: Any) -> bool:
    """All of the pool is free, and in one block, as it is in a pool of one segment."""
    with ctx._pool._lock:
        ctx._pool._free_dropped()
        return all(arena.free == [(0, arena.nbytes)] for _, arena in ctx._pool._parts[None])


def until_whole(ctx: Any) -> None:
    """Return once all is free; another thread may be at what it collected."""
    deadline = time.monotonic() + 10
    while not whole(ctx):
        gc.collect()
        assert time.monotonic() < deadline, ctx.describe()


def operand(rank: int, n: int) -> Any:
    return np.random.default_rng([rank, n]).normal(0, 1e3, n).astype(np.float32)


def scattered(ctx: Any) -> tuple[dict[int, Any], list[Any]]:
    """An array of each size, in an order of this rank's own, and what lies between them."""
    dice = random.Random(ctx.rank)
    between, arrays = [], {}
    for n in dice.sample(SIZES, len(SIZES)):
        between.append(ctx.empty(dice.randrange(1, 500), np.int8))
        arrays[n] = ctx.empty(n)
    return arrays, between


@contract(ranks=(2, 3))
def test_handles_work_in_place_wherever_arrays_lie(ctx: Any) -> None:
    """At other offsets and in other segments on each rank: the bits of an array that is copied."""
    for _ in range(2):
        ctx.pool(4 * 80_000)  # each holds one of the long arrays
    arrays, between = scattered(ctx)
    if ctx.rank == 0:
        first, arrays[70_001] = arrays[70_001], ctx.empty(70_001)
        del first
    places = {n: ctx.segments.at(memory_of(a)) for n, a in arrays.items()}
    told = ctx.world.allgather("places", repr([places[n] for n in SIZES]).encode())
    assert len(set(told)) == ctx.size
    for n in SIZES:
        array = arrays[n]
        for plan in (None, "gdraa", "tree", *(["gdraa-direct"] if ctx.mapped else [])):
            inside = ctx.segment(4 * n).numpy(np.float32)
            usual = ctx.allreduce_handle(inside, plan=plan)
            with ctx.allreduce_handle(array, plan=plan) as handle:
                assert (handle.plan, handle.inbox_bytes) == (usual.plan, usual.inbox_bytes)
                for turn in range(3):
                    array[:] = inside[:] = operand(ctx.rank, n) + turn
                    handle()
                    usual()
                    assert array.tobytes() == inside.tobytes()
            copied = operand(ctx.rank, n) + 2
            ctx.allreduce_handle(copied, plan=None if plan == "gdraa-direct" else plan)()
            if plan is not None or not ctx.mapped:
                assert array.tobytes() == copied.tobytes(), (n, plan)
    assert all(piece.size for piece in between)


@contract(ranks=(2, 3))
def test_bits_of_the_staged_way(ctx: Any) -> None:
    ctx.pool(1 << 20)
    arrays, _between = scattered(ctx)
    for n in SIZES:
        array = arrays[n]
        staged = operand(ctx.rank, n)
        array[:] = staged
        ctx.allreduce_handle(array)()
        ctx.allreduce(staged)
        if ctx.mapped:  # both add in the order of the ranks
            assert array.tobytes() == staged.tobytes()
        assert len(set(ctx.world.allgather("bits", array.tobytes()[:64]))) == 1


@contract(ranks=3)
@pytest.mark.parametrize(
    "kind", ["sum", "average", "broadcast", "reduce-scatter", "all-gather", "all-to-all"]
)
def test_every_kind_of_handle(ctx: Any, kind: str) -> None:
    """With every plan, as for an array that is copied."""
    ctx.pool(1 << 20)
    ctx.pool(1 << 20)
    n = 999
    between = ctx.empty((1 + ctx.rank) * 1000 if ctx.rank != 1 else (1 << 20) // 4)
    array = ctx.empty(n)
    for plan, spec in PLANS.items():
        if kind not in spec.kinds or not can_run(ctx, spec):
            continue
        results = []
        for mine in (array, np.empty(n, np.float32)):
            if plan == "gdraa-direct" and mine is not array:
                continue
            mine[:] = operand(ctx.rank, n)
            with ctx.collective_handle(kind, mine, plan=plan) as handle:
                handle()
            results.append(mine.tobytes())
        block = blocks(n, ctx.size)[ctx.rank]
        if kind == "reduce-scatter":
            begin, size = block
            results = [result[4 * begin : 4 * (begin + size)] for result in results]
        assert len(set(results)) == 1, plan
    assert between.size


@contract(ranks=2)
def test_user_segments_at_different_offsets(ctx: Any) -> None:
    """In place too; in a segment that a rank does not know it lies outside, for all ranks."""
    first, second = ctx.segment(1 << 16), ctx.segment(1 << 16)
    mine = [first, second][ctx.rank]
    array = mine.numpy(np.float32, 256 * (1 + ctx.rank), 1000)
    array[:] = ctx.rank + 1
    handle = ctx.allreduce_handle(array)
    usual = ctx.allreduce_handle(first.numpy(np.float32, 0, 1000))
    assert (handle.plan, handle.inbox_bytes) == (usual.plan, usual.inbox_bytes)
    handle()
    assert (array == 3).all()
    other = [second, first][ctx.rank]
    other.delete()
    outside = ctx.allreduce_handle(array)
    usual = ctx.allreduce_handle(np.ones(1000, np.float32))
    assert (outside.plan, outside.inbox_bytes) == (usual.plan, usual.inbox_bytes)
    outside()
    assert (array == 6).all()
    if ctx.mapped:
        with pytest.raises(pgasdl.PlanError, match="gdraa-direct"):
            ctx.allreduce_handle(array, plan="gdraa-direct")


@contract(ranks=3)
def test_in_a_group(ctx: Any) -> None:
    """The pool is of all ranks, the handle of some."""
    ctx.pool(1 << 16)
    between = ctx.empty(100 * ctx.rank + 1)
    if ctx.rank != 1:
        group = ctx.group([0, 2])
        array = ctx.empty(500)
        array[:] = ctx.rank + 1
        ctx.allreduce_handle(array, group=group)()
        assert (array == 4).all()
        ctx.allreduce(array, group=group)
        assert (array == 8).all()
    assert between.size


@contract(ranks=3)
def test_a_pool_of_a_group(ctx: Any) -> None:
    """Others neither have it nor look there; all arrays are reduced, wherever they lie."""
    first = ctx.group([0, 1]) if ctx.rank < 2 else None
    if first is not None:
        with pytest.raises(pgasdl.PoolFullError, match="no pool"):
            ctx.empty(8, group=first)
        ctx.pool(1 << 16, group=first)
        with pytest.raises(pgasdl.PoolFullError, match="no pool"):
            ctx.empty(8)  # that of all ranks
    ctx.pool(1 << 16)
    ours = ctx.empty(4096, group=first)
    alls = ctx.empty(4096)
    for _ in range(3):
        for group, array in ((ctx.world, ours), (ctx.world, alls), (first, ours), (first, alls)):
            if group is not None:
                array[:] = operand(ctx.rank, 4096)
                ctx.allreduce(array, group=group)
                due = sum(operand(rank, 4096) for rank in group.ranks)
                assert np.allclose(array, due, rtol=1e-5)
    if first is not None:
        ours[:] = 7
        first.delete()
        assert (ours == 7).all()  # its memory stays
    ctx.barrier()


@contract(ranks=(2, 3))
def test_allreduce_of_what_lies_anywhere(ctx: Any) -> None:
    """Arrays of the pool at different places; small ones beside a plain array of another rank."""
    ctx.pool(1 << 20)
    arrays, _between = scattered(ctx)
    total = sum(range(1, ctx.size + 1))
    for n in SIZES:
        array = arrays[n]
        plain = np.empty(n, np.float32)
        mixed = array if ctx.rank == 0 else plain
        for mine in (array, mixed if n < 1024 else array, array):
            mine[:] = ctx.rank + 1
            assert (ctx.allreduce(mine) == total).all()
        mixed[:] = ctx.rank + 1
        ctx.allreduce_handle(mixed)()
        assert (mixed == total).all()
    if ctx.mapped:
        small = arrays[SIZES[0]]
        small[:] = 1
        assert (ctx.allreduce(small, plan="gdraa-direct") == ctx.size).all()


@contract(ranks=(2, 3))
def test_allreduce_finds_arrays_that_move(ctx: Any) -> None:
    """Each call may come with another array, in another segment; ranks in orders of their own."""
    dice = random.Random(ctx.rank)
    for turn in range(4):
        ctx.pool(1 << 17)  # what was known before goes on
        arrays = [ctx.empty(3000) for _ in range(5)]
        dice.shuffle(arrays)
        for array in [*arrays, *arrays]:
            array[:] = inside = operand(ctx.rank, 3000) + turn
            plain = inside.copy()
            assert ctx.allreduce(array, op="mean") is array
            ctx.allreduce(plain, op="mean")
            assert array.tobytes() == plain.tobytes()
        view = arrays[0][1 + dice.randrange(900) :][:2000]  # of no whole lines
        view[:] = operand(ctx.rank, 2000)
        plain = view.copy()
        assert ctx.allreduce(view).tobytes() == ctx.allreduce(plain).tobytes()
        del array, view
    assert ("gdraa-direct" in ctx.describe().split("allreduce in")[1]) == ctx.mapped


@contract(ranks=(2, 3))
def test_allreduce_after_a_pool_that_was_full_for_some(ctx: Any) -> None:
    """A plain array in place of one of the pool, of any size, known before or not."""
    ctx.pool(1 << 16)
    total = sum(range(1, ctx.size + 1))
    for n in (100, 2000, 1 << 14):
        plain = np.empty(n, np.float32)
        pooled = ctx.empty(n)
        for turn, mine in enumerate(
            [pooled, plain if ctx.rank == 0 else pooled, pooled, plain] * 2
        ):
            mine[:] = (ctx.rank + 1) * (turn + 1)
            assert (ctx.allreduce(mine) == total * (turn + 1)).all()
        del pooled, mine
        gc.collect()
    if ctx.mapped:
        ctx.pool(1 << 16)
        array = np.empty(2000, np.float32) if ctx.rank == 0 else ctx.empty(2000)
        array[:] = 1
        flag = ctx.segment(0)
        if ctx.rank == 0:  # a call that is continued
            with pytest.raises(pgasdl.PgasTimeoutError):
                ctx.allreduce(array, timeout=0)
            ctx.notify(1, flag, 0)
        if ctx.rank == 1:
            ctx.notify_waitsome(flag)
        assert (ctx.allreduce(array) == ctx.size).all()


@contract(ranks=2, meet=False)
def test_an_array_whose_allreduce_fails_is_kept(ctx: Any) -> None:
    """The peer may still write there."""
    if not ctx.mapped:
        return
    ctx.pool(1 << 17)
    ctx.allreduce(ctx.zeros(4096))
    array = ctx.zeros(4096 + ctx.rank)
    where = array.ctypes.data
    with pytest.raises((pgasdl.MismatchError, pgasdl.PeerLostError)) as told:
        ctx.allreduce(array)
    if ctx.rank == 0 and told.type is pgasdl.MismatchError:
        del array, told  # and the frames that it holds
        gc.collect()
        assert ctx.empty(4096).ctypes.data != where


@contract(ranks=2)
def test_an_array_whose_allreduce_did_not_end_is_kept(ctx: Any) -> None:
    """Its peer may still write there, until the same call has ended it."""
    ctx.pool(1 << 17)
    flag = ctx.segment(0)
    ctx.allreduce(ctx.zeros(4096))  # makes what the first call makes
    for _ in range(2):
        array = ctx.zeros(4096)
        array += 1
        where = array.ctypes.data
        if ctx.rank == 0:
            with pytest.raises(pgasdl.PgasTimeoutError):
                ctx.allreduce(array, timeout=0)
            del array
            gc.collect()
            assert ctx.empty(4096).ctypes.data != where
            ctx.notify(1, flag, 0)
            array = Memory(where, 1 << 14, np.dtype("f4"), (4096,), None).on_host().view("f4")
            ctx.allreduce(array)
        else:
            ctx.notify_waitsome(flag)
            ctx.notify_reset(flag, 0)
            ctx.allreduce(array)
        assert (array == 2).all()
        ctx.barrier()
    del array
    until_whole(ctx)


@contract(ranks=2)
def test_memory_comes_back(ctx: Any) -> None:
    """When an array and all its views are gone; used again at the same place."""
    ctx.pool(1 << 16)
    assert free_bytes(ctx) == 1 << 16
    array = ctx.zeros((10, 10), np.float64)
    assert array.shape == (10, 10) and array.dtype == np.float64 and not array.any()
    assert array.flags.writeable and array.flags.c_contiguous
    where = array.ctypes.data
    assert where % 64 == 0
    assert free_bytes(ctx) == (1 << 16) - 832
    view = array[3].view(np.int64)[2:]
    del array
    gc.collect()
    assert free_bytes(ctx) == (1 << 16) - 832
    another = ctx.empty(100, np.float64)
    assert another.ctypes.data != where
    view[:] = 7
    raw = memoryview(view)
    del view
    assert free_bytes(ctx) == (1 << 16) - 2 * 832
    assert raw[0] == 7
    del raw
    assert ctx.empty(1).ctypes.data == where
    del another
    for turn in range(10_000):
        array = ctx.empty(1 + turn % 3000)
    del array
    assert whole(ctx)


@contract(ranks=2)
def test_full(ctx: Any) -> None:
    """The error has the numbers; the pool grows by a collective call, and arrays stay."""
    for call in (lambda: ctx.empty(1), lambda: ctx.zeros(1), lambda: ctx.empty_like(np.ones(3))):
        with pytest.raises(pgasdl.PoolFullError, match=r"no pool: call ctx\.pool"):
            call()
    assert "no pool" in ctx.describe()
    ctx.pool(4096)
    blocks = [ctx.empty(1024, np.uint8) for _ in range(4)]
    blocks[0][:] = 5
    del blocks[1]
    del blocks[2]
    words = (
        r"1025 bytes do not fit into the pool of 4096 bytes in 1 segments: 2048 are free, the "
        r"largest block has 1024: .* ctx.pool\(1088\) on every rank"
    )
    with pytest.raises(pgasdl.PoolFullError, match=words) as caught:
        ctx.empty(1025, np.uint8)
    assert isinstance(caught.value, MemoryError)
    ctx.pool(2000)
    assert ctx.empty(2000, np.uint8).size == 2000
    assert "pool of 6144 bytes in 2 segments" in ctx.describe()
    assert (blocks[0] == 5).all()
    ctx.pool(1000 * ctx.rank)  # ranks may differ
    ctx.barrier()


@contract(ranks=2)
def test_what_is_refused(ctx: Any) -> None:
    """Before anything has started: the next collective of all ranks is right."""
    ctx.pool(4096)
    if ctx.rank == 0:
        for size in (-1, "x", None, 1.5):
            with pytest.raises((pgasdl.SegmentError, TypeError)):
                ctx.pool(size)
        with pytest.raises(ValueError, match="timeout"):
            ctx.pool(64, timeout=-1)
        for shape in (-1, (2, -3), "x", None, 1.5, (1.5,)):
            with pytest.raises((pgasdl.BufferRefusedError, TypeError)):
                ctx.empty(shape)
        for device in ("gpu", 0, None, "cuda:9999"):  # no such GPU, on any machine
            for call in (partial(ctx.pool, 64), partial(ctx.empty, 3), partial(ctx.zeros, 3)):
                with pytest.raises((pgasdl.ConfigError, pgasdl.UnavailableError)):
                    call(device=device)
        for dtype in (object, np.dtype([("a", object)]), "S0", "no such"):
            with pytest.raises((pgasdl.BufferRefusedError, TypeError)):
                ctx.empty(3, dtype)
    assert whole(ctx)
    array = ctx.zeros(3)
    ctx.allreduce_handle(array)()
    assert not array.any()


@contract(ranks=2)
def test_shapes_and_dtypes(ctx: Any) -> None:
    ctx.pool(1 << 16)
    for shape in (0, 7, (), (3, 0), (2, 3, 4), [5, 2], np.int64(3)):
        for dtype in (np.float32, "bfloat16", "f2", bool, np.complex128, "S3", [("a", "u1")]):
            array = ctx.empty(shape, dtype)
            wanted = np.empty(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
            like = ctx.empty_like(array)
            assert (like.shape, like.dtype) == (wanted.shape, wanted.dtype)
    assert ctx.empty(3).dtype == np.float32
    assert ctx.empty_like(np.ones((4, 6), np.int32).T).flags.c_contiguous
    assert not ctx.zeros((4, 5), np.int64).any()
    del array, like
    assert whole(ctx)


@contract(ranks=2)
def test_tensors(ctx: Any) -> None:
    torch = pytest.importorskip("torch")
    ctx.pool(1 << 16)
    between = ctx.empty(100 * ctx.rank + 1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        for shape in ((), 0, (3, 0), (5, 7)):
            tensor = ctx.empty(shape, dtype)
            assert isinstance(tensor, torch.Tensor) and tensor.dtype == dtype
            assert tensor.shape == torch.empty(shape).shape
            like = ctx.empty_like(tensor)
            assert (like.shape, like.dtype) == (tensor.shape, tensor.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = ctx.zeros((5, 7), dtype)
        assert tensor.data_ptr() % 64 == 0 and not tensor.any()
        parameter = torch.nn.Parameter(tensor)
        parameter.data += ctx.rank + 1
        handle = ctx.allreduce_handle(tensor, "sum")
        handle()
        assert (parameter == 3).all()
        ctx.allreduce(tensor)
        assert (parameter == 6).all()
        part = parameter.data[2:]
        del tensor, parameter, handle
        again = ctx.zeros((5, 7), dtype)
        assert (part == 6).all() and not again.any()
    del part, again, like, between
    assert whole(ctx)


@contract(ranks=2)
def test_threads_that_free_while_others_allocate(ctx: Any) -> None:
    """No block is given to two arrays; nothing blocks; at the end all is free."""
    ctx.pool(1 << 20)
    faults: list[str] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        held: list[Any] = []
        for _ in range(400):
            array = ctx.empty(dice.randrange(1, 4000), np.uint8)
            array[:] = number
            cycle: list[Any] = [array]
            cycle.append(cycle)  # freed by the garbage collector, in any thread
            held.append(cycle)
            if len(held) > 20:
                old = held.pop(dice.randrange(len(held)))[0]
                if (old != number).any():
                    faults.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    until_whole(ctx)


@contract(ranks=2)
def test_a_collection_within_an_allocation(ctx: Any) -> None:
    """It frees blocks of the pool while the pool is at work."""
    ctx.pool(1 << 16)
    if ctx.rank > 0:  # ranks may share one collector
        return
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            cycle: list[Any] = [ctx.empty(60, np.uint8)]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*before)
    del cycle
    until_whole(ctx)


@contract(ranks=2)
def test_ranks_that_disagree(ctx: Any) -> None:
    ctx.pool(1 << 16)
    array = ctx.zeros(10 + ctx.rank)
    with pytest.raises(pgasdl.MismatchError):
        ctx.allreduce_handle(array)
    right = ctx.zeros(10)
    ctx.allreduce_handle(right)()


@contract(ranks=2, meet=False)
def test_an_allreduce_of_different_shapes(ctx: Any) -> None:
    ctx.pool(1 << 16)
    ctx.allreduce(ctx.zeros(7))
    with pytest.raises((pgasdl.MismatchError, pgasdl.PeerLostError)):
        ctx.allreduce(ctx.zeros(10 + ctx.rank))
        ctx.allreduce(ctx.zeros(9))


@contract(ranks=2)
def test_the_making_of_a_pool_is_continued(ctx: Any) -> None:
    flag = ctx.segment(0)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.pool(4096, timeout=0)
        with pytest.raises(pgasdl.PoolFullError):
            ctx.empty(1)
        ctx.notify(1, flag, 0)
    else:
        ctx.notify_waitsome(flag)
    ctx.pool(4096)
    assert free_bytes(ctx) == 4096


@contract(ranks=2)
@pytest.mark.parametrize("closed", [False, True])
def test_a_handle_given_up_under_way_keeps_its_memory(ctx: Any, closed: bool) -> None:
    """Others may still write there: no other array gets it."""
    ctx.pool(1 << 16)
    flag = ctx.segment(0)
    array = ctx.zeros(1000)
    where = array.ctypes.data
    handle = ctx.allreduce_handle(array)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            handle(timeout=0)
        if closed:
            handle.close()
        del array, handle
        gc.collect()
        assert ctx.empty(1000).ctypes.data != where
        ctx.notify(1, flag, 0)
    else:
        ctx.notify_waitsome(flag)
        del array
        handle.close()
        del handle
        gc.collect()
        assert ctx.empty(1000).ctypes.data == where
    ctx.barrier()


@contract(ranks=2, meet=False)
def test_arrays_outlive_the_context(ctx: Any) -> None:
    ctx.pool(1 << 16)
    array = ctx.zeros(1000)
    array[:] = ctx.rank
    ctx.barrier()
    ctx.close()
    gc.collect()
    array += 1
    assert (array == ctx.rank + 1).all()
    for call in (lambda: ctx.empty(1), lambda: ctx.empty_like(array), lambda: ctx.pool(64)):
        with pytest.raises(pgasdl.ClosedError):
            call()
