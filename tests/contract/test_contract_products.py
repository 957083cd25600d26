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

    def moved(expression: Any) -> int:
        before = ctx.counters()
        expression()
        return int((ctx.counters() - before).total.bytes_read)

    due = 0 if ctx.world.mapped else 128 * 64 * 8
    assert moved(lambda: a @ b) == due
    whole = b.replica("replicated")
    assert pm.explain(ctx, lambda: a @ whole).nbytes == 0
    assert moved(lambda: a @ whole) == 0
    np.asarray(a), b.everywhere()  # to look at operands changes nothing
    assert moved(lambda: a @ b) == due
    again = a @ b
    assert again.layout == c.layout
    assert np.array_equal(np.asarray(again), np.asarray(c))


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


@contract(ranks=2, timeout=0.3)
def test_a_product_that_timed_out_goes_on(ctx: Any) -> None:
    """By the same call; meanwhile every other one is refused."""
    ctx.pool(1 << 20, timeout=10)
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
