"""Plans in pieces: each piece is right beside the others, and its additions have the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_tools import VARIANTS, Variant
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import PLANS, Members, Plan, Reduce, Span, build
from pgasdl.plans.check import check
from pgasdl.plans.pieces import MOST_PIECES, build_array, join, pieces_of
from pgasdl.plans.plan import EXCHANGES, ROOTED

COUNT, PIECE = 300, 128
IN_PIECES = [
    variant
    for variant in VARIANTS
    if len(pieces_of(PLANS[variant.name], variant.kind, COUNT, PIECE)) > 1
]


def plans_of(variant: Variant, size: int, order: tuple[int, ...] = ()) -> list[Plan]:
    """The plans of all ranks, in pieces."""
    pieces = pieces_of(PLANS[variant.name], variant.kind, COUNT, PIECE)
    return [
        build_array(
            variant.name,
            rank,
            Members(size, order=order),
            pieces,
            kind=variant.kind,
            wire=variant.wire,
            **variant.chosen(size),
        ).first
        for rank in range(size)
    ]


@pytest.mark.parametrize("variant", IN_PIECES, ids=str)
@pytest.mark.parametrize("size", full([3, 1, 2, 5, 8], quick=2))
def test_every_plan_in_pieces_is_right(variant: Variant, size: int) -> None:
    assert variant.check(plans_of(variant, size), size) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_plan_is_right_in_another_order_of_ranks(variant: Variant) -> None:
    """As where ranks go round-robin over nodes; a root, or who has a block, stays who it is."""
    order = (0, 3, 1, 4, 2)
    assert variant.check(plans_of(variant, 5, order), 5) == []
    ordered = variant.kind in (*EXCHANGES, *ROOTED) or "order" in PLANS[variant.name].options
    first, plain = (plans_of(variant, 5, each)[1] for each in (order, ()))
    assert first.rank == plain.rank == 1 and (first == plain) is not ordered


def test_the_check_finds_pieces_in_each_others_place() -> None:
    def moved(plan: Plan) -> Plan:
        lanes = tuple(
            tuple(
                replace(step, srcs=(Span("inbox", 0), *step.srcs[1:]))
                if isinstance(step, Reduce)
                else step
                for step in lane
            )
            for lane in plan.lanes
        )
        return replace(plan, lanes=lanes)

    plans = plans_of(Variant("gdraa", "average"), 2)
    assert check(plans) == []
    assert check([moved(plan) for plan in plans]) != []


def test_pieces_are_the_array_and_few() -> None:
    spec = PLANS["gdraa"]
    assert pieces_of(spec, "average", 0, 64) == (0,)
    assert pieces_of(spec, "average", 64, 64) == (64,)
    for count in (65, 1000, 1 << 20):
        pieces = pieces_of(spec, "sum", count, 64)
        assert sum(pieces) == count
        assert 1 < len(pieces) <= MOST_PIECES
    # A block of the result has a place of its own on each rank.
    assert pieces_of(spec, "reduce-scatter", 1000, 64) == (1000,)
    assert pieces_of(PLANS["ring"], "sum", 1000, 64) == (1000,)


def test_lanes_of_each_piece() -> None:
    built = build_array("tree", 1, Members(3), (200, 100), kind="sum", chunks=2)
    plan, (lanes,) = built.first, built.lanes
    whole = [build("tree", 1, 3, count, kind="sum", chunks=2) for count in (200, 100)]
    assert lanes == tuple(len(each.lanes) for each in whole)
    assert len(plan.lanes) == sum(lanes)
    assert plan.notifications == sum(each.notifications for each in whole)


def test_pieces_of_different_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="different plans"):
        join([build("gdraa", 0, 2, 100), build("tree", 0, 2, 100)])
    with pytest.raises(PlanError, match="different ranks"):
        join([build("gdraa", 0, 2, 100), build("gdraa", 1, 2, 100)])
