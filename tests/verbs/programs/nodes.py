"""Two hosts with several ranks each: node-aware plans, groups inside and across hosts, the tuner.

``nodes.py exchange|tune|policy [FILE]``; each rank says what it checked. All values are small
multiples of 60, whose sums and means are exact in every dtype and order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import pgasdl
from pgasdl import Block, Context, Group, PlanError
from pgasdl.collectives.bound import options_for
from pgasdl.plans import EXCHANGES, PLANS
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.plans import PlanBench
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.tuner import choices_here

SHAPES = ((7,), (33, 3), (0,), (1,), (5000,), (640,))
N_ITERATIONS = 4
NODE = 2  # ranks on each host
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "gdraa-nodes": ({}, {"group_size": NODE, "direct": 0}, {"group_size": 1, "direct": 0}),
    "chain-chain": ({}, {"chain_size": NODE, "chunks": 3}),
    "chain-binomial": ({}, {"chain_size": NODE}),
    "halving-doubling": ({}, {"group_size": NODE}),
    "tree": ({}, {"chunks": 3, "root": 1}),
}


def given(rank: int, layer: int, turn: int, dtype: Any) -> Any:
    """A rank's gradient."""
    generator = np.random.default_rng([rank, layer, turn])
    return (60 * generator.integers(-3, 4, SHAPES[layer])).astype(dtype)


def mean(group: Group, layer: int, turn: int, dtype: Any) -> Any:
    total = np.sum([given(rank, layer, turn, np.float64) for rank in group.ranks], axis=0)
    return (total / group.size).astype(dtype)


def descend(block: Block) -> None:
    block.weights -= block.gradient


def exchange(group: Group, plan: str, kind: str, dtype: Any, **more: Any) -> int:
    """Run some iterations, layers ready in each rank's own order; return the inboxes' bytes."""
    ctx = group.context
    update = descend if kind == "update" else None
    layers = [(shape, dtype) for shape in SHAPES]
    own = pgasdl.GradientExchange(
        ctx, layers, plan=plan, kind=kind, update=update, group=group, bucket_bytes=1000, **more
    )
    dice = np.random.default_rng(ctx.rank)
    weights = [np.zeros(shape, dtype) for shape in SHAPES]
    for turn in range(N_ITERATIONS):
        for layer in dice.permutation(len(SHAPES)):
            own.gradient(layer)[...] = given(ctx.rank, layer, turn, dtype)
            own.ready(layer)
        for layer in dice.permutation(len(SHAPES)):
            own.wait(layer)
            wanted = mean(group, layer, turn, dtype) * (group.size if kind == "sum" else 1)
            found = own.gradient(layer)
            if kind == "update":
                wanted = weights[layer] = weights[layer] - wanted
                found = own.weight(layer)
            assert np.array_equal(found, wanted), (plan, kind, more, ctx.rank, turn, layer)
    own.close()
    return own.inbox_bytes


def variants(group: Group) -> Iterator[tuple[str, dict[str, int]]]:
    for name, spec in PLANS.items():
        if set(EXCHANGES) <= set(spec.kinds) and (group.mapped or not spec.mapped):
            yield from ((name, options) for options in VARIANTS.get(name, ({},)))


def exchanges(ctx: Context) -> None:
    """Every plan that can run: among all ranks, inside the hosts and across them."""
    here = [
        rank for rank in range(ctx.size) if ctx.topology.hosts[rank] == ctx.topology.hosts[ctx.rank]
    ]
    assert not ctx.mapped and ctx.topology.mapped_on_host and ctx.world.node_size == NODE
    chosen = options_for(ctx.world, "gdraa-nodes", "float32")
    assert chosen == {"group_size": NODE, "direct": 1}
    n_checked = 0
    for plan, options in variants(ctx.world):
        for kind in EXCHANGES:
            exchange(ctx.world, plan, kind, np.float32, **options)
            n_checked += 1
        if PLANS[plan].wire:
            exchange(ctx.world, plan, "average", np.float64, wire="float32", **options)
            n_checked += 1
    print(f"checked {n_checked} exchanges")
    direct = exchange(ctx.world, "gdraa-nodes", "average", np.float32)
    messages = exchange(ctx.world, "gdraa-nodes", "average", np.float32, direct=0)
    assert direct < messages, (direct, messages)
    for array in (ctx.segment(4000).numpy(np.float32), np.empty(5000, np.float32)):
        assert ctx.allreduce_handle(array, op="mean").plan == "gdraa-nodes"
    ctx.allreduce(np.ones(5000, np.float32))
    assert "plans gdraa-nodes" in ctx.describe()
    print("loads inside a node, messages between nodes")
    for root in range(ctx.size):
        array[:] = 60 * ctx.rank
        ctx.collective_handle("reduce", array, root=root)()
        assert ctx.rank != root or (array == 30 * ctx.size * (ctx.size - 1)).all()
        ctx.collective_handle("broadcast", array, root=root)()
        assert (array == 30 * ctx.size * (ctx.size - 1)).all()
    mine = ctx.group(here)
    assert mine.mapped and mine.node_size == len(here)
    for plan, options in variants(mine):
        exchange(mine, plan, "average", np.float32, **options)
    array = ctx.segment(4 * 5000, group=mine).numpy(np.float32)
    inside, outside = (
        ctx.allreduce_handle(of, op="mean", group=mine)
        for of in (array, np.empty(5000, np.float32))
    )
    assert (inside.plan, outside.plan) == ("gdraa-direct", "staged"), (inside, outside)
    for turn in range(N_ITERATIONS):
        array[:] = given(ctx.rank, 4, turn, np.float32)
        private = array.copy()
        inside()
        ctx.allreduce(private, op="mean", group=mine)
        assert np.array_equal(array, mean(mine, 4, turn, np.float32))
        assert np.array_equal(private, array)
    across = [min(rank for rank in range(ctx.size) if ctx.topology.hosts[rank] == host)
              for host in dict.fromkeys(ctx.topology.hosts)]  # fmt: skip
    for ranks in (across, [0, 1, 2]):
        if ctx.rank in ranks:
            some = ctx.group(ranks)
            assert not some.mapped
            for plan, options in variants(some):
                exchange(some, plan, "average", np.float32, **options)
    print("checked groups inside and across")
    try:
        exchange(ctx.world, "gdraa-direct", "average", np.float32)
    except PlanError as error:
        assert "not mapped here" in str(error)
        print("gdraa-direct is refused")


def tune(ctx: Context, file: str) -> None:
    """Tune as ``pgasdl tune`` does, whose ranks run the same code."""
    print("considers", *choices_here(ctx), "")
    request = Request(
        "tune", ctx.size, sizes=(64, 65536), rounds=1, seconds=0.001, policy_file=file
    )
    print(f"tuned {PlanBench(ctx, request, Output(ctx.rank)).tune()}")


def use(ctx: Context) -> None:
    """The plan that the policy names runs, and its results are correct."""
    for nbytes in (64, 4096, 100_000):
        array = ctx.segment(nbytes).numpy(np.float32)
        handle = ctx.allreduce_handle(array, op="mean")
        choice = ctx.policy.find("allreduce", nbytes)
        assert choice is not None and handle.plan == choice.plan
        for turn in range(N_ITERATIONS):
            array[:] = 60 * (ctx.rank + turn)
            handle()
            assert (array == 60 * turn + 30 * (ctx.size - 1)).all()
        print(f"{nbytes} bytes by {choice}")


def main(what: str, *rest: str) -> None:
    with pgasdl.init() as ctx:
        print(next(line for line in ctx.describe().splitlines() if line.startswith("transport")))
        {"exchange": exchanges, "tune": tune, "policy": use}[what](ctx, *rest)
    print("complete")


if __name__ == "__main__":
    main(*sys.argv[1:])
