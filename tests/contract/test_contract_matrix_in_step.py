"""Matrices of ranks that are out of step, replicas, and calls that timed out."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl.matrix as pm
from pgasdl import loopback
from pgasdl.errors import LayoutError, MismatchError, PgasTimeoutError


def whole(array: Any) -> list[Any]:
    found: list[Any] = np.asarray(array).tolist()
    return found


@contract(ranks=2)
def test_a_rank_whose_change_failed_stays_in_step(ctx: Any) -> None:
    """Rank 1 alone divides by zero."""
    a, e = (pm.array(ctx, np.array(each)) for each in ([1.0, 2, 3, 4], [1.0, 1, 1, 0]))
    x, y, z = (pm.full(ctx, 4, k, dtype=np.int64) for k in (10, 20, 30))
    first = a.replica("replicated")
    caught = 0
    try:
        with np.errstate(divide="raise"):
            a /= e
    except FloatingPointError:
        caught = 1
    assert caught == ctx.rank
    assert whole(first)[:2] == whole(a)[:2] == [1, 2]
    assert [whole(each) for each in (x, y, z)] == [[10] * 4, [20] * 4, [30] * 4]


SHARES: tuple[Any, ...] = (
    *(lambda a: a.sum(1), lambda a: a.prod(), lambda a: a.prod(0), lambda a: a.std(1)),
    *(lambda a: a.mean(1), lambda a: a @ a, lambda a: a[0] @ a, lambda a: a.T @ a),
    lambda a: a.__array_namespace__().linalg.vecdot(a, a),
    lambda a: pm.matmul(a, a, layout="columns", stationary="a"),
)


@contract(ranks=2)
def test_a_rank_whose_sum_overflows_does_its_share_first(ctx: Any) -> None:
    """Rank 0 alone has large numbers; it raises what it asked for, and both stay in step."""
    values = np.ones((8, 8), np.float32)
    values[:2] = 3e38
    a = pm.array(ctx, values)
    for number, share in enumerate(SHARES):
        with np.errstate(all="ignore"):
            due = share(a)
        found = None
        try:
            with np.errstate(over="raise"):
                found = share(a)
        except FloatingPointError:
            pass
        assert found is None or ctx.rank, number
        assert found is None or np.array_equal(getattr(found, "flat", 0), getattr(due, "flat", 0))
        told = ctx.world.allgather("numbers of matrices", str(a.copy().number).encode())
        assert len({*told}) == 1, number
        ctx.barrier()


def test_what_overflows_is_warned_of_once() -> None:
    def program(ctx: Any) -> None:
        a = pm.full(ctx, (4, 4), 3e38)
        with pytest.warns(RuntimeWarning, match="overflow encountered in blocks") as found:
            a.std(1)
        assert len(found) == 1
        seen: list[str] = []
        with np.errstate(all="call", call=lambda kind, _: seen.append(kind)):
            a.prod()
        assert seen == ["overflow"]

    loopback.run(1, program)


def changed(rank: int, a: Any) -> Any:
    if rank:
        a[0, 0] = 5
    return a


def made(rank: int, a: Any) -> Any:
    if rank:
        a.copy()
    return a.copy()


def forgotten(rank: int, a: Any) -> Any:
    """One rank has what the other gets again, and goes on to the next one."""
    a.replica("columns")
    b = pm.zeros(a.space.group, a.shape)
    if rank:
        a.forget()
        return a
    return b


def of_another_dtype(rank: int, a: Any) -> Any:
    return a.astype(np.float64 if rank else np.float32)


def of_another_shape(rank: int, a: Any) -> Any:
    return pm.full(a.space.group, (4 + rank, 4), 1)


USES: dict[str, Any] = {
    "remap": lambda a: a.remap("columns"),
    "look": np.asarray,
    "index": lambda a: a[1:3],
    "sum": lambda a: a.sum(),
    "sums": lambda a: a.sum(0),
    "norm": lambda a: a.norm(),
    "product": lambda a: pm.matmul(a, a, transpose_b=True, stationary="result"),
}


@contract(ranks=2)
def test_what_ranks_do_to_different_matrices_is_refused(ctx: Any) -> None:
    for part in (changed, made, forgotten, of_another_dtype, of_another_shape):
        for name, use in USES.items():
            group = ctx.group([0, 1])
            ctx.pool(1 << 14, group=group)
            a = pm.full(group, (4, 4), 1)
            b = part(ctx.rank, a)
            with pytest.raises(MismatchError):
                print(part.__name__, name, use(b))
            del a, b
            group.delete()
            ctx.barrier()


@contract(ranks=2)
def test_one_rank_alone_may_ask_what_would_move(ctx: Any) -> None:
    a, b = (pm.full(ctx, (4, 4), k, way) for k, way in ((1, "rows"), (2, "columns")))
    if ctx.rank:
        assert pm.explain(ctx, lambda: (a + b).sum(0)).nbytes > 0
    assert (np.asarray(a + b) == 3).all()


@contract(ranks=2)
def test_what_is_explained_may_make_matrices_and_change_those(ctx: Any) -> None:
    a = pm.full(ctx, (4, 4), 1, "columns")

    def expression() -> Any:
        b = pm.zeros(ctx, (4, 4)) + pm.eye(ctx, 4) + pm.array(ctx, np.ones((4, 4)))
        b += a
        b[0] = 1
        return b @ b

    if ctx.rank:
        assert "columns of 4 x 4" in str(pm.explain(ctx, expression))
        with pytest.raises(LayoutError, match="in place"):
            pm.explain(ctx, lambda: a.__setitem__(0, 1))
    assert whole(a + pm.zeros(ctx, (4, 4))) == [[1] * 4] * 4


@contract(ranks=2)
def test_what_is_explained_is_done_by_other_threads(ctx: Any) -> None:
    a = pm.full(ctx, (4, 4), 1)
    replica = a.replica("columns")
    a += 1
    found: list[Any] = []

    def expression() -> Any:
        replica + 1
        thread = threading.Thread(target=lambda: found.append((a.copy().number, whole(replica))))
        thread.start()
        thread.join()
        return replica + a

    told = pm.explain(ctx, expression)
    assert found[0][1] == [[2] * 4] * 4
    assert a.copy().number > found[0][0] and len(told.movements) == 1


@contract(ranks=(2, 3))
def test_replicas_follow_their_original(ctx: Any) -> None:
    a = pm.zeros(ctx, (4, 6))
    by_columns = a.replica("columns")
    half = by_columns.replica("rows", np.float16)
    a += 1
    told = pm.explain(ctx, lambda: by_columns + 1)
    assert len(told.movements) == 1
    assert (np.asarray(half) == 1).all()  # through the one between
    assert (np.asarray(by_columns + by_columns) == 2).all()
    a[1, 1] = 7
    assert by_columns[1, 1] == by_columns.max() == half.max() == 7
    before = ctx.counters()
    assert pm.explain(ctx, lambda: by_columns + 1).movements == []
    assert (by_columns.flat >= 1).all()
    assert ctx.counters() == before
    a += 1
    del a
    with pytest.raises(LayoutError, match="its original is gone"):
        by_columns + 1


@contract(ranks=2)
def test_copies_are_copies(ctx: Any) -> None:
    a = pm.zeros(ctx, (2, 2))
    a.everywhere()
    for found in (copy.copy(a), copy.deepcopy(a), copy.deepcopy([a])[0]):
        found[...] = 1
        assert (np.asarray(found) == 1).all()
        assert (np.asarray(a) == 0).all() and (a.flat == 0).all()


@contract(ranks=2)
def test_to_look_at_a_matrix_keeps_nothing(ctx: Any) -> None:
    ctx.pool(1 << 20)
    a = pm.zeros(ctx, (64, 32))

    def free() -> list[str]:
        return [line for line in ctx.describe().splitlines() if "pool of" in line]

    before = free()
    seen = np.asarray(a)
    np.sort(a)
    assert free() == before
    seen += 1
    assert (np.asarray(a) == 0).all()
    with pytest.raises(ValueError, match="read-only"):
        np.copyto(a, seen)  # would be lost


@contract(ranks=2, timeout=0.5)  # init's, too, in a guest that has just booted
@pytest.mark.parametrize("n", [20, 1000])
def test_what_timed_out_goes_on_by_the_same_call(ctx: Any, n: int) -> None:
    """With the elements that it asked for; its text names who is missing at once."""
    ctx.pool(64 << 20, timeout=10)
    A = np.arange(1.0 * n * n).reshape(n, n)
    a, b = pm.array(ctx, A), pm.zeros(ctx, (n, n), dtype=np.float64)
    uses = (lambda x: x.remap("columns"), np.sum, lambda x: np.sum(x, 0), lambda x: x[n // 4 :])

    def in_the_end(use: Callable[[Any], Any]) -> Any:
        while True:
            with contextlib.suppress(PgasTimeoutError):
                return use(a)

    for use in uses:
        ctx.barrier(timeout=10)
        if ctx.rank == 1:
            ctx.passive_receive(timeout=10)  # rank 0 has given up once
        else:
            with pytest.raises(PgasTimeoutError) as late:
                use(a)
            assert re.match("nothing yet from rank 1[ :]", str(late.value))
            with pytest.raises(MismatchError):
                use(b)
            ctx.passive_send(b"late", 1)
        found = in_the_end(use)
        ctx.barrier(timeout=10)
        if use is uses[0]:
            ((block, mine),) = found.blocks()
            assert np.array_equal(mine, A[block.where])
        else:
            here = found.flat if isinstance(found, pm.DistributedVector) else found
            assert np.array_equal(here, use(A))
