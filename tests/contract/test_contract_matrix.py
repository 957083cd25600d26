"""Matrices on ranks: what NumPy has, whatever the layouts, on every transport."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl
import pgasdl.matrix as pm
from pgasdl.buffers import DTYPES, memory_of
from pgasdl.checkpoint import Checkpoints
from pgasdl.errors import BufferRefusedError, LayoutError, MismatchError, PlanError

FLOATS = ("float32", "float64")


def drawn(dice: random.Random, shape: tuple[int, ...], size: int) -> pm.Layout:
    """Some layout, the same on all ranks, on some of them."""
    whole = (*shape, 1)[:2]
    ranks = dice.sample(range(size), dice.randint(1, size))
    if dice.random() < 0.25:
        return pm.cyclic(whole, ranks, (dice.randint(1, 3), dice.randint(1, 3)))
    return dice.choice((pm.rows, pm.columns, pm.grid, pm.replicated))(whole, ranks)


def same(found: Any, due: Any) -> None:
    found, due = np.asarray(found), np.asarray(due)
    assert (found.shape, found.dtype) == (due.shape, due.dtype)
    assert np.array_equal(found, due, equal_nan=due.dtype.kind == "f")


def near(found: Any, due: Any) -> None:
    found, due = np.asarray(found), np.asarray(due)
    assert (found.shape, found.dtype) == (due.shape, due.dtype)
    assert np.allclose(found, due, rtol=1e-4, atol=1e-4)


@contract()
def test_ranks_name_a_layout_differently(ctx: Any) -> None:
    """As caches of processes with different pasts do: where the blocks lie is what counts."""

    def named(layout: pm.Layout) -> pm.Layout:
        return pm.Layout(layout.shape, layout.blocks, f"of {ctx.rank}")

    A = np.arange(30, dtype=np.float32).reshape(6, 5)
    rows, columns = (named(make((6, 5), range(2))) for make in (pm.rows, pm.columns))
    assert pm.rows((np.int64(6), 5), range(2)) == pm.rows((6, 5), range(2))
    a = pm.array(ctx, A, rows)
    same(a.remap(columns), A)
    for layout in (rows, columns):
        product = pm.matmul(a.remap(layout), a.T, layout=named(pm.rows((6, 6), range(2))))
        same(product, A @ A.T)


@contract(ranks=(1, 2, 3))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_numpy_has_the_same(ctx: Any, dtype: str) -> None:
    """Elementwise, in place, transposed, extremes, indices: the same bits for any layouts."""
    dice = random.Random(dtype)
    for shape in ((6, 5), (1, 1), (7, 1), (0, 3), (2, 0), (5, 9)):
        values = np.random.default_rng(dice.randint(0, 99))
        A, B, v = (
            (9 * values.standard_normal(s)).astype(DTYPES[dtype]) for s in (shape, shape, shape[1:])
        )
        a, b, w = (pm.array(ctx, x, drawn(dice, x.shape, ctx.size)) for x in (A, B, v))
        same(a, A)
        same(a.remap(drawn(dice, shape, ctx.size)), A)
        same(a + b, A + B)
        same(2 * a - w, 2 * A - v)
        same(w + a, v + A)
        same(np.maximum(a, v), np.maximum(A, v))
        same(a > b, A > B)
        same(a.T, A.T)
        same(a.T.T + b, A + B)
        c, C = a.copy(), A.copy()
        c += b
        C += B
        same(c, C)
        rows, columns = (sorted(dice.choices(range(n + 1), k=2)) for n in shape)
        where = slice(*rows), slice(*columns)
        same(a[where], A[where])
        c[where] = 3
        C[where] = 3
        same(c, C)
        if A.size:
            same(a[-1], A[-1])
            same(a[..., 0], A[..., 0])
            assert a[0, 0] == A[0, 0]
            for axis in (None, 0, 1) if dtype != "bfloat16" else ():
                same(a.max(axis), A.max(axis))
                same(a.min(axis), A.min(axis))
        if dtype.startswith("int"):
            for axis in (None, 0, 1):
                same(a.sum(axis), A.sum(axis))


@contract(ranks=(1, 2, 3))
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_and_products(ctx: Any, dtype: str) -> None:
    dice = random.Random(dtype)
    for shape in ((6, 5), (1, 4), (0, 3), (33, 65)):
        values = np.random.default_rng(dice.randint(0, 99))
        A, B, v, u = (
            values.standard_normal(s).astype(dtype) for s in (shape, shape, shape[1:], shape[:1])
        )
        a, b, w, x = (pm.array(ctx, y, drawn(dice, y.shape, ctx.size)) for y in (A, B, v, u))
        for axis in (None, 0, 1):
            near(a.sum(axis), A.sum(axis))
        near(a @ w, A @ v)
        near(x @ a, u @ A)
        near(a @ v, A @ v)
        near(w @ w, v @ v)
        near(w.dot(v), v @ v)
        near(a.norm(), np.linalg.norm(A))
        near(a.copy().axpy(2.5, b), A + 2.5 * B)
        if A.size:
            near(a.mean(0), A.mean(0))
            E = np.exp(A - A.max(1, keepdims=True))
            near(a.softmax(), E / E.sum(1, keepdims=True))


@contract(ranks=2)
def test_functions_of_numpy(ctx: Any) -> None:
    A = np.random.default_rng(3).standard_normal((6, 5))
    a, v = pm.array(ctx, A, "grid"), pm.array(ctx, A[0])
    for function in (np.sum, np.max, np.min, np.mean):
        near(function(a), function(A))
        found = function(a, axis=0)
        assert isinstance(found, pm.DistributedVector)
        near(found, function(A, axis=0))
    near(np.linalg.norm(a), np.linalg.norm(A))
    near(np.dot(a, v), A @ A[0])
    for found, due in (
        (np.transpose(a), A.T),
        (np.where(a > v, a, 0.0), np.where(A[0] < A, A, 0.0)),
        (np.clip(a, -0.5, v), np.clip(A, -0.5, A[0])),
        (np.zeros_like(a), np.zeros_like(A)),
        (np.full_like(v, 3, dtype=np.float32), np.full(5, 3, np.float32)),
        (np.copy(a), A),
    ):
        assert isinstance(found, pm.DistributedMatrix | pm.DistributedVector)
        same(found, due)
    assert (np.shape(a), np.ndim(v), np.size(a)) == ((6, 5), 1, 30)
    same(np.cumsum(a, 1), np.cumsum(A, 1))  # any other, on the whole
    same(np.concatenate([a, A]), np.concatenate([A, A]))
    assert np.allclose(a, A)
    near(np.average(a, 1, weights=v), np.average(A, 1, weights=A[0]))
    b = pm.zeros(ctx, (6, 5), dtype=np.int32)
    with pytest.raises(BufferRefusedError, match="another kind"):
        b += 0.5
    with pytest.raises(BufferRefusedError, match="another kind"):
        b.axpy(0.5, b)


@contract(ranks=(2, 3))
def test_the_sum_has_the_same_bits_on_every_rank_and_in_every_run(ctx: Any) -> None:
    for layout in ("rows", "columns", "grid"):
        a = pm.standard_normal(ctx, (130, 70), 5, layout)
        sums = [np.asarray(a.sum(axis)).tobytes() for axis in (None, 0, 1) for _ in range(2)]
        assert sums[::2] == sums[1::2]
        assert len(set(ctx.world.allgather("sums", b"".join(sums)))) == 1


@contract(ranks=(1, 2, 3))
def test_moments_are_computed_in_float64(ctx: Any) -> None:
    values = np.random.default_rng(3).normal(1e3, 1, (301, 67))
    for dtype in ("float32", "float64", "bfloat16", "int32"):
        A = values.astype(DTYPES[dtype])
        exact = A.astype(np.float64)
        close = {"bfloat16": 1e-2, "float32": 2e-7}.get(dtype, 1e-13)
        for layout in ("rows", "cyclic", "replicated", pm.rows((301, 67), [ctx.size - 1])):
            a = pm.array(ctx, A, layout)
            for found, due in (
                (a.sum(dtype=np.float64), exact.sum()),
                (a.mean(), exact.mean()),
                (a.norm(), np.sqrt((exact * exact).sum())),
                (a.var(ddof=1), exact.var(ddof=1)),
                (a.std(keepdims=True)[0, 0], exact.std()),
            ):
                assert abs(found / due - 1) <= close, (dtype, layout, found, due)
    for scale in (1e-30, 1e30):
        far = pm.full(ctx, (100, 100), scale)
        assert abs(far.norm() / (100 * scale) - 1) < 1e-6 and far.var() == 0
    far[3, 5] = np.inf
    with np.errstate(invalid="ignore"):
        assert np.isinf([far.sum(), far.norm()]).all() and np.isnan(far.var())


@contract(ranks=(2, 3))
def test_another_precision_travels(ctx: Any) -> None:
    A = np.random.default_rng(3).standard_normal((40, 30)).astype(np.float32)
    a = pm.array(ctx, A)
    for dtype in ("float16", "bfloat16"):
        half = a.remap("columns", dtype)
        same(half, A.astype(DTYPES[dtype]))
        same(half.remap("grid", "float32"), A.astype(DTYPES[dtype]).astype(np.float32))
        same(np.exp(half), np.exp(A.astype(DTYPES[dtype]).astype(np.float32)).astype(half.dtype))
    same(a.remap("columns", "float64"), A.astype(np.float64))


@contract(ranks=(2, 3))
def test_a_replica_moves_once_until_its_original_changes(ctx: Any) -> None:
    a = pm.standard_normal(ctx, (50, 20), 1)
    first = a.replica("columns")
    memory, before = first.flat.ctypes.data, ctx.counters()
    assert a.replica("columns") is first
    b = pm.zeros(ctx, (50, 20), "columns")
    for _ in range(3):
        b += a  # it is laid out as the replica
    assert ctx.counters() == before
    due = np.asarray(a) + 1
    a += 1
    before = ctx.counters()
    renewed = a.replica("columns")
    moved = (ctx.counters() - before).total
    rows, columns = len(a.flat) // 20, first.layout.count(ctx.rank) // 50
    taken = 4 * (50 - rows) * columns  # what this rank lacks
    given = 4 * rows * (20 - columns)
    assert (moved.bytes_written, moved.bytes_read) == ((0, taken) if ctx.mapped else (given, 0))
    assert renewed.flat.ctypes.data == memory
    same(renewed, due)
    with pytest.raises(LayoutError, match="its original"):
        renewed += 1
    with pytest.raises(LayoutError, match="its original"):
        renewed[0] = 1
    before = ctx.counters()
    a.forget()
    b += a
    assert (ctx.counters() - before).total == moved


@contract(ranks=(2, 3))
def test_a_remap_goes_on_while_ranks_compute(ctx: Any) -> None:
    """In the pool it has begun; several at once, of other dtypes, and outside the pool, too."""
    for pool in (False, True):
        if pool:
            ctx.pool(4 << 20)
        a = pm.standard_normal(ctx, (70, 50), 1)
        A = np.asarray(a)
        before = ctx.counters()
        first = a.remap_async("columns")
        begun = (ctx.counters() - before).total
        if pool and not ctx.mapped:
            assert begun.bytes_read == 4 * (70 - len(a.flat) // 50) * (first.wait().flat.size // 70)
        b = a * 2
        second = b.remap_async("grid", "float64")
        third = pm.zeros(ctx, 12).remap_async("replicated")
        local = A @ A.T
        same(first.wait(), A)
        assert first.wait() is first.wait()
        assert np.array_equal(np.asarray(second.wait()), (A * 2).astype(np.float64))
        assert second.wait().layout.name == "grid"
        assert third.wait().flat.tolist() == [0] * 12
        assert np.array_equal(local, A @ A.T)
        late = a.remap_async("columns")
        a[0, 0] = 5
        for _ in range(2):
            with pytest.raises(LayoutError, match="was changed before"):
                late.wait()
        same(a.remap_async("columns").wait(), np.asarray(a))
        assert pm.explain(ctx, lambda: a.remap_async("columns").wait()).nbytes > 0  # noqa: B023
        a.remap_async("columns")  # nobody waits for it
    with pytest.raises(LayoutError, match="triangle"):
        a.remap_async("triangle")
    with pytest.raises(PlanError, match="integers"):
        pm.zeros(ctx, (4, 4), dtype="int32").remap_async("columns", "float32")
    ranks = pm.serve(ctx, lambda ctx: (pm.zeros(ctx, (6, 6)) + 1).remap_async("grid").wait().sum())
    assert ranks == (36 if ctx.rank == 0 else None)
    handles = [pm.zeros(ctx, 12).remap_async("replicated") for _ in range(2)]
    with pytest.raises(MismatchError, match="the end of a remap of"):
        handles[ctx.rank % 2].wait()


@contract(ranks=(2, 3))
def test_a_remap_that_nobody_waits_for_gives_its_memory_back(ctx: Any) -> None:
    """The next one frees it, on all ranks, once all of them have dropped it."""
    ctx.pool(1 << 20)
    a = pm.standard_normal(ctx, (300, 200), 1)  # 80 to 120 kB on a rank, as is what it becomes
    kept = a.remap_async("grid")
    held = None
    for _ in range(60):
        begun = a.remap_async("columns")
        held = begun if ctx.rank == 0 else None  # longer than by the other ranks
    last, begun = a.remap_async("columns"), None
    same(kept.wait(), np.asarray(a))
    same(last.wait(), np.asarray(a))
    assert pm.empty(ctx, (300, 200)).reader() is not None  # the pool has room
    del held, begun


@contract(ranks=(2, 3))
def test_a_steady_loop_registers_nothing(ctx: Any) -> None:
    ctx.pool(1 << 18)
    a, w = pm.standard_normal(ctx, (64, 32), 1), pm.standard_normal(ctx, 32, 2)
    before = None
    for step in range(6):
        h = np.tanh(a @ w)
        a -= 0.01 * a.remap("columns").softmax()
        a.axpy(float(h.sum()) / 1e3, a.replica("grid"))
        if step == 1:
            before = ctx.counters(), ctx.footprint()
    assert before is not None
    assert ctx.counters().registrations == before[0].registrations
    assert ctx.footprint() == before[1]


@contract(ranks=2)
def test_memory_is_used_again_only_when_no_view_is_left(ctx: Any) -> None:
    for rows in (64, 512):
        a = pm.full(ctx, (ctx.size * rows, 512), 1)
        made = [a * factor for factor in (2, 3.0, np.float32(4), 5)]
        views = [made[0].flat[1:], memoryview(made[1].flat), made[2].flat, made[3].T.flat]
        del made
        places = set()
        for factor in (5, 6, 7):
            b = a * factor
            places.add(b.flat.ctypes.data)
            del b
        assert len(places) == 1, "new memory for each"
        for view, due in zip(views, (2, 3, 4, 5), strict=True):
            assert (np.asarray(view) == due).all()


@contract(ranks=(2, 3))
def test_random_numbers_depend_on_their_places_alone(ctx: Any) -> None:
    shape, dice = (70, 130), random.Random(1)
    for make in (pm.standard_normal, pm.random):
        due = np.asarray(make(ctx, shape, 3))
        same(make(ctx, shape, 3, drawn(dice, shape, ctx.size)), due)
        same(make(ctx, (65, 66), 3, "grid"), due[:65, :66])
        assert not np.array_equal(make(ctx, shape, 4), due)
    assert abs(np.asarray(pm.standard_normal(ctx, shape, 3)).std() - 1) < 0.05
    for layout in ("rows", "replicated"):
        same(pm.random(ctx, 5000, 3, layout), np.asarray(pm.random(ctx, 9000, 3))[:5000])


@contract(ranks=(2, 3))
def test_one_rank_has_the_array(ctx: Any) -> None:
    A = np.arange(35.0).reshape(5, 7)
    for root in range(ctx.size):
        same(pm.array(ctx, A if ctx.rank == root else None, "grid", root=root), A)
    same(pm.fromfunction(ctx, lambda i, j: 7 * i + j, A.shape, "columns", np.float64), A)
    same(pm.fromfunction(ctx, lambda i: 2 * i, 5), 2 * np.arange(5, dtype=np.float32))


@contract(ranks=3)
def test_matrices_of_a_group(ctx: Any) -> None:
    """Layouts name places in it; the others take no part."""
    if ctx.rank == 1:
        return
    group = ctx.group([0, 2])
    a = pm.standard_normal(group, (9, 4), 1)
    b = a.remap(pm.replicated((9, 4), [1]))
    assert len(b.flat) == (36 if ctx.rank == 2 else 0)
    same(b, a)
    group.delete()


@contract(ranks=2, deadline=240)  # guests touch 300 MB slowly
def test_long_moves_go_in_parts(ctx: Any) -> None:
    """More than one execution has room for; narrow rows, and rows longer than a piece."""
    for shape in ((3_000_001, 2), (5, 2_000_000)):
        a = pm.fromfunction(ctx, lambda i, j: i + 10 * j, shape, "rows", np.float64)
        b = a.remap("columns")
        for block, mine in b.blocks():
            rows, columns = np.ogrid[block.where]
            assert np.array_equal(mine, rows + 10.0 * columns)


@contract(ranks=2)
def test_wrong_input_is_refused_on_all_ranks(ctx: Any) -> None:
    a, b = pm.zeros(ctx, (4, 3)), pm.zeros(ctx, (3, 4))
    with pytest.raises(LayoutError, match="does not fit"):
        a + b
    with pytest.raises(LayoutError, match="product of shapes"):
        a @ pm.zeros(ctx, 4)
    with pytest.raises(LayoutError, match=r"product of shapes .4, 3. and .4, 3."):
        a @ a
    with pytest.raises(LayoutError, match="a cannot stay"):
        pm.matmul(a.remap(pm.cyclic((4, 3), range(2), (1, 1))), b, stationary="a")
    with pytest.raises(LayoutError, match="stationary 'c'"):
        pm.matmul(a, b, stationary="c")
    with pytest.raises(LayoutError, match=r"shape .4, 4. into .4, 3."):
        np.matmul(a, b, out=a)
    with pytest.raises(LayoutError, match="on 2 ranks"):
        a.remap(pm.rows((4, 3), range(4)))
    with pytest.raises(LayoutError, match="no layout"):
        a.remap("diagonal")
    with pytest.raises(BufferRefusedError, match="matrices are of"):
        a.astype(np.int16)
    with pytest.raises(IndexError):
        a[[0, 7]]
    with pytest.raises(pgasdl.PlanError, match="integers"):
        pm.zeros(ctx, (4, 3), dtype=np.int32).remap("columns", np.float32)
    same(a.remap("columns"), np.zeros((4, 3), np.float32))  # nothing was lost


@contract(ranks=2)
def test_ranks_that_disagree_are_told(ctx: Any) -> None:
    a = pm.zeros(ctx, (4, 4))
    with pytest.raises(MismatchError, match="remap of"):
        a.remap("columns" if ctx.rank else "replicated")


@contract(ranks=3)
def test_what_would_move_is_told(ctx: Any) -> None:
    a, b = (pm.standard_normal(ctx, (12, 6), seed) for seed in (1, 2))
    c = b.remap("columns")
    before = ctx.counters()
    assert pm.explain(ctx, lambda: a + b).movements == []
    told = pm.explain(ctx, lambda: a + c)
    # Each rank lacks two thirds of its third, from the two others.
    assert (told.nbytes, told.messages) == (48 * 4, 6)
    assert told.seconds > 0
    assert "columns of 12 x 6" in str(told)
    assert pm.explain(ctx, lambda: a.sum(0)).nbytes == 2 * 2 * 6 * 4
    assert pm.explain(ctx, lambda: a.sum(1)).nbytes == 0
    assert pm.explain(ctx, lambda: a[0, 0]).messages == 2
    with pytest.raises(LayoutError, match="in place"):
        pm.explain(ctx, lambda: a.axpy(2, b))
    assert ctx.counters() == before
    same(a + c, np.asarray(a) + np.asarray(b))


@contract(ranks=2)
def test_matrices_lie_in_the_pool(ctx: Any) -> None:
    """A loop takes the same memory again and again; what does not fit lies elsewhere."""
    ctx.pool(1 << 18)
    a, b = (pm.standard_normal(ctx, (64, 32), seed, "rows") for seed in (1, 2))
    segment, _ = ctx.segments.at(memory_of(a.flat))
    assert segment is not None and segment.pooled
    places = set()
    for _ in range(20):
        c = (a + b).remap("columns")
        places.add(c.flat.ctypes.data)
        same(c, np.asarray(a) + np.asarray(b))
    assert len(places) <= 4
    large = pm.zeros(ctx, (512, 512))
    assert ctx.segments.at(memory_of(large.flat)) == (None, 0)
    large += 1
    assert (np.asarray(large) == 1).all()


@contract(ranks=(2, 3))
def test_large_matrices_of_the_pool_are_loaded_where_they_lie(ctx: Any) -> None:
    """Those of several blocks, too, and in another precision; not if one rank's lies elsewhere."""
    ctx.pool(24 << 20)
    shape = 700, 520
    A = np.random.default_rng(1).standard_normal(shape)
    a = pm.array(ctx, A, "rows")
    told = pm.explain(ctx, lambda: a.remap("columns"))
    before = ctx.counters()
    c = a.remap("columns")
    moved = np.array([(ctx.counters() - before).total.bytes_read])
    if ctx.world.mapped:
        assert ctx.world.combine(moved)[0] == told.nbytes
    same(c, A)
    same(a.remap(pm.cyclic(shape, range(ctx.size), (33, 47))).remap("grid"), A)
    same(a.remap("columns", np.float32), A.astype(np.float32))
    same(a[3:680, 9:500], A[3:680, 9:500])
    if ctx.rank == 1:
        a.flat = a.flat.copy()
    same(a.remap("columns"), A)


@contract(ranks=3)
def test_a_checkpoint_is_resumed_by_other_ranks_in_another_layout(ctx: Any) -> None:
    made = tempfile.mkdtemp() if ctx.rank == 0 else ""
    folder = ctx.world.allgather("folder", made.encode())[0].decode()
    checkpoints, dice = Checkpoints(folder), random.Random(2)
    A = {
        "weights": np.random.default_rng(1).standard_normal((9, 7)).astype(DTYPES["bfloat16"]),
        "bias": np.arange(11.0),
        "none": np.empty((0, 4), np.float32),
        "mask": np.arange(12).reshape(3, 4) % 3 == 0,
    }
    arrays = {name: pm.array(ctx, a, drawn(dice, a.shape, ctx.size)) for name, a in A.items()}
    for iteration in (3, 4):
        pm.save(checkpoints, iteration, arrays, {"iteration": iteration})
    found = checkpoints.open_last()
    assert found is not None and pm.load_state(found) == {"iteration": 4}
    for name, a in A.items():
        same(pm.load(ctx, found, name, drawn(dice, a.shape, ctx.size)), a)
    if ctx.rank != 1:
        group = ctx.group([0, 2])
        for name, a in A.items():
            same(pm.load(group, found, name, drawn(dice, a.shape, 2)), a)
    ctx.barrier()
    (torn,) = (Path(folder) / "00000004.sharded").glob("rank-0001.*")
    if ctx.rank == 0:
        torn.write_bytes(torn.read_bytes()[:-1])
    ctx.barrier()
    found = checkpoints.open_last()
    assert found is not None and pm.load_state(found) == {"iteration": 3}
    ctx.barrier()
    if ctx.rank == 0:
        shutil.rmtree(folder)


@contract(ranks=(1, 3))
def test_one_rank_reads_alone(ctx: Any) -> None:
    dice = random.Random(7)
    outside = pm.zeros(ctx, (4, 4))
    with pytest.raises(pgasdl.PoolFullError, match="outside the pool"):
        outside.reader()
    ctx.pool(1 << 16)
    A, v = np.arange(63.0).reshape(9, 7), np.arange(20, dtype=np.int32)
    reader = pm.array(ctx, A, drawn(dice, A.shape, ctx.size)).reader()
    of_vector = pm.array(ctx, v, "rows").reader()
    ctx.barrier()
    if ctx.rank == ctx.size - 1:
        for _ in range(20):
            rows, columns = (sorted(dice.choices(range(n + 1), k=2)) for n in A.shape)
            where = slice(*rows), slice(*columns)
            same(reader[where], A[where])
        same(reader[-1], A[-1])
        assert reader[3, 2] == A[3, 2]
        same(of_vector[1:17], v[1:17])
        assert of_vector[-1] == 19
        with pytest.raises(pgasdl.PoolFullError, match="to read into"):
            large = [reader[:] for _ in range(1000)]
            del large
    ctx.barrier()
    assert pm.zeros(ctx, (2, 2)).reader()[0, 0] == 0
    ctx.barrier()


@contract(ranks=3, meet=False)
def test_a_rank_that_left_is_named(ctx: Any) -> None:
    a = pm.zeros(ctx, (6, 6))
    a.remap("columns")
    if ctx.rank == 1:
        return
    with pytest.raises(pgasdl.PeerLostError, match="rank 1"):
        a.remap("columns")
