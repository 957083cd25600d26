"""The plan that is taken where nobody names one, by nodes: no byte goes across more than needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from tiers import full

from pgasdl.collectives.bound import automatic
from pgasdl.plans import EXCHANGES, PLANS, Case, Members, Plan, Put, build, build_all
from pgasdl.plans.algorithms.hierarchy import BANDWIDTH, LATENCY, STARTUP
from pgasdl.plans.cost import Model, Pair, bytes_of, predict
from pgasdl.plans.plan import ROOTED, is_wire

ITEM, WIRE_ITEM = 4, 2


def across(plans: Sequence[Plan], node_size: int) -> int:
    """Return the bytes that ranks put to other nodes."""
    return sum(
        step.n * bytes_of(step.src, ITEM, WIRE_ITEM)
        for plan in plans
        for *_, step in plan.steps()
        if isinstance(step, Put) and step.peer // node_size != plan.rank // node_size
    )


def chosen(case: Case, count: int, **how: bool) -> list[Plan]:
    """Build what is taken, as handles, exchanges and ``ctx.allreduce`` build it."""
    choice = automatic(case, **how)
    options = PLANS[choice.plan].options_of(case.members, 32768) | dict(choice.options)
    return build_all(
        choice.plan, case.members.size, count, kind=case.kind, wire=case.wire, **options
    )


def plain(case: Case, count: int) -> int:
    """Return the bytes that plain GDRAA puts to other nodes."""
    plans = build_all("gdraa", case.members.size, count, kind=case.kind, wire=case.wire)
    return across(plans, case.members.node_size)


@pytest.mark.parametrize(
    ("kind", "wire", "count"),
    full(
        sorted(
            itertools.product(EXCHANGES, (False, True), (4096, 65536)),
            key=lambda case: case not in (("average", False, 4096), ("update", True, 65536)),
        ),
        quick=2,
    ),
)
def test_256_ranks_send_each_byte_once(kind: str, wire: bool, count: int) -> None:
    """32 nodes of 8, at a size that halving-doubling takes, and at one that gdraa-nodes does."""
    members = Members(256, 8, mapped_on_node=True)
    case = Case(members, kind, count * ITEM, in_segments=True, wire=wire)
    item = WIRE_ITEM if wire else ITEM
    result = ITEM if kind == "update" else item
    plans = chosen(case, count, phases=False)
    assert across(plans, 8) == 31 * count * (item + result)
    assert plain(case, count) == 8 * across(plans, 8)


@pytest.mark.parametrize("how", [{}, {"shares": True}, {"phases": False}], ids=str)
@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("size", [4, 6, 7, 16, 20, 24])
@pytest.mark.parametrize("node_size", [2, 3, 4, 8])
def test_every_shape_sends_each_byte_once(
    size: int, node_size: int, in_segments: bool, how: dict[str, bool]
) -> None:
    """Handles, ``ctx.allreduce`` and exchanges; also where the last node has fewer ranks."""
    for registers in (False, True):
        members = Members(size, node_size, mapped_on_node=True, registers=registers)
        if not members.several_nodes:
            continue
        for count in (1, 100, 5000):
            case = Case(members, "average", count * ITEM, in_segments=in_segments)
            plans = chosen(case, count, **how)
            assert across(plans, node_size) == 2 * (members.nodes - 1) * count * ITEM


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize("size", [4, 7, 16, 20])
@pytest.mark.parametrize("node_size", [2, 3, 4, 8])
def test_reduce_and_broadcast_cross_once_from_any_root(
    size: int, node_size: int, kind: str
) -> None:
    """Also to a root in the middle of a node, or in a last node with fewer ranks."""
    members = Members(size, node_size)
    if not members.several_nodes:
        return
    for count in (1, 5000, 300_000):
        choice = automatic(Case(members, kind, count * ITEM, in_segments=True))
        for root in {1, node_size, size - 1}:
            plans = build_all(
                choice.plan, size, count, kind=kind, root=root, **dict(choice.options)
            )
            assert across(plans, node_size) == (members.nodes - 1) * count * ITEM


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("nbytes", [64, 1 << 12, 1 << 16, 1 << 20])
def test_no_tree_and_no_chunks_are_predicted_to_be_faster(
    kind: str, size: int, nbytes: int
) -> None:
    model = Model(Pair(1e-9 * LATENCY, 1e-9 / BANDWIDTH, 1e-9 * STARTUP), gamma=1e-9 / BANDWIDTH)

    def seconds(plan: str, **options: int) -> float:
        count = nbytes // ITEM
        return float(predict(build_all(plan, size, count, kind=kind, **options), model))

    choice = automatic(Case(Members(size), kind, nbytes, in_segments=True))
    time = seconds(choice.plan, **dict(choice.options))
    for plan in ("tree", "chain", "chain-chain", "chain-binomial"):
        for chain_size in (2, 4) if "-" in plan else (0,):
            for chunks in (1, 8, 64):
                options = {"chain_size": chain_size} if chain_size else {}
                assert time <= 1.05 * seconds(plan, chunks=chunks, **options)


def test_the_tree_follows_the_size_and_the_ranks() -> None:
    def taken(size: int, nbytes: int, **how: Any) -> str:
        return str(automatic(Case(Members(size, **how), "reduce", nbytes, in_segments=True)))

    assert taken(64, 64) == "tree(chunks=1)"
    assert taken(64, 1 << 16) == "chain-binomial(chain_size=8,chunks=64)"
    assert taken(64, 1 << 20) == "chain-chain(chain_size=8,chunks=128)"
    assert taken(64, 1 << 24) == "chain(chunks=128)"
    assert taken(64, 1 << 16, node_size=4) == "chain-binomial(chain_size=4,chunks=64)"
    assert taken(64, 64, supernode_size=16) == "tree(chunks=1,group_size=16)"
    # A rank that sleeps wakes up late: fewer hops.
    assert taken(8, 1 << 16) == "chain-chain(chain_size=2,chunks=24)"
    assert taken(8, 1 << 16, oversubscribed=True).startswith("tree")


def test_the_choice_follows_the_size() -> None:
    def taken(members: Members, nbytes: int, kind: str = "sum", *, wire: bool = False) -> str:
        return str(automatic(Case(members, kind, nbytes, in_segments=True, wire=wire)))

    loads, messages = Members(256, 8, mapped_on_node=True), Members(256, 8)
    by_halves = "halving-doubling(group_size=8)"
    assert [taken(loads, n << 10) for n in (1, 16, 64)] == ["gdraa-nodes", by_halves, "gdraa-nodes"]
    assert [taken(messages, n << 10) for n in (1, 16, 64)] == ["gdraa-nodes", by_halves, by_halves]
    assert taken(loads, 1 << 16, wire=True) == by_halves
    assert taken(Members(256, 6), 1 << 14) == taken(Members(255, 8), 1 << 14) == "gdraa-nodes"
    # Nodes that are not known, or none; and what is no exchange: halves of blocks would go across.
    assert taken(Members(4), 1 << 14) == taken(Members(4, 4), 1 << 14) == "gdraa"
    assert taken(messages, 1 << 14, "reduce-scatter") == "gdraa-nodes"
    assert taken(Members(256), 1 << 14, "reduce-scatter") == "halving-doubling"


def test_supernodes_keep_large_exchanges_inside() -> None:
    """The papers' figure: 2 (P-q) S across with adjacent numbers, 2 (P/q-1) S round-robin."""
    members, count = Members(64, supernode_size=16), 4096
    case = Case(members, "average", count * ITEM, in_segments=True)
    assert str(automatic(case)) == "halving-doubling(group_size=16)"
    assert across(chosen(case, count), 16) == 2 * 3 * count * ITEM
    unknown = Case(Members(64), "average", count * ITEM, in_segments=True)
    assert across(chosen(unknown, count), 16) == 2 * 48 * count * ITEM
    # Nodes count for more.
    both = Case(Members(256, 8, supernode_size=64), "sum", 1 << 14, in_segments=True)
    assert str(automatic(both)) == "halving-doubling(group_size=8)"


def test_an_array_in_pieces_keeps_its_bits() -> None:
    case = Case(Members(64, registers=True), "sum", 1 << 26, in_segments=False)
    assert automatic(case, shares=True).plan == "halving-doubling"
    assert automatic(case, shares=True, by_element=True).plan == "gdraa"
    nodes = Case(Members(64, 8, registers=True), "sum", 1 << 26, in_segments=False)
    assert automatic(nodes, shares=True, by_element=True).plan == "gdraa-nodes"


def test_mates_load_only_what_travels_as_it_is() -> None:
    options = PLANS["gdraa-nodes"].options_of(Members(8, 4, mapped_on_node=True), 1)
    assert options == {"group_size": 4, "direct": 1}
    plans = [build("gdraa-nodes", 0, 8, 5000, wire=wire, **options) for wire in (False, True)]
    assert [plan.mapped for plan in plans] == [True, False]
    assert any(is_wire(name) for name in plans[1].buffers)
