"""Products of matrices: whatever stays, ranks multiply every element once, from where it lies."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layout_tools import layouts

from pgasdl.matrix.choice import STATIONARY, Way, addends, choose, single, stack
from pgasdl.matrix.explain import NETWORK
from pgasdl.matrix.layout import Block, Layout, cyclic, grid, replicated, rows
from pgasdl.matrix.panels import Panel, panels


@st.composite
def products(draw: st.DrawFn) -> tuple[Layout, Layout, int, Layout | None, str | None]:
    """Two layouts that fit, the number of ranks, the result's layout, and what stays."""
    size = draw(st.integers(1, 4))
    m, k, n = (draw(st.integers(0, 7)) for _ in range(3))
    a, b = draw(layouts((m, k), size)), draw(layouts((k, n), size))
    wanted = draw(st.none() | layouts((m, n), size))
    ways = [None, "result", *(name for name, each in (("a", a), ("b", b)) if single(each))]
    return a, b, size, wanted, draw(st.sampled_from(ways))


def whole(way: Way, a: Layout, b: Layout) -> list[tuple[int, Panel]]:
    """What each rank multiplies."""
    (m, k), n = a.shape, b.shape[1]

    def spans(block: Block) -> tuple[tuple[int, int], tuple[int, int]]:
        down, across = block.where
        return (down.start, down.stop), (across.start, across.stop)

    if way.stationary == "result":
        return [(t.rank, (spans(t)[0], (0, k), spans(t)[1])) for t in way.layout.blocks]
    if way.stationary == "a":
        return [(t.rank, (*spans(t), (0, n))) for t in a.blocks]
    return [(t.rank, ((0, m), *spans(t))) for t in b.blocks]


def times_multiplied(way: Way, a: Layout, b: Layout, size: int, *, mapped: bool) -> np.ndarray:
    """How often each element of ``a`` meets each of ``b``, by each rank that needs the product."""
    found = np.zeros((a.shape[0], a.shape[1], b.shape[1]), int)
    due = np.zeros_like(found)
    for rank, part in whole(way, a, b):
        due[tuple(slice(*each) for each in part)] += 1
        for panel in panels(a, b, part, rank, size, mapped):
            found[tuple(slice(*each) for each in panel)] += 1
    assert np.array_equal(found, due)
    return found


@settings(max_examples=150)
@given(products(), st.booleans())
def test_every_element_is_multiplied_once(
    drawn: tuple[Layout, Layout, int, Layout | None, str | None], mapped: bool
) -> None:
    a, b, size, wanted, stationary = drawn
    way = choose(a, b, size, wanted, stationary, 4, mapped, NETWORK)
    assert way.stationary in STATIONARY and stationary in (None, way.stationary)
    assert way.layout.shape == (a.shape[0], b.shape[1])
    times = times_multiplied(way, a, b, size, mapped=mapped)
    # Of a result that several ranks have, each computes its own.
    holders = len(way.layout.holders)
    assert ((times == 1) if holders == len(way.layout.blocks) else (times >= 1)).all()
    # Ranks with nothing of their own need no peer.
    assert (way.messages > 0) == (way.nbytes > 0)
    if size == 1:
        assert way.nbytes == 0 and not any(way.moving)


def test_large_panels_are_cut_at_blocks() -> None:
    shapes = (280, 300), (300, 260)
    a, b = grid(shapes[0], range(4)), rows(shapes[1], range(4))
    dealt = cyclic(shapes[0], range(4), (33, 20))
    for left, mapped in ((a, True), (a, False), (dealt, True)):
        way = choose(left, b, 4, None, "result", 4, mapped, NETWORK)
        assert (times_multiplied(way, left, b, 4, mapped=mapped) == 1).all()


@settings(max_examples=80)
@example((rows((1, 3), [0]), rows((3, 1), [0]), 4, replicated((1, 1), [0, 1]), None))
@given(products())
def test_products_of_blocks_add_up(
    drawn: tuple[Layout, Layout, int, Layout | None, str | None],
) -> None:
    a, b, size, wanted, _ = drawn
    if not single(a):
        return
    way = choose(a, b, size, wanted, "a", 4, False, NETWORK)
    dice = np.random.default_rng(1)
    A, B = (dice.integers(-3, 4, each.shape) for each in (a, b))
    stacked = [A[block.where] @ B[block.where[1]] for block in a.blocks]
    products_of_blocks = np.concatenate([np.zeros((0, b.shape[1]), int), *stacked])
    assert stack(a, b.shape[1]).shape == products_of_blocks.shape
    for tile in way.layout.blocks:  # of replicas, each by itself
        found = np.zeros((a.shape[0], b.shape[1]), int)
        for _, first, row, height in addends(a, tile):
            down = slice(tile.row + first, tile.row + first + height)
            found[down, tile.where[1]] += products_of_blocks[row : row + height, tile.where[1]]
        assert np.array_equal(found[tile.where], (A @ B)[tile.where])
