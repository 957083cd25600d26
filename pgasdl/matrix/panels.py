"""Panels: the parts in which a rank multiplies two matrices, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TypeVar

import numpy as np

from pgasdl.matrix.elements import Array
from pgasdl.matrix.layout import Layout
from pgasdl.matrix.moves import pieces_of
from pgasdl.matrix.operand import Range, extent_of
from pgasdl.matrix.space import Space

T = TypeVar("T")
U = TypeVar("U")

# Elements of a panel that is copied, and the least width of one.
_LARGEST, _NARROWEST = 4 << 20, 128
# Rows and columns of a product that is added to others while the caches have it.
SPARE = 1024

# Rows, the inner dimension and columns of a product.
Panel = tuple[Range, Range, Range]


@lru_cache(1024)
def panels(
    a: Layout, b: Layout, whole: Panel, rank: int, size: int, mapped: bool
) -> tuple[Panel, ...]:
    """Cut a rank's product, so that BLAS takes operands in place, or else panels not too large.

    They begin with what the rank has.
    """
    rows, inner, columns = whole
    if not all(begin < end for begin, end in whole):
        return ()
    tall = _cuts(rows, ((block.row, block.rows) for block in a.blocks))
    wide = _cuts(columns, ((block.column, block.columns) for block in b.blocks))
    deep = _cuts(inner, ((block.column, block.columns) for block in a.blocks))
    deep = sorted({*deep, *_cuts(inner, ((block.row, block.rows) for block in b.blocks))})
    if not (mapped and all(map(_coarse, (tall, wide, deep)))):
        width = max(_NARROWEST, _LARGEST // max(rows[1] - rows[0], columns[1] - columns[0]))
        tall, wide, deep = [*rows], [*columns], _merged(deep, width)
    found = list(product(pairwise(tall), pairwise(wide), pairwise(deep)))

    def missing(layout: Layout, down: Range, across: Range) -> int:
        pieces = pieces_of(layout, extent_of(down, across), rank, size)
        return sum(n for holder, _, n in pieces if holder != rank)

    lacks = [missing(a, down, depth) + missing(b, depth, across) for down, across, depth in found]
    first = lacks.index(min(lacks))
    parts = [(down, depth, across) for down, across, depth in found]
    return (*parts[first:], *parts[:first])


def _cuts(whole: Range, blocks: Iterable[Range]) -> list[int]:
    """Return where blocks begin and end in a range, and where that does."""
    begin, end = whole
    edges = {edge for first, length in blocks for edge in (first, first + length)}
    return sorted({begin, end, *(edge for edge in edges if begin < edge < end)})


def _coarse(cuts: list[int]) -> bool:
    return len(cuts) == 2 or cuts[-1] - cuts[0] >= _NARROWEST * (len(cuts) - 1)


def _merged(cuts: list[int], width: int) -> list[int]:
    """Leave out cuts that are close to each other, and add some where they are far."""
    found = cuts[:1]
    for cut in cuts[1:]:
        while cut - found[-1] > width:
            found.append(found[-1] + width)
        if cut - found[-1] >= min(width, _NARROWEST):
            found.append(cut)
    if found[-1] < cuts[-1]:
        found.append(cuts[-1])
    return found


def ahead(space: Space, parts: Sequence[T], fetch: Callable[[T, int], U]) -> Iterator[tuple[T, U]]:
    """Yield parts, and what is fetched for each: the next one is on its way by then."""
    found = None
    for number in range(-1, len(parts)):
        here = found
        if number >= 0 and not space.group.mapped:
            with space.during("wait"):
                space.context.wait()
        if number + 1 < len(parts):
            with space.during("move"):
                found = fetch(parts[number + 1], number + 1)
        if number >= 0:
            yield parts[number], here  # type: ignore[misc]


def add_product(x: Array, y: Array, out: Array, first: bool, spare: Array) -> None:
    """Add a product to a matrix, or set it; ``spare`` holds parts of it meanwhile."""
    if out.strides[0] < out.strides[1]:  # a transposed one
        x, y, out = y.T, x.T, out.T
    if first:
        np.matmul(x, y, out=out)
        return
    edge = len(spare)
    for row in range(0, out.shape[0], edge):
        for column in range(0, out.shape[1], edge):
            here = out[row : row + edge, column : column + edge]
            part = spare[: here.shape[0], : here.shape[1]]
            here += np.matmul(x[row : row + edge], y[:, column : column + edge], out=part)
