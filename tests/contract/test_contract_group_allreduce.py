"""Group.combine: operators, dtypes, lengths, functions, disagreement, resumption."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract_harness import ORDERING, contract

import pgasdl

DTYPES = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "int16": np.int16, "uint64": np.uint64,
}  # fmt: skip
UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
# A sample of 1..255; edges of vectors, and of the slot that travels at once (8 KiB).
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 254, 255)
LONG = (1023, 1024, 1025, 2048, 2049, 4097, 10_000)


def operand(rank: int, n: int, dtype: Any) -> Any:
    """Small integers: every operator's result is exact in every dtype."""
    return np.random.default_rng([rank, n]).integers(1, 5, n).astype(dtype)


def expected(size: int, n: int, dtype: Any, op: str) -> Any:
    total = operand(0, n, np.float64)
    for rank in range(1, size):
        total = UFUNCS["sum" if op == "mean" else op](total, operand(rank, n, np.float64))
    return (total / size if op == "mean" else total).astype(dtype)


@contract(ranks=3)
@pytest.mark.parametrize("name", list(DTYPES))
def test_operators(ctx: Any, name: str) -> None:
    dtype = DTYPES[name]
    floating = name in ("float32", "float64", "float16", "bfloat16")
    for n in LENGTHS if ctx.transport_of(0) == "shm" else LENGTHS[::3]:
        for op in UFUNCS:
            result = ctx.world.combine(operand(ctx.rank, n, dtype), op)
            assert result.dtype == dtype
            assert result.tobytes() == expected(ctx.size, n, dtype, op).tobytes()
    if floating:
        result = ctx.world.combine(4 * operand(ctx.rank, 255, dtype), "mean")
        exact = 4 * expected(ctx.size, 255, np.float64, "mean")
        assert np.allclose(result.astype(np.float64), exact, rtol=0.01)
    else:
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.world.combine(operand(ctx.rank, 3, dtype), "mean")


@contract(ranks=2, on=ORDERING)
@pytest.mark.parametrize("name", ["float64", "bfloat16", "int32"])
def test_longer_than_a_slot(ctx: Any, name: str) -> None:
    dtype = DTYPES[name]
    for n in LONG:
        result = ctx.world.combine(operand(ctx.rank, n, dtype), "sum")
        assert result.tobytes() == expected(ctx.size, n, dtype, "sum").tobytes()


@contract(ranks=3)
def test_shapes_and_the_argument(ctx: Any) -> None:
    """A new array of the same shape; the argument stays as it is."""
    for shape in ((), (1,), (3, 5), (2, 0, 3), (0,), (2, 3, 4, 5)):
        array = np.full(shape, ctx.rank + 1.0, np.float32)
        result = ctx.world.combine(array)
        assert result.shape == shape
        assert (result == 6).all()
        assert (array == ctx.rank + 1).all()
        assert result is not array
    assert ctx.world.combine([1, 2, ctx.rank]).tolist() == [3, 6, 3]
    assert ctx.world.combine(2.5) == 7.5
    frozen = np.ones(3)
    frozen.flags.writeable = False
    assert (ctx.world.combine(frozen) == 3).all()


@contract(ranks=3)
def test_half_precision_against_float64(ctx: Any) -> None:
    """Summed in a wider dtype, rounded once: at most one unit in the last place from exact."""
    for dtype, bits in ((np.float16, 11), (ml_dtypes.bfloat16, 8)):
        values = [
            np.random.default_rng(rank).normal(0, 3, 1000).astype(dtype) for rank in range(ctx.size)
        ]
        result = ctx.world.combine(values[ctx.rank]).astype(np.float64)
        exact = np.sum([v.astype(np.float64) for v in values], axis=0)
        magnitude = np.max([np.abs(v.astype(np.float64)) for v in values], axis=0)
        bound = np.maximum(np.abs(exact), magnitude * 2.0**-12) * 2.0 ** (1 - bits) + 1e-7
        assert (np.abs(result - exact) <= bound).all()


@contract(ranks=4)
def test_same_bits_everywhere(ctx: Any) -> None:
    values = np.random.default_rng(ctx.rank).normal(0, 1e3, 5000).astype(np.float32)
    first = ctx.world.combine(values, "mean").tobytes()
    assert len(set(ctx.world.allgather("bits", first[:1024]))) == 1
    for _ in range(3):
        assert ctx.world.combine(values, "mean").tobytes() == first


@contract(ranks=3)
def test_functions(ctx: Any) -> None:
    """A function of two arrays, applied in the order of the ranks."""
    for n in (1, 17, 255, 3000):
        array = operand(ctx.rank, n, np.float64)
        assert (ctx.world.combine(array, np.maximum) == expected(3, n, np.float64, "max")).all()
    order = ctx.world.combine(np.array([ctx.rank + 1]), lambda a, b: 10 * a + b)
    assert order[0] == 123
    complex_sum = ctx.world.combine(np.array([1 + ctx.rank * 1j]))
    assert complex_sum[0] == 3 + 3j


@contract(ranks=3)
def test_structured_elements(ctx: Any) -> None:
    """16-byte records through a function, and some that are larger than a slot."""
    dtype = np.dtype([("value", np.float64), ("rank", np.int64)])

    def larger(a: Any, b: Any) -> Any:
        return np.where(b["value"] > a["value"], b, a)

    records = np.zeros(1500, dtype)
    records["value"] = np.arange(1500) % 3 == ctx.rank
    records["rank"] = ctx.rank
    result = ctx.world.combine(records, larger)
    assert (result["rank"] == np.arange(1500) % 3).all()
    assert (result["value"] == 1).all()
    wide = np.full(3, bytes([ctx.rank + 1]) * 8200, np.dtype("V8200"))
    assert (ctx.world.combine(wide, lambda _, last: last) == np.void(b"\3" * 8200)).all()
    with pytest.raises(pgasdl.BufferRefusedError):
        ctx.world.combine(np.array([object()]))


@contract(ranks=2)
def test_refused(ctx: Any) -> None:
    for array in (np.zeros((4, 4)).T, np.zeros(8)[::2]):
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.world.combine(array)
    for op in ("SUM", "average", "", "xor"):
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.world.combine(np.ones(3), op)
    for op in (None, 5, b"sum"):
        with pytest.raises((TypeError, pgasdl.BufferRefusedError)):
            ctx.world.combine(np.ones(3), op)
    assert ctx.world.combine(np.ones(3))[0] == 2


def cases(rank: int) -> dict[str, tuple[Any, Any]]:
    """Calls in which rank 1 differs from the others."""
    one = rank == 1
    return {
        "op": (np.ones(10), "max" if one else "sum"),
        "dtype": (np.ones(10, np.int64 if one else np.float64), "sum"),
        "size": (np.ones(11 if one else 10), "sum"),
        "shape": (np.ones((2, 5) if one else (5, 2)), "sum"),
        "chunks": (np.ones(5000 if one else 10), "sum"),
        "function": (np.ones(10), np.add if one else "sum"),
    }


@contract(ranks=3)
@pytest.mark.parametrize("what", ["op", "dtype", "size", "shape", "chunks", "function"])
def test_disagreement(ctx: Any, what: str) -> None:
    """Every rank is soon told which rank is in which call; then the group goes on working."""
    array, op = cases(ctx.rank)[what]
    begin = time.monotonic()
    with pytest.raises(pgasdl.MismatchError, match=r"rank \d is in combine"):
        ctx.world.combine(array, op)
    assert time.monotonic() - begin < 5
    assert ctx.world.combine(np.ones(4))[0] == 3


@contract(ranks=2, on=ORDERING)
def test_resumes_after_timeout(ctx: Any) -> None:
    """Short and long arrays: the same call goes on where it stopped."""
    flag = ctx.segment(0)
    for turn, n in enumerate((3, 5000)):
        array = operand(ctx.rank, n, np.float64)
        if ctx.rank == 0:
            for timeout in (0.02, 0):
                with pytest.raises(pgasdl.PgasTimeoutError, match="rank 1"):
                    ctx.world.combine(array, timeout=timeout)
            ctx.notify(1, flag, turn)
        else:
            ctx.notify_waitsome(flag, turn, 1)
        result = ctx.world.combine(array)
        assert (result == expected(2, n, np.float64, "sum")).all()


@contract(ranks=2, on=ORDERING)
def test_short_patience(ctx: Any) -> None:
    """Arrays of several chunks, timeouts of 0.2 ms: nothing is added twice or left out."""
    for turn in range(10):
        array = operand(ctx.rank, 4000 + turn, np.int64)
        while True:
            try:
                result = ctx.world.combine(array, timeout=0.0002)
                break
            except pgasdl.PgasTimeoutError:
                pass
        assert (result == expected(2, 4000 + turn, np.int64, "sum")).all()


@contract(ranks=3, on=ORDERING)
def test_allgather(ctx: Any) -> None:
    for blob in (b"", bytes([ctx.rank]) * 1024):
        assert ctx.world.allgather("blobs", blob) == [
            blob and bytes([rank]) * 1024 for rank in range(3)
        ]
    lengths = (1025, 0, 5000)
    assert ctx.world.allgather("of many pieces", bytes(lengths[ctx.rank])) == [
        bytes(length) for length in lengths
    ]
    with pytest.raises(pgasdl.MismatchError, match="rank"):
        ctx.world.allgather("even" if ctx.rank % 2 == 0 else "odd", b"")


@contract(ranks=(18, 16, 33), on=tuple(row for row in ORDERING if row.threads))
def test_many_members(ctx: Any) -> None:
    """Above 16 members pass on what others sent: results, short patience and disagreement."""
    late = ctx.size - 3
    flag = ctx.segment(0)
    for turn, n in enumerate((3, 2500)):
        array = operand(ctx.rank, n, np.int64)
        if ctx.rank == late:
            for rank in range(ctx.size):
                if rank != late:
                    ctx.notify_waitsome(flag, rank, 1)
                    ctx.notify_reset(flag, rank)
        else:
            for timeout in (0.01, 0):
                with pytest.raises(
                    pgasdl.PgasTimeoutError, match=r"nothing (yet from|sent yet to) rank \d"
                ):
                    ctx.world.combine(array, timeout=timeout)
            ctx.notify(late, flag, ctx.rank)
        result = ctx.world.combine(array)
        assert (result == expected(ctx.size, n, np.int64, "sum")).all(), turn
    lengths = [(rank * 397) % 3000 for rank in range(ctx.size)]
    blobs = ctx.world.allgather("lengths", bytes([ctx.rank]) * lengths[ctx.rank])
    assert blobs == [bytes([rank]) * n for rank, n in enumerate(lengths)]
    other = "rank 0 is in many" if ctx.rank == late else f"but rank {late} is in few:"
    with pytest.raises(pgasdl.MismatchError, match=other):
        ctx.world.allgather("few" if ctx.rank == late else "many", b"")
    assert ctx.world.allgather("again", b"1") == [b"1"] * ctx.size
