"""What moves where a matrix changes its layout: rows of blocks that two layouts share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import LayoutError
from pgasdl.matrix.layout import Block, Extent, Layout
from pgasdl.plans.algorithms.remap import Moves, Rows, total

_Ints = npt.NDArray[np.int64]


# By the rank that gives and the rank that takes.
Pairs = dict[tuple[int, int], list[Rows]]


def pairs_between(
    source: Layout, target: Layout, size: int, at: tuple[int, int] | None = None
) -> Pairs:
    """Return what moves between any two of ``size`` ranks, or stays on one.

    A rank takes a block from itself if it has it, else from one of the ranks that have it: those
    that want it are spread over them.

    Parameters
    ----------
    at : tuple[int, int], optional
        Where the target begins in the source, if it is a part of that; None: it is all of it.

    Raises
    ------
    LayoutError
        The layouts are of different shapes, or of more ranks.
    """
    if source.shape != target.shape and at is None:
        raise LayoutError(f"{source} and {target} differ in shape")
    down, right = at or (0, 0)
    if max((*source.ranks, *target.ranks), default=0) >= size:
        raise LayoutError(f"{source} or {target}: there are {size} ranks")
    stored = {block: src for holder in source.ranks for block, src in source.placed(holder)}
    extents = list(source.holders)
    edges = _edges(extents)
    found: Pairs = defaultdict(list)
    for wanting in target.ranks:
        for taken, dst in target.placed(wanting):
            block = replace(taken, row=taken.row + down, column=taken.column + right)
            for number in _touching(edges, block):
                holder = _giver(source.holders[extents[number]], wanting)
                giving = Block(holder, *extents[number])
                found[holder, wanting].append(_shared(giving, stored[giving], block, dst))
    return found


def moves_of(pairs: Pairs, rank: int, source: Layout, target: Layout, size: int) -> Moves:
    """Return what one of ``size`` ranks sends and receives, and keeps."""
    return Moves(
        tuple(tuple(pairs.get((rank, peer), ())) for peer in range(size)),
        tuple(tuple(pairs.get((peer, rank), ())) for peer in range(size)),
        source.count(rank),
        target.count(rank),
        max((total(rows) for (s, r), rows in pairs.items() if s != r), default=0),
    )


def moves_between(
    source: Layout, target: Layout, rank: int, size: int, at: tuple[int, int] | None = None
) -> Moves:
    """Return what one of ``size`` ranks sends and receives; as for :func:`pairs_between`."""
    return moves_of(pairs_between(source, target, size, at), rank, source, target, size)


def _edges(extents: list[Extent]) -> _Ints:
    """Return the first and last row, and the first and last column, of each block."""
    table: Any = np.array(extents, np.int64).reshape(-1, 4)
    return np.stack(
        [table[:, 0], table[:, 0] + table[:, 2], table[:, 1], table[:, 1] + table[:, 3]]
    )


def _touching(edges: _Ints, block: Block) -> list[int]:
    """Return the numbers of the blocks that share elements with one."""
    top, bottom, left, right = edges
    shares = (top < block.row + block.rows) & (bottom > block.row)
    shares &= (left < block.column + block.columns) & (right > block.column)
    return [int(number) for number in np.flatnonzero(shares)]


def _giver(holders: tuple[int, ...], wanting: int) -> int:
    return wanting if wanting in holders else holders[wanting % len(holders)]


def _shared(giving: Block, src: int, taking: Block, dst: int) -> Rows:
    """Return the rows that two blocks share, which begin at these elements of their ranks."""
    top, left = max(giving.row, taking.row), max(giving.column, taking.column)
    bottom = min(giving.row + giving.rows, taking.row + taking.rows)
    right = min(giving.column + giving.columns, taking.column + taking.columns)
    return Rows(
        right - left,
        bottom - top,
        src + (top - giving.row) * giving.columns + left - giving.column,
        giving.columns,
        dst + (top - taking.row) * taking.columns + left - taking.column,
        taking.columns,
    )
