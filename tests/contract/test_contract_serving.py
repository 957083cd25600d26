"""A master and its workers: what a program on all ranks has, one on rank 0 has, too."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl
import pgasdl.matrix as pm
from pgasdl.buffers import DTYPES
from pgasdl.checkpoint import Checkpoints


def program(ctx: Any) -> list[Any]:
    """The same text for all ranks, and for a master."""
    ones = np.ones((9, 6), np.float32)
    a, b = pm.standard_normal(ctx, (9, 6), 1), pm.array(ctx, 3 * ones, "columns")
    v = pm.fromfunction(ctx, np.square, 6)
    found = [np.asarray(a @ b.T), a.sum(), (a + b * 2 - ones).max(0), np.linalg.norm(v), v.dot(v)]
    a += b
    a[2:4, 1] = 5
    a.axpy(2, b)
    found += [a[1:5], np.where(a > 4, a, 0), np.cumsum(a, 0), pm.matmul(a, b, transpose_a=True)]
    for _ in range(3):
        a = a.remap("grid", np.float64).copy()  # the one before is dropped
    kept = a.replica("replicated")
    a *= 2
    a.changed()
    found += [kept.softmax(), a.astype(np.float32), pm.zeros(ctx, (0, 3)), a.everywhere()]
    where = slice(None, 3), np.int64(2)
    found += [a[where], a[..., 0], np.linalg.norm(a * np.float32(2)), a + np.arange(6) > 3]
    found += [a * np.ones((9, 6), DTYPES["bfloat16"]), np.concatenate([a, b]), a.astype(np.float16)]
    found.append(a.remap(pm.cyclic((9, 6), range(ctx.size), (2, 4)), "float32"))
    told = pm.explain(ctx, lambda: a @ b.T)
    return [np.asarray(each) for each in found] + [(told.nbytes, told.messages)]


@contract(ranks=(1, 2, 3))
def test_a_master_has_the_same(ctx: Any) -> None:
    due = program(ctx)
    found = pm.serve(ctx, program)
    if ctx.rank:
        assert found is None
        return
    for one, other in zip(found, due, strict=True):
        assert np.array_equal(one, other)


@contract(ranks=2)
def test_what_a_master_is_refused(ctx: Any) -> None:
    """Rank 0 is told, and goes on; a workers' failure would end both."""
    before, theirs = pm.zeros(ctx, (2, 2)), []

    def refused(ctx: Any) -> float:
        a = pm.zeros(ctx, (4, 3))
        with pytest.raises(pgasdl.LayoutError, match="product of shapes"):
            a @ a
        with pytest.raises(IndexError, match="out of bounds"):
            a[[0, 9]]
        with pytest.raises(TypeError, match="only values, matrices and NumPy"):
            pm.fromfunction(ctx, lambda i: i, 3)
        for wrong in (np.array([{}]), object(), np.ndarray, print):
            with pytest.raises(TypeError, match="only values"):
                pm.full(ctx, (2, 2), wrong)
        with pytest.raises(pgasdl.LayoutError, match="not made by the program"):
            before + 1
        with pytest.raises(pgasdl.LayoutError, match="not of a group"):
            pm.zeros(ctx.group([0]), (2, 2))
        with pytest.raises(pgasdl.PlanError, match="inside of serve"):
            pm.serve(ctx, refused)
        theirs.append(a)
        large = pm.array(ctx, np.full((300, 400), 2.0)) + np.ones((300, 400))  # many messages
        return float((large + (a + 1).sum()).max())

    assert pm.serve(ctx, refused) == (15 if ctx.rank == 0 else None)
    if ctx.rank == 0:
        with pytest.raises(pgasdl.LayoutError, match="not made by the program"):
            pm.serve(ctx, lambda _: theirs[0].sum())  # that of another one
    else:
        pm.serve(ctx, refused)
    with pytest.raises(KeyError) if ctx.rank == 0 else pytest.MonkeyPatch.context():
        pm.serve(ctx, lambda ctx: {}["nothing"])
    assert (np.asarray(before) == 0).all()  # the workers have left, and all go on


def refusals(ctx: Any) -> list[str]:
    """The names of what is raised, and that all goes on."""
    a = pm.zeros(ctx, (4, 4), dtype=np.int32)
    e = pm.array(ctx, np.array([1, 1, 1, -1]))
    b = pm.full(ctx, 4, 3, dtype=np.int64)

    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pm.save(Checkpoints(folder), 1, {"a": a})
            pm.load(ctx, Checkpoints(folder).open_last(), "nope")  # type: ignore[arg-type]

    found = []
    for wrong in (
        lambda: a + 2**40,
        lambda: a @ 3,
        load,
        lambda: pm.zeros(ctx, (10**8, 10**8)),
        lambda: a == np.array(["a", "b", "c", "d"]),
        lambda: pm.array(ctx, [[1, 2], [3]]),
        lambda: b.__ipow__(e),  # on the last rank alone
        lambda: b**e,
    ):
        with pytest.raises(Exception) as error:
            wrong()
        found.append(error.typename)
        assert float(a.sum()) == 0
    swapped = np.arange(4, dtype=">f4")
    assert np.array_equal(np.asarray(pm.zeros(ctx, 4) + swapped), swapped)
    assert np.asarray(b)[0] == 3
    return found


@contract(ranks=(2, 3))
def test_a_master_goes_on_after_what_is_refused(ctx: Any) -> None:
    found = pm.serve(ctx, refusals)
    if ctx.rank == 0:
        assert found == [
            "OverflowError",
            "LayoutError",
            "KeyError",
            "MemoryError" if found[3] == "MemoryError" else "_ArrayMemoryError",
            "TypeError",
            "BufferRefusedError",
            "ValueError",
            "ValueError",
        ]


@contract(ranks=2)
def test_a_workers_error_names_its_rank(ctx: Any) -> None:
    def program(ctx: Any) -> None:
        a, e = (pm.array(ctx, np.array(each)) for each in ([1.0, 2, 3, 4], [1.0, 1, 1, 0]))
        with pytest.raises(FloatingPointError, match=r"^rank 1: FloatingPointError: divide"):
            a /= e
        assert np.asarray(a)[:2].tolist() == [1, 2]

    with np.errstate(divide="raise"):
        pm.serve(ctx, program)


@contract(ranks=(2, 3))
def test_what_a_worker_gave_up_halfway_is_told(ctx: Any) -> None:
    """Rank 0 waits for it in the operation by then."""

    def program(ctx: Any) -> None:
        a = pm.zeros(ctx, (6, 3))
        a[4:] = np.float32(3e38)
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=rf"^rank {ctx.size - 1}: .*overflow"):
                a.sum(0)
            assert a.max() == np.float32(3e38)

    with np.errstate(over="raise" if ctx.rank == ctx.size - 1 else "ignore"):
        pm.serve(ctx, program)


@contract(ranks=3, meet=False)
def test_a_worker_that_died_is_told(ctx: Any) -> None:
    pm.zeros(ctx, (2, 2))
    if ctx.rank == 1:
        return
    with pytest.raises(pgasdl.PeerLostError, match="rank 1") as lost:
        pm.serve(ctx, lambda ctx: [pm.zeros(ctx, (4, 4)).sum() for _ in range(9)])
    assert lost.value.rank == 1


@contract(ranks=2)
def test_a_master_writes_and_reads_checkpoints(ctx: Any) -> None:
    def program(ctx: Any) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(folder)
            a = pm.standard_normal(ctx, (5, 4), 1)
            pm.save(checkpoints, 3, {"a": a}, {"step": [3]})
            found = checkpoints.open_last()
            assert found is not None and pm.load_state(found) == {"step": [3]}
            return bool((pm.load(ctx, found, "a", "columns") == a).min())

    assert pm.serve(ctx, program) in (True, None)


@contract(ranks=2, timeout=0.5)  # init's, too, in a guest that has just booted
def test_a_worker_that_takes_nothing_is_told(ctx: Any) -> None:
    pm.zeros(ctx, (2, 2))
    ctx.barrier(timeout=10)

    def program(ctx: Any) -> None:
        with pytest.raises(pgasdl.PgasTimeoutError):
            for _ in range(100):
                pm.zeros(ctx, (2, 2))
        with pytest.raises(pgasdl.PgasTimeoutError, match="an earlier operation"):
            pm.zeros(ctx, (2, 2))

    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError, match="an earlier operation"):
            pm.serve(ctx, program)
    ctx.barrier(timeout=10)
