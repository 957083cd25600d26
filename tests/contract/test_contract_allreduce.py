"""ctx.allreduce and persistent handles: plans, dtypes, sizes, bits, disagreement."""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from array import array as growing
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract_harness import MAPPED, TRANSPORTS, contract
from support.patience import until

import pgasdl

DTYPES = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16, "int32": np.int32, "int64": np.int64,
}  # fmt: skip
# Where every rank maps every other's memory.
STAGES = (*MAPPED, *(row for row in TRANSPORTS if row.name in ("mpich", "openmpi")))
# Odd counts, and counts around a cache line, what is staged at once, and a piece (of float32).
SIZES = (1, 2, 3, 7, 15, 17, 63, 65, 1023, 1024, 1025, 65535, 65537)


def operand(rank: int, n: int, dtype: Any) -> Any:
    """Small integers, multiples of 12: sums and means are exact in every dtype and order."""
    return (12 * np.random.default_rng([rank, n]).integers(-3, 4, n)).astype(dtype)


def expected(size: int, n: int, dtype: Any, op: str) -> Any:
    total = np.sum([operand(rank, n, np.float64) for rank in range(size)], axis=0)
    return (total / size if op == "mean" else total).astype(dtype)


def in_segment(ctx: Any, n: int, dtype: Any) -> Any:
    itemsize = np.dtype(dtype).itemsize
    return ctx.segment(max(64, n * itemsize)).numpy(dtype, 0, n)


def usable_plans(ctx: Any, inside: bool) -> list[str | None]:
    """One plan per way to reach an array; test_contract_plans has all. None: ctx selects one."""
    names = ["gdraa", "tree", "halving-doubling"]
    if ctx.mapped:
        names += ["staged", "gdraa-direct"]
    elif ctx.transport_of(0) != "verbs":
        names += ["one-shot", "gdraa-private"]
    return [None, *(name for name in names if inside or name != "gdraa-direct")]


@contract(ranks=(1, 2, 3))
@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_other_reductions(ctx: Any, op: str) -> None:
    """By every plan, as calls and as handles; NaN goes through."""
    reduce = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    for dtype in (np.float32, np.float16, np.int64):
        for n in (1, 1001, 300_000):
            given = [
                (operand(rank, n, np.float64) / 12 + 1).astype(dtype) for rank in range(ctx.size)
            ]
            if dtype is np.float32:
                given[-1][0] = np.nan
            total = given[0]
            for each in given[1:]:
                total = reduce(total, each)
            for inside in (False, True):
                array = in_segment(ctx, n, dtype) if inside else np.empty(n, dtype)
                for plan in usable_plans(ctx, inside):
                    array[:] = given[ctx.rank]
                    ctx.allreduce(array, op, plan=plan)
                    assert np.array_equal(array, total, equal_nan=dtype is not np.int64), plan
                array[:] = given[ctx.rank]
                with ctx.allreduce_handle(array, op) as handle:
                    handle()
                assert np.array_equal(array, total, equal_nan=dtype is not np.int64)


@contract(ranks=(1, 2, 3))
@pytest.mark.parametrize("inside", [False, True])
def test_dtypes(ctx: Any, inside: bool) -> None:
    for dtype in DTYPES.values():
        array = in_segment(ctx, 1001, dtype) if inside else np.empty(1001, dtype)
        for op in ("sum", "mean"):
            if op == "mean" and np.dtype(dtype).kind == "i":
                continue
            for plan in (None, "gdraa"):
                array[:] = operand(ctx.rank, 1001, dtype)
                assert ctx.allreduce(array, op, plan=plan) is array
                assert array.tobytes() == expected(ctx.size, 1001, dtype, op).tobytes()


@contract(ranks=(2, 3))
@pytest.mark.parametrize("inside", [False, True])
def test_sizes(ctx: Any, inside: bool) -> None:
    sizes = SIZES if ctx.transport_of(0) == "shm" else SIZES[::3]
    for n in sizes:
        array = in_segment(ctx, n, np.float32) if inside else np.empty(n, np.float32)
        for op in ("mean", "sum"):
            array[:] = operand(ctx.rank, n, np.float32)
            ctx.allreduce(array, op)
            assert (array == expected(ctx.size, n, np.float32, op)).all()


@contract(ranks=(2, 3))
@pytest.mark.parametrize("inside", [False, True])
def test_plans_by_name(ctx: Any, inside: bool) -> None:
    """Plans that this transport can run; names that are not in the table are refused."""
    plans = usable_plans(ctx, inside)
    for n in (1, 5, 4099, 200_003):
        array = in_segment(ctx, n, np.float32) if inside else np.empty(n, np.float32)
        for plan in plans:
            for _ in range(2):
                array[:] = operand(ctx.rank, n, np.float32)
                ctx.allreduce(array, op="mean", plan=plan)
                assert (array == expected(ctx.size, n, np.float32, "mean")).all()
    for plan in {"staged", "one-shot", "gdraa-private", "gdraa-direct", "all-to-all"} - set(plans):
        with pytest.raises(pgasdl.PlanError):
            ctx.allreduce(np.ones(3, np.float32), op="mean", plan=plan)
    for plan in ("GDRAA", "ring of fire"):
        with pytest.raises(pgasdl.PlanError, match="gdraa"):
            ctx.allreduce(np.ones(3, np.float32), op="mean", plan=plan)


@contract(ranks=(2, 3, 4))
def test_same_bits_everywhere_and_always(ctx: Any) -> None:
    """Random numbers, all plans: one result on every rank and in every run."""
    for n in (1000, 70_001):
        values = np.random.default_rng([ctx.rank, n]).normal(0, 1e3, n).astype(np.float32)
        exact = np.mean(
            [np.random.default_rng([rank, n]).normal(0, 1e3, n) for rank in range(ctx.size)], axis=0
        )
        for inside in (False, True):
            array = in_segment(ctx, n, np.float32) if inside else np.empty(n, np.float32)
            for plan in usable_plans(ctx, inside):
                bits = set()
                for _ in range(3):
                    array[:] = values
                    ctx.allreduce(array, op="mean", plan=plan)
                    bits.add(array.tobytes())
                assert len(bits) == 1
                digest = hashlib.sha256(array).digest()
                assert len(set(ctx.world.allgather("digest", digest))) == 1
                assert np.allclose(array, exact, rtol=1e-4, atol=1e-3)


@contract(ranks=2, on=[row for row in TRANSPORTS if row.name in ("shm", "unmapped")])
def test_ever_new_sizes_need_no_more_memory(ctx: Any) -> None:
    """The binding made first is given up, and made again when it is wanted again."""
    array = np.empty(1500, np.float32)
    for n in (*range(1, 1400), *range(1, 10), 1399):
        array[:n] = ctx.rank + n
        ctx.allreduce(array[:n])
        assert array[0] == array[n - 1] == 2 * n + 1
        bound = re.search(r"(\d+) signatures", ctx.describe()) if n % 100 == 99 else None
        assert bound is None or int(bound[1]) <= min(n, 1024)


@contract(ranks=(2, 3, 4), on=STAGES)
@pytest.mark.parametrize("owners", [0, 1])
def test_whoever_reduces_a_staged_array(ctx: Any, owners: int) -> None:
    """Owners, or all: the bits of ctx.allreduce, on every rank, in every execution."""
    for n in (1, 17, 70_001):
        values = np.random.default_rng([ctx.rank, n]).normal(0, 1e3, n).astype(np.float32)
        wanted = ctx.allreduce(values.copy(), "mean", plan="staged").tobytes()
        array = np.empty(n, np.float32)
        with ctx.allreduce_handle(array, "mean", plan="staged", owners=owners) as handle:
            for _ in range(3):
                array[:] = values
                handle.run()
                assert array.tobytes() == wanted
        digest = hashlib.sha256(array).digest()
        assert len(set(ctx.world.allgather("digest", digest))) == 1


@contract(ranks=2)
def test_half_precision_against_float64(ctx: Any) -> None:
    for dtype, ulp in ((np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)):
        values = [np.random.default_rng(r).normal(1, 0.1, 5000).astype(dtype) for r in range(2)]
        exact = (values[0].astype(np.float64) + values[1].astype(np.float64)) / 2
        for plan in usable_plans(ctx, False):
            array = values[ctx.rank].copy()
            ctx.allreduce(array, op="mean", plan=plan)
            assert (np.abs(array.astype(np.float64) - exact) <= exact * ulp).all()


@contract(ranks=2)
def test_tensors(ctx: Any) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        tensor = torch.full((5, 7), 2 * ctx.rank + 2, dtype=dtype)
        assert ctx.allreduce(tensor, "sum") is tensor
        assert (tensor == 6).all()
    parameter = torch.nn.Parameter(torch.ones(9) * ctx.rank)
    ctx.allreduce(parameter.data, op="mean")
    assert (parameter == 0.5).all()
    with pytest.raises(pgasdl.BufferRefusedError):
        ctx.allreduce(torch.ones(4, 4).T, op="mean")


@contract(ranks=2)
def test_arguments_of_a_repeated_call(ctx: Any) -> None:
    """By place and by name alike, new and known; wrong ones are refused although it is known."""
    assert list(inspect.signature(pgasdl.Context.allreduce).parameters) == [
        "self", "array", "op", "group", "plan", "timeout", "stream",
    ]  # fmt: skip
    array = np.empty(3, np.float32)
    for _ in range(3):
        for given, named in (
            ((array,), {}),
            ((array, "sum"), {}),
            ((array,), {"op": "sum", "timeout": 5.0}),
            ((array,), {"timeout": 5, "plan": None}),
            ((), {"array": array, "group": ctx.world}),
        ):
            array[:] = ctx.rank + 1
            assert ctx.allreduce(*given, **named) is array
            assert (array == 3).all()
    for given, named in (((), {}), ((array, "sum", None), {}), ((array,), {"opp": "sum"})):
        with pytest.raises(TypeError):
            ctx.allreduce(*given, **named)
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            ctx.allreduce(array, timeout=timeout)


@contract(ranks=2)
def test_refused(ctx: Any) -> None:
    """Nothing is copied silently, and the array stays as it was."""
    frozen = np.ones(8, np.float32)
    frozen.flags.writeable = False
    bad = [
        np.ones((4, 4), np.float32).T, np.ones(8, np.float32)[::2], frozen, np.ones(4, np.uint8),
        np.ones(4, bool), np.ones(4, np.complex64), [1.0, 2.0], 3.0, None, "text", b"bytes",
    ]  # fmt: skip
    for array in bad:
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array, op="mean")
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce_handle(array, op="mean")
    for op in ("maximum", "avg", "", None, 5):
        with pytest.raises((pgasdl.BufferRefusedError, TypeError)):
            ctx.allreduce(np.ones(4, np.float32), op)
    with pytest.raises(pgasdl.BufferRefusedError, match="integers"):
        ctx.allreduce(np.ones(4, np.int32), "mean")
    array = np.full(4, ctx.rank + 1.0)
    assert (ctx.allreduce(array, op="mean") == 1.5).all()


@contract(ranks=2)
def test_refused_although_known(ctx: Any) -> None:
    """Repeated calls take a shortcut, which must still see what changed in the array."""
    for inside in (False, True):
        array = in_segment(ctx, 64, np.float32) if inside else np.ones(64, np.float32)
        for _ in range(3):
            ctx.allreduce(array, op="mean")
        array.flags.writeable = False
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array, op="mean")
        array.flags.writeable = True
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array[::2], op="mean")
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array.view(np.uint32), op="mean")
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array.view(array.dtype.newbyteorder()), op="mean")
        with pytest.raises(pgasdl.BufferRefusedError):
            ctx.allreduce(array.view(np.int32), op="mean")  # the mean of integers
        for _ in range(2):
            ints = array.view(np.int32)
            ints[:] = ctx.rank + 1
            assert (ctx.allreduce(ints, "sum") == 3).all()
            array[:] = ctx.rank + 1
            assert (ctx.allreduce(array, "sum") == 3).all()
            array[:] = 1
            assert (ctx.allreduce(array[:32], op="mean") == 1).all()


@contract(ranks=2)
def test_empty(ctx: Any) -> None:
    for plan in (None, "gdraa", "tree"):
        assert ctx.allreduce(np.zeros(0, np.float32), op="mean", plan=plan).size == 0
        handle = ctx.allreduce_handle(np.zeros(0, np.float32), op="mean", plan=plan)
        handle()
        handle()


@contract(ranks=2)
def test_empty_again(ctx: Any) -> None:
    """No execution is counted, whether a rank comes with the same array or with another."""
    ours = [np.zeros(0, np.float32) for _ in range(2)]
    for number in range(3):
        ctx.allreduce(ours[number % 2 if ctx.rank else 0])
        array = np.full(3, ctx.rank, np.float32)
        assert (ctx.allreduce(array) == sum(range(ctx.size))).all()


@contract(ranks=3)
def test_in_a_group(ctx: Any) -> None:
    members = [0, 2]
    if ctx.rank in members:
        group = ctx.group(members)
        for n in (3, 5000):
            array = np.full(n, ctx.rank + 1.0, np.float32)
            assert (ctx.allreduce(array, "sum", group=group) == 4).all()
            handle = ctx.allreduce_handle(array, "sum", group=group)
            handle()
            assert (array == 8).all()
    alone = ctx.group([ctx.rank])
    array = np.full(100, ctx.rank + 1.0, np.float32)
    ctx.allreduce(array, op="mean", group=alone)
    assert (array == ctx.rank + 1).all()


def differing(ctx: Any) -> dict[str, list[tuple[Any, str, str | None]]]:
    """Sequences of calls in which the last rank differs."""
    odd = int(ctx.rank == ctx.size - 1)
    ones = lambda n, dtype=np.float32: np.ones(n, dtype)  # noqa: E731
    inside = in_segment(ctx, 9001, np.float32)
    a, b = (ones(100), "mean", None), (ones(300), "mean", None)
    where: dict[str, list[tuple[Any, str, str | None]]] = {
        "size in a segment": [(inside[: 1000 + odd], "sum", "gdraa-direct")],
        "place in a segment": [(inside[odd : 1000 + odd], "sum", "gdraa-direct")],
        "segment or array": [(inside[:9000] if odd else ones(9000), "sum", None)],
    }
    return (where if ctx.mapped else {}) | {
        "size": [(ones(1000 + odd), "mean", None)],
        "size, up and down a tree": [(ones(1000 + odd), "sum", "tree")],
        "much-larger": [(ones(100_000 if odd else 100), "mean", None)],
        "dtype": [(ones(500, np.float64) if odd else ones(1000), "mean", None)],
        "op": [(ones(1000), "sum" if odd else "mean", None)],
        "order": [b, a] if odd else [a, b],
        "plan": [(ones(1000), "mean", "tree" if odd else "gdraa")],
        "later": [a, a, b, a if odd else b],
    }


DIFFERING = (
    "size", "size, up and down a tree", "much-larger", "dtype", "op", "order", "plan", "later",
    "size in a segment", "place in a segment", "segment or array",
)  # fmt: skip


@contract(ranks=(2, 3), meet=False)
@pytest.mark.parametrize("what", DIFFERING)
def test_disagreement(ctx: Any, what: str) -> None:
    """Every rank hears of it before its deadline, and what it runs itself; none gets wrong sums."""
    if (calls := differing(ctx).get(what)) is None:
        return  # where nothing is mapped all is copied, wherever it lies
    ctx.allreduce(np.ones(7, np.float32), op="mean")
    own = r"the same on all ranks; this rank runs allreduce float\d\d x \d+ (mean|sum|max|min)\b"
    with pytest.raises(pgasdl.MismatchError, match=own):
        for array, op, plan in calls:
            ctx.allreduce(array, op, plan=plan)
        ctx.allreduce(np.ones(9, np.float32), op="mean")
    ctx._job.exchange("told", b"")  # nobody learns of it by another one's end


@contract(ranks=2, meet=False)
@pytest.mark.parametrize("what", ["size", "dtype", "op", "later"])
def test_a_mismatch_says_what_the_other_runs(ctx: Any, what: str) -> None:
    """Where ranks map each other's memory; what differs only in its plan is told whole."""
    ctx.allreduce(np.ones(7, np.float32), op="mean")
    with pytest.raises(pgasdl.MismatchError) as caught:
        for array, op, plan in differing(ctx)[what]:
            ctx.allreduce(array, op, plan=plan)
        ctx.allreduce(np.ones(9, np.float32), op="mean")
    told = re.search(
        rf"this rank runs (allreduce .*), rank {1 - ctx.rank} (allreduce .*)", str(caught.value)
    )
    assert ctx.world.mapped is False or (told is not None and told[1] != told[2])
    ctx._job.exchange("told", b"")


@contract(ranks=2, on=MAPPED, meet=False)
@pytest.mark.parametrize("other", ["allreduce float32 x 8 sum", "notify_waitsome on notifications"])
def test_a_timeout_says_what_the_other_waits_for(ctx: Any, other: str) -> None:
    """A barrier meets an allreduce, or a wait for a flag; each rank goes on until both know."""
    segment, array = ctx.segment(8), np.ones(8, np.float32)
    ctx.allreduce(array)
    calls = {
        "allreduce float32 x 8 sum": partial(ctx.allreduce, array),
        "barrier": ctx.barrier,
        "notify_waitsome on notifications": partial(ctx.notify_waitsome, segment, 5, 1),
    }
    mine, theirs = ("barrier", other) if ctx.rank == 0 else (other, "barrier")
    heard: list[bool] = []
    told: list[int] = []

    def both_have_heard() -> bool:
        with pytest.raises(pgasdl.PgasTimeoutError) as late:
            calls[mine](timeout=0.1)
        if f"; rank {1 - ctx.rank} waits in {theirs}" in str(late.value) and not heard:
            ctx.notify(1 - ctx.rank, segment, 0)
            heard.append(True)
        told.append(ctx.notify_reset(segment, 0))
        return bool(heard) and any(told)

    assert until(both_have_heard)
    ctx._job.exchange("heard", b"")  # a rank that left would end the other's wait


@contract(ranks=2)
def test_resumes_after_timeout(ctx: Any) -> None:
    """The same call goes on; meanwhile another array is refused."""
    flag = ctx.segment(0)
    ctx.allreduce(np.ones(8, np.float32), op="mean")
    turn = 0
    for inside in (False, True):
        for plan in usable_plans(ctx, inside):
            for n in (100, 140_001):
                array = in_segment(ctx, n, np.float32) if inside else np.empty(n, np.float32)
                array[:] = operand(ctx.rank, n, np.float32)
                ctx.barrier()
                if ctx.rank == 0:
                    for timeout in (0.01, 0):
                        with pytest.raises(pgasdl.PgasTimeoutError):
                            ctx.allreduce(array, op="mean", plan=plan, timeout=timeout)
                    with pytest.raises(pgasdl.MismatchError, match="timed out"):
                        ctx.allreduce(np.ones(5, np.float32), op="mean", timeout=0)
                    ctx.notify(1, flag, turn)
                else:
                    ctx.notify_waitsome(flag, turn, 1)
                ctx.allreduce(array, op="mean", plan=plan)
                assert (array == expected(2, n, np.float32, "mean")).all()
                turn += 1


@contract(ranks=(2, 3))
@pytest.mark.parametrize("inside", [False, True])
def test_handles_in_flight_in_any_order(ctx: Any, inside: bool) -> None:
    """Started in different orders on different ranks, waited for in others."""
    sizes = (5, 1000, 3, 20_000, 77, 4096)
    for plan in usable_plans(ctx, inside):
        arrays = [
            in_segment(ctx, n, np.float32) if inside else np.empty(n, np.float32) for n in sizes
        ]
        handles = [ctx.allreduce_handle(array, "sum", plan=plan) for array in arrays]
        for turn in range(3):
            for array, n in zip(arrays, sizes, strict=True):
                array[:] = (turn + 1) * operand(ctx.rank, n, np.float32)
            order = np.random.default_rng([ctx.rank, turn]).permutation(len(sizes))
            for number in order:
                handles[number].start()
            for number in reversed(order):
                handles[number].wait()
            for array, n in zip(arrays, sizes, strict=True):
                assert (array == (turn + 1) * expected(ctx.size, n, np.float32, "sum")).all()


def times_out(handle: Any, words: str) -> None:
    """Every wait ends in a timeout, soon in one with ``words``: the steps before take a while."""
    end = time.monotonic() + 10
    while True:
        with pytest.raises(pgasdl.PgasTimeoutError) as caught:
            handle.wait(timeout=0.02)
        if words in str(caught.value):
            return
        assert time.monotonic() < end, caught.value


@contract(ranks=2)
def test_a_handle_holds_its_buffer(ctx: Any) -> None:
    """Arrays that could move may not, until the handle is closed; a call holds them no longer."""
    given, result = growing("f", [1.0] * 1000), growing("f", [0.0] * 1000)
    handle = ctx.allreduce_handle(given, out=result)
    for buffer in (given, result):
        with pytest.raises(BufferError):
            buffer.append(0.0)
    handle()
    assert result.tolist() == [2.0] * 1000
    handle.close()
    for _ in range(2):
        ctx.allreduce(result)
    given.append(0.0)
    result.append(0.0)


@contract(ranks=2)
def test_handle_misuse(ctx: Any) -> None:
    """Started twice, and ranks whose handles differ."""
    array = np.ones(1000, np.float32)
    handle = ctx.allreduce_handle(array, "sum", plan="gdraa")
    flag = ctx.segment(0)
    if ctx.rank == 0:
        handle.start()
        with pytest.raises(pgasdl.PlanError, match="under way"):
            handle.start()
        times_out(handle, "waits for notification")
        ctx.notify(1, flag, 0)
        handle.wait()
    else:
        ctx.notify_waitsome(flag)
        handle()
    assert (array == 2).all()
    for mine in (
        lambda: ctx.allreduce_handle(np.ones(10 + ctx.rank, np.float32), op="mean"),
        lambda: ctx.allreduce_handle(array) if ctx.rank else ctx.segment(64),
        lambda: ctx.allreduce_handle(np.ones(10, [np.float32, np.float64][ctx.rank]), op="mean"),
        lambda: ctx.allreduce_handle(np.ones(10, np.float32), ["mean", "sum"][ctx.rank]),
        lambda: ctx.allreduce_handle(
            np.ones(10, np.float32), op="mean", plan=["tree", "gdraa"][ctx.rank]
        ),
    ):
        with pytest.raises(pgasdl.MismatchError):
            mine()
    with pytest.raises(pgasdl.PlanError):
        ctx.allreduce_handle(array, op="mean", plan="no such plan")
    with pytest.raises(pgasdl.PlanError):
        ctx.allreduce_handle(array, op="mean", plan="gdraa-direct")  # not in a segment


@contract(ranks=3)
def test_timeout_names_who_owes(ctx: Any) -> None:
    """Rank 2 stays away: the others' Timeouts name it, whatever the plan."""
    flag = ctx.segment(0)
    for turn, plan in enumerate(usable_plans(ctx, False)):
        array = np.ones(5000, np.float32)
        handle = ctx.allreduce_handle(array, op="mean", plan=plan)
        if ctx.rank == 0:
            handle.start()
            times_out(handle, "owed by rank 2")
            ctx.notify(2, flag, turn)
            handle.wait()
        else:
            if ctx.rank == 2:
                ctx.notify_waitsome(flag, turn, 1)
            handle()
