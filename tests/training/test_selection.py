"""Selection by a policy and by size: which plan runs, and that all ranks run the same one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.launcher import run
from support.ranks import on_ranks

from pgasdl import Context, GradientExchange, PlanError, loopback
from pgasdl.collectives.bound import select
from pgasdl.plans import PLANS, Members, blocks, register
from pgasdl.topology import Topology

POLICY = "allreduce:0-1k:tree#1k-64k:ring#64k-1m:chain(chunks=4);broadcast:0-inf:kary(arity=3)"
SHAPES = [((10,), "float32"), ((1000,), "float32"), ((20_000,), "float32"), ((10**6,), "float32")]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_policy_chooses_by_size(mapped: bool) -> None:
    def program(ctx: Context) -> tuple[str, str, list[str]]:
        exchange = GradientExchange(ctx, SHAPES)
        for layer in range(len(SHAPES)):
            exchange.gradient(layer)[...] = ctx.rank
            exchange.ready(layer)
        for layer in range(len(SHAPES)):
            exchange.wait(layer)
            assert np.all(exchange.gradient(layer) == 1.0)
        array = np.full(300, ctx.rank, np.float32)
        ctx.allreduce(array, op="mean")
        assert np.all(array == 1.0)
        names = [
            ctx.allreduce_handle(np.zeros(n, "f4"), op="mean").plan for n in (10, 1000, 20_000)
        ]
        names.append(ctx.collective_handle("broadcast", np.zeros(9, "f4")).plan)
        return exchange.plan, ctx.describe(), names

    for plan, described, names in loopback.run(3, program, mapped=mapped, policy=POLICY):
        last = "gdraa-direct" if mapped else "gdraa"
        assert plan == f"tree x1, ring x1, chain(chunks=4) x1, {last} x1"
        assert names == ["tree", "ring", "chain", "kary"]
        assert f"policy {POLICY}".replace("policy ", "policy: ") in described
        assert "plans ring" in described and f"plan {plan}:" in described


def test_what_cannot_run_here_is_chosen_automatically() -> None:
    def program(ctx: Context) -> list[str]:
        arrays = {"in_place": True}, {"in_place": False}
        return [
            select(ctx.policy, ctx.world, "average", 4096, **where).plan for where in arrays
        ] + [select(ctx.policy, ctx.world, "average", 4096, in_place=True, wire=True).plan]

    policy = "allreduce:0-inf:gdraa-direct;allreduce-array:0-1k:tree"
    assert loopback.run(2, program, policy=policy)[0] == ["gdraa-direct", "staged", "gdraa"]
    assert loopback.run(2, program, policy=policy, mapped=False)[0] == ["one-shot"] * 2 + ["gdraa"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_policy_says_who_reduces_staged_arrays(ranks: int) -> None:
    """They take turns on one inbox, whoever reduces."""

    def program(ctx: Context) -> str:
        arrays = [np.empty(n, np.float32) for n in (10, 1000, 5000, 300_000)]
        for turn in range(20):
            for array in arrays[turn % 3 :]:
                array[:] = ctx.rank + turn
                ctx.allreduce(array, op="sum")
                assert np.all(array == sum(rank + turn for rank in range(ctx.size)))
        return ctx.describe()

    policy = (
        "allreduce-array:0-1k:staged(owners=1)#1k-16k:staged(owners=0)#16k-inf:staged(owners=1)"
    )
    for described in loopback.run(ranks, program, policy=policy):
        assert f"policy: {policy}" in described and "plans staged;" in described


def test_what_cannot_share_an_inbox_is_not_chosen_for_arrays_in_turns() -> None:
    def program(ctx: Context) -> tuple[str, str]:
        array = np.ones(100, np.float32)
        ctx.allreduce(array, "sum")
        assert np.all(array == 2)
        in_turns = select(ctx.policy, ctx.world, "sum", 400, in_place=False, shares=True)
        return in_turns.plan, ctx.allreduce_handle(array, "sum").plan

    register(replace(PLANS["tree"], name="alone", shares=False))
    try:
        policy = "allreduce:0-inf:alone"
        chosen = loopback.run(2, program, policy=policy, mapped=False)
    finally:
        del PLANS["alone"]
    assert chosen == [("one-shot", "alone")] * 2


@pytest.mark.parametrize("name", ["gdraa-direct", "staged", "gdraa-private"])
def test_a_plan_works_where_its_row_says(name: str) -> None:
    """No name counts: the same row with another name runs on the same arrays."""

    def program(ctx: Context) -> None:
        spec = PLANS["mine"]
        for count in (10, 300_000):
            array = np.full(count, ctx.rank, np.float32)
            if spec.works_on == "mapped":
                array = ctx.segment(array.nbytes).numpy(np.float32)
                array[:] = ctx.rank
            ctx.allreduce(array, "sum", plan="mine")
            assert np.all(array == 3)
            array[:] = ctx.rank
            with ctx.allreduce_handle(array, "mean", plan="mine") as handle:
                handle()
                assert np.all(array == 1)

    register(replace(PLANS[name], name="mine"))
    try:
        loopback.run(3, program, mapped=PLANS[name].mapped)
    finally:
        del PLANS["mine"]


def test_few_bytes_in_segments_are_staged_where_ranks_share_cores() -> None:
    """A policy that names another plan goes first; exchanges, without phases, load in place."""
    members = Members(4, 4, mapped=True, oversubscribed=True)

    def program(ctx: Context) -> list[str]:
        ctx.world.members = members
        sizes = 8, 4092, 4096
        found = [select(ctx.policy, ctx.world, "sum", n, in_place=True).plan for n in sizes]
        on_gpu = select(ctx.policy, ctx.world, "sum", 8, in_place=True, on_gpu=True)
        array = ctx.segment(40).numpy(np.float32)
        for turn in range(3):
            array[:] = ctx.rank + turn
            ctx.allreduce(array)
            assert np.all(array == 6 + 4 * turn)
        return [*found, on_gpu.plan, GradientExchange(ctx, SHAPES[:1]).plan]

    direct = "gdraa-direct"
    assert loopback.run(4, program)[0] == ["staged", "staged", direct, direct, direct]
    assert loopback.run(4, program, policy="allreduce:0-inf:gdraa-direct")[0] == [direct] * 5


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    ("nodes", "described_as"),
    [
        ("AABB", "2 of 2 ranks, the last may have fewer"),
        ("AABBC", "3 of 2 ranks, the last may have fewer"),
        ("ABCABC", "3 of 2 ranks, the last may have fewer"),
        ("ABBAB", "2, of 2, 3 ranks"),
        ("ABCBB", "3, of 1, 3, 1 ranks"),
    ],
)
def test_ranks_on_several_nodes_exchange_by_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: str, described_as: str, loads: bool
) -> None:
    """Nodes of any sizes, in any order; ranks of one load each other's memory, or do not."""
    monkeypatch.setattr(Topology, "machines", lambda self, ranks: [nodes[r] for r in ranks])
    monkeypatch.setattr(Topology, "maps", lambda self, ranks: len({nodes[r] for r in ranks}) == 1)

    def program(ctx: Context) -> tuple[str, set[str], list[str]]:
        assert ctx.world.members.mapped_on_node is loads
        exchange = GradientExchange(ctx, SHAPES)
        narrow = GradientExchange(ctx, SHAPES[:3], wire="float16")
        total = sum(range(ctx.size))
        for turn in range(3):
            for own in (exchange, narrow):
                for layer in range(len(own.layers)):
                    own.gradient(layer)[...] = ctx.size * (ctx.rank + turn)
                    own.ready(layer)
                for layer in range(len(own.layers)):
                    own.wait(layer)
                    assert np.all(own.gradient(layer) == total + ctx.size * turn)
            for count in (1, 300, 200_000):
                array = np.full(count, ctx.rank + turn, np.float32)
                ctx.allreduce(array, "sum")
                assert np.all(array == total + ctx.size * turn)
        handles = {ctx.allreduce_handle(np.zeros(n, "f4"), op="mean").plan for n in (10, 20_000)}
        for root in range(ctx.size):
            array = np.full(300, ctx.rank, np.float32)
            ctx.collective_handle("reduce", array, root=root)()
            assert ctx.rank != root or np.all(array == total)
            array[:] = ctx.rank
            ctx.collective_handle("broadcast", array, root=root)()
            assert np.all(array == root)
        contributions = np.random.default_rng(7).integers(-9, 9, (ctx.size, 1000))
        begin, n = blocks(1000, ctx.size)[ctx.rank]
        for turn in range(3):
            array = (contributions[ctx.rank] + turn).astype(np.float32)
            ctx.collective_handle("reduce-scatter", array)()
            wanted = (contributions + turn).sum(axis=0)
            assert np.array_equal(array[begin : begin + n], wanted[begin : begin + n])
            ctx.collective_handle("all-gather", array)()
            assert np.array_equal(array, wanted)
        array, whole = (contributions[ctx.rank] / np.float32(7) for _ in range(2))
        ctx.collective_handle("reduce-scatter", array)()
        ctx.allreduce_handle(whole)()
        assert array[begin : begin + n].tobytes() == whole[begin : begin + n].tobytes()
        return exchange.plan + narrow.plan, handles, ctx.describe().splitlines()

    for plan, handles, described in loopback.run(len(nodes), program, mapped=loads):
        assert plan == 2 * "gdraa-nodes" and handles == {"gdraa-nodes"}
        assert f"nodes: {described_as}" in described
        assert any("plans gdraa-nodes;" in line for line in described)


def test_the_setting_says_how_many_ranks_a_switch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(ctx: Context) -> tuple[str, int]:
        array = np.full(40, ctx.rank, np.float32)
        handle = ctx.allreduce_handle(array, op="mean")
        for turn in range(3):
            array[:] = ctx.rank + turn
            handle()
            assert np.all(array == 3.5 + turn)
            ctx.allreduce(array, "sum")
            assert np.all(array == 8 * (3.5 + turn))
        return GradientExchange(ctx, SHAPES[:1]).plan, ctx.world.members.supernode_size

    spec = replace(PLANS["halving-doubling"], suits=lambda case: True)
    monkeypatch.setitem(PLANS, "halving-doubling", spec)
    for plan, size in loopback.run(8, program, mapped=False, supernode=4):
        assert plan == "halving-doubling(group_size=4)" and size == 4


def test_ranks_with_different_policies_are_told(tmp_path: Path) -> None:
    # Processes, because threads share one environment.
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pgasdl\n"
        "rank = int(os.environ['PGASDL_RANK'])\n"
        "os.environ['PGASDL_POLICY'] = f'allreduce:0-{rank + 1}k:tree'\n"
        "try:\n"
        "    pgasdl.init(timeout=20)\n"
        "except pgasdl.MismatchError as error:\n"
        "    print('told:', error, flush=True)\n"
    )
    result = run("-n", "3", str(program))
    told = [line for line in result.stdout.splitlines() if "told:" in line]
    assert len(told) == 3, result.stdout + result.stderr
    assert all("allreduce:0-1k:tree" in line and "PGASDL_POLICY" in line for line in told)
    assert os.environ.get("PGASDL_POLICY") is None


@on_ranks(2, policy="allreduce:0-inf:gdraa-private")
def test_a_policys_plan_that_cannot_take_turns_is_refused_before_anything_is_made(
    ctx: Context,
) -> None:
    array = ctx.segment(400).numpy(np.float32)
    with pytest.raises(PlanError, match="gdraa-private is for transports that map nothing"):
        ctx.allreduce(array, "sum")
    assert "allreduce in" not in ctx.describe()
