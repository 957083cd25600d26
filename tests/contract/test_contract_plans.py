"""Every plan of the table, in every kind it offers, over every transport, against NumPy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract_harness import ORDERING, can_run, contract

import pgasdl
from pgasdl.plans import EXCHANGES, PLANS, blocks
from pgasdl.plans.checker.results import regions

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64)
# Options that change what a plan does, one set after another; its defaults are tried as well.
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "tree": ({"chunks": 3}, {"group_size": 2}),
    "kary": ({"arity": 3, "chunks": 2},),
    "chain": ({"chunks": 3},),
    "chain-chain": ({"chain_size": 2, "chunks": 2},),
    "chain-binomial": ({"chain_size": 2, "chunks": 2},),
    "halving-doubling": ({"group_size": 2},),
    "multi-stage": ({"ahead": 1},),
    "gdraa-nodes": ({"group_size": 2, "direct": 0}, {"group_size": (1, 3), "direct": 1}),
    "staged": ({"piece": 64}, {"piece": 64, "owners": 1}),
    "one-shot": ({"piece": 64},),
}
COUNTS = (0, 1, 37, 1001)


def runs(ctx: Any, kind: str, *, wire: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans of a kind, with options, that this transport can run."""
    for name, spec in PLANS.items():
        if kind not in spec.kinds or not can_run(ctx, spec) or (wire and not spec.wire):
            continue
        for options in ({}, *(OPTIONS.get(name, ()) if ctx.size > 2 else ())):
            if options.get("direct", 0) and (wire or not ctx.mapped):
                continue
            if kind in EXCHANGES or name != "halving-doubling" or not options:
                yield name, options


def operand(rank: int, n: int, dtype: Any, turn: int) -> Any:
    """Small multiples of 60: sums and means of up to 5 are exact in every dtype and order."""
    return (60 * np.random.default_rng([rank, n, turn]).integers(-3, 4, n)).astype(dtype)


def check_result(ctx: Any, kind: str, found: Any, root: int, turn: int) -> None:
    """The result that the kind promises, element by element."""
    n, dtype = found.size, found.dtype
    given = [operand(rank, n, np.float64, turn) for rank in range(ctx.size)]
    total = np.sum(given, axis=0) / (ctx.size if kind in ("average", "update") else 1)
    for region in regions(kind, ctx.rank, ctx.size, n, root):
        source = total if region.source is None else given[region.source]
        wanted = source[region.origin : region.origin + region.n].astype(dtype)
        mine = found[region.begin : region.begin + region.n]
        assert mine.tobytes() == wanted.tobytes(), (kind, dtype, region, mine, wanted)


def make_handle(ctx: Any, kind: str, array: Any, **more: Any) -> Any:
    if kind in ("average", "sum"):
        op = {"average": "mean"}.get(kind, kind)
        return ctx.allreduce_handle(array, op, **more)
    return ctx.collective_handle(kind, array, **more)


KINDS = ("average", "sum", "reduce", "broadcast", "reduce-scatter", "all-gather", "all-to-all")


@contract(ranks=(1, 2, 3, 5), deadline=150, on=ORDERING)
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan(ctx: Any, kind: str) -> None:
    """Several counts in flight, started and waited for in any order, three times over."""
    dice = random.Random(ctx.rank)
    for number, (plan, options) in enumerate(runs(ctx, kind)):
        root = (number + 1) % ctx.size if "root" in PLANS[plan].options else 0
        rooted = {"root": root} if root else {}
        dtype = DTYPES[number % (4 if kind == "average" else 6)]
        home = ctx.segment(sum(COUNTS) * 8 + 64 * len(COUNTS))
        arrays, begin = [], 0
        for n in COUNTS[plan == "gdraa-direct" :]:  # an empty array lies in no segment
            arrays.append(home.numpy(dtype, begin, n))
            begin += -(-n * 8 // 64) * 64
        handles = [
            make_handle(ctx, kind, array, plan=plan, **rooted, **options) for array in arrays
        ]
        assert {handle.plan for handle in handles} == {plan}
        for turn in range(3):
            for array in arrays:
                array[:] = operand(ctx.rank, array.size, dtype, turn)
            for handle in dice.sample(handles, len(handles)):
                handle.start()
            for handle in dice.sample(handles, len(handles)):
                handle.wait()
            for array in arrays:
                check_result(ctx, kind, array, root, turn)


@contract(ranks=3)
def test_out_of_place(ctx: Any) -> None:
    """Arrays anywhere, results anywhere else; the array stays as it is."""
    for kind in KINDS:
        plans = [None, *dict.fromkeys(name for name, _ in runs(ctx, kind))]
        for plan in (name for name in plans if name != "gdraa-direct"):
            for inside in (False, True):
                n = 131
                array = operand(ctx.rank, n, np.float32, 7)
                array.flags.writeable = False
                out = ctx.segment(1024).numpy(np.float32, 0, n) if inside else np.empty_like(array)
                handle = make_handle(ctx, kind, array, plan=plan, out=out)
                for _ in range(2):
                    handle()
                    check_result(ctx, kind, out, 0, 7)
                assert (array == operand(ctx.rank, n, np.float32, 7)).all()
    with pytest.raises(pgasdl.BufferRefusedError, match="out is"):
        ctx.allreduce_handle(array, op="mean", out=np.empty(n + 1, np.float32))
    with pytest.raises(pgasdl.PlanError, match="GradientExchange"):
        ctx.collective_handle("update", out)


@contract(ranks=(1, 3, 4))
def test_allreduce_with_every_plan(ctx: Any) -> None:
    """Calls of all plans and different counts in turns, with one inbox and one place for copies."""
    for plan in dict.fromkeys(name for name, _ in runs(ctx, "sum")):
        if plan == "gdraa-direct":
            continue
        if plan in ("one-shot", "gdraa-private") and (ctx.mapped or ctx.transport_of(0) == "verbs"):
            continue  # refused: test_contract_allreduce
        for turn, n in enumerate((1, 333, 17, 20_011, 40)):
            array = operand(ctx.rank, n, np.float32, turn)
            ctx.allreduce(array, "sum", plan=plan)
            check_result(ctx, "sum", array, 0, turn)


SHAPES = ((7,), (33, 3), (0,), (1000,))


def train(ctx: Any, plan: str, kind: str, options: dict[str, Any]) -> None:
    """Three iterations, layers ready and waited for in this rank's own order, without a barrier."""
    dice = random.Random(f"{ctx.rank} {plan}")
    layers = [(shape, np.float32) for shape in SHAPES]
    rates: list[Any] = []

    def update(block: pgasdl.Block) -> None:
        block.weights -= block.gradient
        rates.append(block)

    exchange = pgasdl.GradientExchange(
        ctx, layers, kind=kind, plan=plan, update=update if kind == "update" else None, **options
    )
    expected = [np.zeros(shape) for shape in SHAPES]
    for turn in range(3):
        for layer in dice.sample(range(len(SHAPES)), len(SHAPES)):
            view = exchange.gradient(layer)
            view[...] = operand(ctx.rank, view.size, np.float32, turn).reshape(view.shape)
            exchange.ready(layer)
        for layer in dice.sample(range(len(SHAPES)), len(SHAPES)):
            exchange.wait(layer)
            n = expected[layer].size
            given = [operand(rank, n, np.float64, turn) for rank in range(ctx.size)]
            root = options.get("root", 0)
            if options.get("rotate_root"):
                root = (root + layer) % ctx.size
            total = np.sum(given, axis=0) / (ctx.size if kind in ("average", "update") else 1)
            if kind == "broadcast":
                total = given[root]
            expected[layer] = total.reshape(SHAPES[layer]) + (
                expected[layer] if kind == "update" else 0
            )
            if kind == "reduce" and ctx.rank != root:
                continue
            found = -exchange.weight(layer) if kind == "update" else exchange.gradient(layer)
            assert (found == expected[layer]).all(), (plan, kind, options, turn, layer)
    exchange.close()


@contract(ranks=(2, 3, 5), deadline=150, on=ORDERING)
@pytest.mark.parametrize("kind", [*EXCHANGES, "reduce", "broadcast"])
def test_gradient_exchange(ctx: Any, kind: str) -> None:
    """Every plan by layer; plans with a root also with a rotating one; and a wire dtype."""
    for plan, options in runs(ctx, kind):
        train(ctx, plan, kind, dict(options))
    if kind in EXCHANGES:
        for plan, options in runs(ctx, kind, wire=True):
            train(ctx, plan, kind, {**options, "wire": "float16"})
    for plan in dict.fromkeys(name for name, _ in runs(ctx, kind) if "root" in PLANS[name].options):
        train(ctx, plan, kind, {"rotate_root": True, "root": ctx.size - 1})


@contract(ranks=3, on=ORDERING)
def test_s_caffe(ctx: Any) -> None:
    """Reduce by layer to the root, which updates; broadcast by layer, each awaited on demand."""
    layers = [(shape, np.float32) for shape in SHAPES]
    down = pgasdl.GradientExchange(ctx, layers, kind="broadcast", plan="tree")
    up = pgasdl.GradientExchange(ctx, layers, kind="reduce", plan="chain-binomial", chain_size=2)
    order = range(len(SHAPES))
    for layer in order:
        down.weight(layer)[...] = 0 if ctx.rank == 0 else np.nan
    expected = [np.zeros(shape) for shape in SHAPES]
    for turn in range(4):
        for layer in order:
            down.ready(layer)
        for layer in order:
            down.wait(layer)  # and then the forward pass of this layer
            assert (down.weight(layer) == expected[layer]).all()
        for layer in reversed(order):
            gradient = up.gradient(layer)
            values = operand(ctx.rank, gradient.size, np.float32, turn)
            gradient[...] = values.reshape(gradient.shape)
            up.ready(layer)
        for layer in order:
            up.wait(layer)
            if ctx.rank == 0:
                down.weight(layer)[...] -= up.gradient(layer)
            size = expected[layer].size
            total = sum(operand(rank, size, np.float64, turn) for rank in range(ctx.size))
            expected[layer] = expected[layer] - np.reshape(total, SHAPES[layer])
    with pytest.raises(pgasdl.PlanError, match="broadcast"):
        up.weight(0)


def test_the_regions_of_kinds() -> None:
    """All kinds cover what they promise, without overlaps."""
    for kind in (*KINDS, "update"):
        for size in (1, 3, 4):
            for n in (0, 5, 100):
                for rank in range(size):
                    spans = [(r.begin, r.n) for r in regions(kind, rank, size, n)]
                    full = kind not in ("reduce", "reduce-scatter")
                    whole = n if full or (kind == "reduce" and rank == 0) else 0
                    if kind == "reduce-scatter":
                        whole = blocks(n, size)[rank][1]
                    assert sum(length for _, length in spans) == whole
                    ends = [begin + length for begin, length in spans]
                    assert [begin for begin, _ in spans[1:]] == ends[:-1]
