"""Remaps: proved for any two layouts, and found wrong with any step missing or changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_tools import layouts
from plan_tools import deletions

from pgasdl.errors import LayoutError, PlanError
from pgasdl.matrix.layout import Block, Layout, columns, cyclic, grid, replicated, rows
from pgasdl.matrix.moves import moves_between
from pgasdl.plans import Copy, Plan, Span, validate
from pgasdl.plans.algorithms.remap import Moves, build
from pgasdl.plans.check import check
from pgasdl.plans.checker.results import moved

MOST = 3


@st.composite
def remaps(draw: st.DrawFn) -> tuple[list[Moves], dict[str, bool]]:
    """The moves of all ranks, to a layout of the whole or of a part, and how they are made."""
    size = draw(st.integers(1, 4))
    m, n = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    top, left = draw(st.integers(0, m)), draw(st.integers(0, n))
    shape = draw(st.integers(0, m - top)), draw(st.integers(0, n - left))
    source, part = draw(layouts((m, n), size)), draw(layouts(shape, size))
    at = None if part.shape == source.shape else (top, left)
    moves = [moves_between(source, part, rank, size, at) for rank in range(size)]
    return moves, {"mapped": draw(st.booleans()), "narrows": draw(st.booleans())}


def parts(moves: list[Moves], piece: int, how: dict[str, bool]) -> list[list[Plan]]:
    """All ranks' plans of each part."""
    return [
        [
            build(rank, each, piece=piece, most=MOST, begin=begin, **how)
            for rank, each in enumerate(moves)
        ]
        for begin in range(0, max(1, moves[0].longest), MOST * piece)
    ]


@settings(max_examples=60)
@given(remaps(), st.integers(1, 40))
def test_any_remap_is_right(drawn: tuple[list[Moves], dict[str, bool]], piece: int) -> None:
    moves, how = drawn
    plans, *more = parts(moves, piece, how)
    if not more:
        assert check(plans, results=[moved(each) for each in moves]) == []
    # A remap in parts has the rows of all its parts.
    for rank, each in enumerate(moves):
        landed = [
            (step.row(i)[0].offset + j)
            for part in (plans, *more)
            for _, _, step in part[rank].steps()
            if isinstance(step, Copy) and step.dst.buffer == "result"
            for i in range(step.rows)
            for j in range(step.n)
        ]
        assert sorted(landed) == list(range(each.wanted))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_missing_step_is_found(mapped: bool) -> None:
    shape = 5, 4
    moves = [moves_between(rows(shape, range(3)), columns(shape, range(3)), r, 3) for r in range(3)]
    (plans,) = parts(moves, 3, {"mapped": mapped})
    results = [moved(each) for each in moves]
    assert check(plans, results=results) == []
    found = [bool(check(broken, results=results)) for _, broken in deletions(plans)]
    assert len(found) > 40
    assert all(found)


def test_a_wrong_row_is_found() -> None:
    shape, dice = (4, 6), random.Random(1)
    moves = [moves_between(rows(shape, range(2)), columns(shape, range(2)), r, 2) for r in range(2)]
    (plans,) = parts(moves, 8, {"mapped": True})
    results = [moved(each) for each in moves]
    copies = [(plan, at, step) for plan in plans for _, at, step in plan.steps()]
    copies = [each for each in copies if isinstance(each[2], Copy) and each[2].rows > 1]
    assert copies
    for plan, at, step in copies:
        wrong = dice.choice([step.src_step + 1, step.src_step - 1])
        steps = list(plan.lanes[0])
        steps[at] = Copy(step.dst, step.src, step.n, step.rows, step.dst_step, wrong)
        broken = [*plans]
        broken[plan.rank] = Plan(
            *(plan.name, plan.rank, plan.size, plan.count, (tuple(steps),), plan.buffers),
            plan.notifications,
            mapped=True,
            private=plan.private,
        )
        assert check(broken, results=results)


@pytest.mark.parametrize(
    ("copy", "why"),
    [
        (Copy(Span("result", 0), Span("data", 0), 0), "nothing to do"),
        (Copy(Span("data", 0), Span("data", 4), 2), "between two buffers"),
        (Copy(Span("result", 0), Span("data", 0), 2, 3, 2, 1), "overlap"),
        (Copy(Span("result", 0), Span("data", 0), 2, 3, 4, 4), "leaves its buffer of 8"),
        (Copy(Span("result", 0), Span("data", 0, 1), 2), "private to its rank"),
    ],
)
def test_malformed_copies_are_refused(copy: Copy, why: str) -> None:
    buffers = {"data": 8, "result": 8}
    plan = Plan("x", 0, 2, 8, ((copy,),), buffers, 0, mapped=True, private=frozenset(buffers))
    with pytest.raises(PlanError, match=why):
        validate(plan)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([Block(0, 0, 0, 2, 3)], "element .2, 0. is in no block"),
        ([Block(0, 0, 0, 4, 3), Block(1, 1, 1, 1, 1)], "element .1, 1. is in several blocks"),
        ([Block(0, 0, 0, 4, 3), Block(0, 0, 0, 4, 3)], "a block twice"),
        ([Block(0, 0, 0, 4, 4)], "no part of a matrix of 4 x 3"),
        ([Block(-1, 0, 0, 4, 3)], "no part of a matrix"),
    ],
)
def test_layouts_that_do_not_cover_are_refused(blocks: list[Block], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        Layout((4, 3), blocks)


def test_layouts_by_their_names() -> None:
    shape = 10, 7
    assert [b.rows for b in rows(shape, range(4)).blocks] == [3, 3, 3, 1]
    assert [b.columns for b in columns(shape, range(4)).blocks] == [2, 2, 2, 1]
    assert {b.extent for b in grid(shape, range(4)).blocks} == {
        (0, 0, 5, 4),
        (0, 4, 5, 3),
        (5, 0, 5, 4),
        (5, 4, 5, 3),
    }
    dealt = cyclic(shape, range(4), (4, 4), across=2)
    assert [(b.rank, b.row, b.column) for b in dealt.blocks] == [
        *((0, 0, 0), (1, 0, 4), (2, 4, 0), (3, 4, 4), (0, 8, 0), (1, 8, 4)),
    ]
    assert replicated(shape, range(3)).replicated
    assert columns(shape[::-1], range(4)) == rows(shape, range(4)).T
    assert rows((2, 3), range(4)).ranks == (0, 1)  # others have nothing
    with pytest.raises(LayoutError, match="no 3 columns"):
        grid(shape, range(4), across=3)
