"""ctx.broadcast, ctx.all_gather and ctx.reduce_scatter: results, dtypes, refusals, resumption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract_harness import contract

import pgasdl


@contract(ranks=3)
def test_broadcast(ctx: Any) -> None:
    for n, dtype in ((1, "int8"), (1000, "float32"), (700_001, "complex64"), (0, "int32")):
        for root in range(ctx.size):
            array = np.full(n, ctx.rank + 1, dtype)
            assert ctx.broadcast(array, root) is array
            assert (array == root + 1).all()
    with pytest.raises(pgasdl.RankError, match="rank 3 is not in the group"):
        ctx.broadcast(np.ones(2), 3)
    frozen = np.ones(2)
    frozen.flags.writeable = False
    for wrong in (np.ones((4, 4))[:, 0], frozen):
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.broadcast(wrong)


@contract(ranks=3)
def test_all_gather(ctx: Any) -> None:
    for shape in ((), (5,), (300, 301)):
        mine = np.full(shape, ctx.rank, np.float64)
        result = ctx.all_gather(mine)
        assert result.shape == (3, *shape) and result.dtype == np.float64
        assert all((result[rank] == rank).all() for rank in range(ctx.size))
    out = np.empty((3, 2), np.int64)
    assert ctx.all_gather(np.array([ctx.rank, -1]), out) is out
    assert out.tolist() == [[0, -1], [1, -1], [2, -1]]
    with pytest.raises(pgasdl.BufferRefusedError, match="out is int64 x 6, but the result int64"):
        ctx.all_gather(np.array([1]), out)


@contract(ranks=3)
def test_reduce_scatter(ctx: Any) -> None:
    rows = np.arange(6 * 50_000, dtype=np.float32).reshape(6, -1)
    result = ctx.reduce_scatter((ctx.rank + 1) * rows)
    assert (result == 6 * rows[2 * ctx.rank : 2 * ctx.rank + 2]).all()
    assert (ctx.reduce_scatter(np.full(3, ctx.rank, np.float64), "mean") == [1.0]).all()
    assert ctx.reduce_scatter(np.arange(3) * (ctx.rank + 1), "max").tolist() == [3 * ctx.rank]
    with pytest.raises(pgasdl.BufferRefusedError, match="a multiple of their number"):
        ctx.reduce_scatter(np.ones(4, np.float32))
    with pytest.raises(pgasdl.BufferRefusedError, match="operator 'x'"):
        ctx.reduce_scatter(np.ones(3, np.float32), "x")


@contract(ranks=3)
def test_in_a_group(ctx: Any) -> None:
    ctx.allreduce(np.ones(4, np.float32))
    if ctx.rank == 1:
        return
    group = ctx.group([0, 2])
    array = np.full(3, ctx.rank)
    assert ctx.broadcast(array, 2, group=group)[0] == 2
    assert ctx.all_gather(np.array([ctx.rank]), group=group).tolist() == [[0], [2]]
    with pytest.raises(pgasdl.RankError):
        ctx.broadcast(array, 1, group=group)
    group.delete()


@contract(ranks=2)
def test_disagreement(ctx: Any) -> None:
    ctx.broadcast(np.zeros(2))
    with pytest.raises(pgasdl.MismatchError, match=r"broadcast|all_gather"):
        if ctx.rank == 0:
            ctx.broadcast(np.zeros(4))
        else:
            ctx.all_gather(np.zeros(4))


@contract(ranks=2)
def test_the_same_call_continues(ctx: Any) -> None:
    array = np.full(900_000, ctx.rank, np.float64)
    ctx.broadcast(np.zeros(1))
    if ctx.rank == 0:
        with pytest.raises(pgasdl.PgasTimeoutError):
            ctx.all_gather(array, timeout=0.01)
        with pytest.raises(pgasdl.MismatchError, match=r"all_gather of .* timed out in"):
            ctx.broadcast(array)
        ctx.passive_send(b"go on", 1)
    else:
        ctx.passive_receive()
    result = ctx.all_gather(array)
    assert (result[0] == 0).all() and (result[1] == 1).all()
