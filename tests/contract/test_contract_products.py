"""Products of matrices on ranks: what NumPy has, whatever the layouts, on every transport."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl.matrix as pm
from pgasdl.buffers import DTYPES
from pgasdl.errors import LayoutError, MismatchError, PeerLostError, PgasTimeoutError

SIZES = (0, 1, 2, 5, 31, 130)


def drawn(dice: random.Random, shape: tuple[int, int], size: int) -> pm.Layout:
    """Some layout, the same on all ranks, on some of them."""
    ranks = dice.sample(range(size), dice.randint(1, size))
    if dice.random() < 0.25:
        return pm.cyclic(shape, ranks, (dice.randint(1, 40), dice.randint(1, 40)))
    return dice.choice((pm.rows, pm.columns, pm.grid, pm.replicated))(shape, ranks)


def whole_numbers(dice: random.Random, shape: tuple[int, int], dtype: str) -> Any:
    """Small ones: their products are exact in every dtype."""
    values = np.random.default_rng(dice.randint(0, 99)).integers(-2, 3, shape)
    return values.astype(DTYPES[dtype])


@contract(ranks=(1, 2, 3, 4))
def test_numpy_has_the_same_products(ctx: Any) -> None:
    """Any shapes, layouts, dtypes and transposes, whatever stays; in the pool and outside."""
    dice = random.Random(3)
    for trial in range(60):
        if trial == 20:
            ctx.pool(4 << 20)
        m, k, n = (dice.choice(SIZES) for _ in range(3))
        turned = dice.random() < 0.3, dice.random() < 0.3
        dtype = dice.choice(list(DTYPES))
        dtypes = dtype, dice.choice((dtype, "float32"))
        A, B = (whole_numbers(dice, s, d) for s, d in zip(((m, k), (k, n)), dtypes, strict=True))
        X, Y = (each.T.copy() if turn else each for each, turn in zip((A, B), turned, strict=True))
        a, b = (pm.array(ctx, each, drawn(dice, each.shape, ctx.size)) for each in (X, Y))
        wanted = dice.choice((None, drawn(dice, (m, n), ctx.size)))
        stays = dice.choice((None, "result", "a", "b"))
        how = {"transpose_a": turned[0], "transpose_b": turned[1], "layout": wanted}
        try:
            c = pm.matmul(a, b, stationary=stays, **how)
        except LayoutError as error:
            assert "cannot stay" in str(error)
            continue
        assert wanted is None or c.layout == wanted
        assert c.dtype == np.result_type(A.dtype, B.dtype)
        exact = A.astype(np.float64) @ B.astype(np.float64)
        assert np.array_equal(np.asarray(c).astype(np.float64), exact)


@contract(ranks=(2, 3))
def test_many_panels(ctx: Any) -> None:
    """More than one along each dimension, in place or read; sums of the parts are whole."""
    ctx.pool(16 << 20)
    dice = random.Random(1)
    A, B = (whole_numbers(dice, shape, "float32") for shape in ((300, 900), (900, 270)))
    due = A @ B
    for layouts in (("rows", "rows"), ("columns", "columns"), ("grid", "grid"), ("cyclic", "rows")):
        a, b = (pm.array(ctx, x, way) for x, way in zip((A, B), layouts, strict=True))
        for stays in ("result", "a", "b"):
            if "cyclic" in layouts and stays == "a":
                continue
            found = pm.matmul(a, b, stationary=stays, layout="grid")
            assert np.array_equal(np.asarray(found), due)


@contract(ranks=2)
def test_numpys_forms_of_a_product(ctx: Any) -> None:
    dice = random.Random(2)
    A, B = (whole_numbers(dice, (6, 6), "float32") for _ in range(2))
    a, b = pm.array(ctx, A), pm.array(ctx, B, "columns")
    for found in (a @ b, np.matmul(a, b), np.dot(a, b), a @ B, A @ b, pm.matmul(a, b)):
        assert isinstance(found, pm.DistributedMatrix)
        assert np.array_equal(np.asarray(found), A @ B)
    seen = a.everywhere().copy()
    a @= b
    assert np.array_equal(np.asarray(a), seen @ B)  # and the replica was renewed
    assert np.array_equal(np.asarray(a.T @ b), (A @ B).T @ B)


@contract(ranks=2)
def test_what_a_product_moves(ctx: Any) -> None:
    """As explained; nothing where memory is mapped, or what was seen has not changed."""
    ctx.pool(8 << 20)
    a = pm.standard_normal(ctx, (64, 256), 1, dtype="float64")
    b = pm.standard_normal(ctx, (256, 64), 2, dtype="float64")
    told = pm.explain(ctx, lambda: a @ b)
    assert (told.nbytes, told.messages) == (2 * 128 * 64 * 8, 2)  # each rank: the half of b
    assert "product of" in str(told) and told.seconds > 0
    c = a @ b
    ctx.barrier()

    due = 0 if ctx.world.mapped else 128 * 64 * 8
    assert read(ctx, lambda: a @ b) == due
    whole = b.replica("replicated")
    assert pm.explain(ctx, lambda: a @ whole).nbytes == 0
    assert read(ctx, lambda: a @ whole) == 0
    np.asarray(a), b.everywhere()  # to look at operands changes nothing
    assert read(ctx, lambda: a @ b) == due
    again = a @ b
    assert again.layout == c.layout
    assert np.array_equal(np.asarray(again), np.asarray(c))


def read(ctx: Any, expression: Any) -> int:
    """Compute something; return the bytes that this rank read for it."""
    before = ctx.counters()
    expression()
    return int((ctx.counters() - before).total.bytes_read)


@contract(ranks=2)
def test_what_was_read_is_kept_until_it_changes(ctx: Any) -> None:
    """Forward, the same again, and backward with the same weights: read once."""
    ctx.pool(8 << 20)
    x, dy = (pm.standard_normal(ctx, (64, 256), seed, dtype="float64") for seed in (1, 2))
    w = pm.standard_normal(ctx, (256, 256), 3, dtype="float64")

    def forward() -> Any:
        return pm.matmul(x, w, stationary="result")

    def backward() -> Any:
        return pm.matmul(dy, w, transpose_b=True, stationary="result")

    half = 0 if ctx.world.mapped else 128 * 256 * 8  # of w, which the other rank has
    assert [read(ctx, each) for each in (forward, forward, backward)] == [half] * 3
    due = forward(), backward()
    pm.keep(ctx, w.size * 8)
    assert [read(ctx, each) for each in (forward, forward, backward)] == [half, 0, 0]
    for found, same in zip((forward(), backward()), due, strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(same))
    (movement,) = pm.explain(ctx, backward).movements
    assert movement.kept == 2 * half
    assert ("kept here" in str(movement)) == bool(half)
    w[255, 255] = 7  # one rank has it; all drop what they keep
    assert [read(ctx, each) for each in (forward, backward)] == [half, 0]
    assert np.allclose(np.asarray(forward()), np.asarray(x) @ np.asarray(w), rtol=1e-12)
    w.forget()
    assert [read(ctx, each) for each in (forward, backward)] == [half, 0]
    other = w.copy()
    assert [read(ctx, lambda: x @ other), read(ctx, forward)] == [half, half]  # no room for both
    pm.keep(ctx, 0)
    assert [read(ctx, each) for each in (forward, forward)] == [half] * 2
    with pytest.raises(ValueError, match="-1 bytes"):
        pm.keep(ctx, -1)


@contract(ranks=(2, 3))
def test_products_of_what_is_kept_are_right(ctx: Any) -> None:
    """Of a few matrices that change in between, with room for some of them."""
    ctx.pool(4 << 20)
    dice = random.Random(6)
    pm.keep(ctx, 3 * 90 * 90 * 4)
    dtypes = "float32", "float64", "int32", "float32"
    whole = [whole_numbers(dice, (90, 90), dtype) for dtype in dtypes]
    arrays = [pm.array(ctx, each, drawn(dice, (90, 90), ctx.size)) for each in whole]
    for _ in range(60):
        i, j = (dice.randrange(len(arrays)) for _ in range(2))
        X, Y = (whole[k].astype(np.float64) for k in (i, j))
        if dice.random() < 0.2:
            place = dice.randrange(90), slice(dice.randrange(90), None)
            arrays[i][place] = whole[i][place] = dice.randint(-2, 2)
        elif dice.random() < 0.1:
            arrays[i] = arrays[i].remap(drawn(dice, (90, 90), ctx.size))
        else:
            turned = dice.random() < 0.5, dice.random() < 0.5
            how = {"transpose_a": turned[0], "transpose_b": turned[1]}
            found = pm.matmul(arrays[i], arrays[j], layout="rows", **how)
            due = (X.T if turned[0] else X) @ (Y.T if turned[1] else Y)
            assert np.array_equal(np.asarray(found).astype(np.float64), due)


@contract(ranks=(2, 3))
def test_operands_are_rounded_on_the_way(ctx: Any) -> None:
    """What moves is; sums are in float32, as far from the product as rounding allows."""
    for pool in (False, True):
        if pool:
            ctx.pool(8 << 20)
        a, b = (pm.standard_normal(ctx, (130, 130), seed, dtype="float64") for seed in (1, 2))
        A, B = (np.asarray(each) for each in (a, b))
        for wire, unit in (("bfloat16", 2.0**-9), ("float16", 2.0**-11), ("float32", 2.0**-24)):
            for layouts in (("rows", "rows"), ("rows", "columns"), ("grid", "grid")):
                x, y = (each.remap(layout) for each, layout in zip((a, b), layouts, strict=True))
                found = pm.matmul(x, y, wire=wire)
                assert found.dtype == np.float64
                far = np.abs(np.asarray(found) - A @ B)
                assert (far <= 2.01 * unit * (np.abs(A) @ np.abs(B))).all()
                assert far.max() > 0
    dues = {}
    for wire in ("float32", "float16"):
        pm.matmul(a, b, stationary="result", wire=wire)  # rounds
        dues[wire] = read(ctx, lambda: pm.matmul(a, b, stationary="result", wire=wire))  # noqa: B023
    if not ctx.world.mapped:
        assert dues["float32"] == 2 * dues["float16"] > 0
    for wire, why in (("float64", "float16, bfloat16"), ("int32", "float16, bfloat16")):
        with pytest.raises(LayoutError, match=why):
            pm.matmul(a, b, wire=wire)
    with pytest.raises(LayoutError, match="integers"):
        pm.matmul(a, pm.eye(ctx, 130, dtype="int32"), wire="float16")


@contract(ranks=2)
def test_products_that_disagree_are_told(ctx: Any) -> None:
    ctx.pool(1 << 20)
    a = pm.zeros(ctx, (8, 8))
    with pytest.raises(MismatchError, match="product of"):
        pm.matmul(a, a, stationary="result" if ctx.rank else "a")


@contract(ranks=3)
def test_products_in_a_group(ctx: Any) -> None:
    """Layouts name places in it; the others take no part."""
    if ctx.rank == 1:
        return
    group = ctx.group([0, 2])
    ctx.pool(1 << 20, group=group)
    dice = random.Random(4)
    A, B = (whole_numbers(dice, (40, 40), "float32") for _ in range(2))
    a, b = pm.array(group, A), pm.array(group, B, "columns")
    for stays in ("result", "a", "b"):
        assert np.array_equal(np.asarray(pm.matmul(a, b, stationary=stays)), A @ B)
    group.delete()


@contract(ranks=2)
def test_a_loop_of_products_registers_nothing(ctx: Any) -> None:
    ctx.pool(1 << 20)
    a, b = (pm.standard_normal(ctx, (48, 48), seed) for seed in (1, 2))
    places = set()
    for turn in range(12):
        if turn == 2:
            before = ctx.counters().registrations
        c = a @ b
        places.add(c.flat.ctypes.data)
        del c
    assert ctx.counters().registrations == before
    assert len(places) <= 2


@contract(ranks=2, timeout=0.5)  # init's, too, in a guest that has just booted
def test_a_product_that_timed_out_goes_on(ctx: Any) -> None:
    """By the same call; meanwhile every other one is refused."""
    ctx.pool(1 << 20, timeout=10)
    pm.keep(ctx, 1 << 20)
    dice = random.Random(5)
    A, B = (whole_numbers(dice, (20, 20), "float64") for _ in range(2))
    a, b = pm.array(ctx, A), pm.array(ctx, B)
    ctx.barrier(timeout=10)
    if ctx.rank == 1:
        ctx.passive_receive(timeout=10)  # rank 0 has given up once
        c = a @ b
    else:
        n_timeouts = 0
        while True:
            try:
                c = a @ b
                break
            except PgasTimeoutError:
                if n_timeouts == 0:
                    ctx.passive_send(b"late", 1)
                n_timeouts += 1
                with pytest.raises(MismatchError, match="call it again"):
                    pm.matmul(a, b, stationary="a")
        assert n_timeouts
    ctx.barrier(timeout=10)
    assert np.array_equal(np.asarray(c), A @ B)


@contract(ranks=3, meet=False)
def test_a_lost_rank_ends_products(ctx: Any) -> None:
    ctx.pool(1 << 20)
    a = pm.standard_normal(ctx, (30, 30), 1)
    a @ a
    if ctx.rank == 1:
        return
    with pytest.raises(PeerLostError, match="rank 1"):
        a @ a
