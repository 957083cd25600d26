"""What moves where a matrix changes its layout: rows of blocks that two layouts share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pgasdl.errors import LayoutError
from pgasdl.matrix.layout import Block, Extent, Layout, Shape, replicated
from pgasdl.plans.algorithms.remap import Moves, Rows, total

# By the rank that gives and the rank that takes.
Pairs = dict[tuple[int, int], list[Rows]]


class Piece(NamedTuple):
    """What one rank gives: the numbers of each of its :class:`Rows`, and all their elements."""

    holder: int
    table: npt.NDArray[np.int64]
    n: int


Pieces = tuple[Piece, ...]


def pairs_between(
    source: Layout, target: Layout, size: int, at: tuple[int, int] | None = None
) -> Pairs:
    """Return what moves between any two of ``size`` ranks, or stays on one.

    A rank takes a block from itself if it has it, else from one of the ranks that have it: those
    that want it are spread over them. ``at`` is where the target begins in the source, if it is a
    part of that. LayoutError: shapes differ, or there are more ranks.
    """
    _require_match(source, target, size, at)
    blocks = _blocks_of(source)
    return {
        (holder, wanting): rows
        for wanting in target.ranks
        for holder, rows in blocks.wanted(target, wanting, at).items()
    }


@lru_cache(256)
def pieces_between(
    source: Layout, target: Layout, rank: int, size: int, at: tuple[int, int] | None = None
) -> Pieces:
    """Return what one of ``size`` ranks takes from each, as for :func:`pairs_between`."""
    _require_match(source, target, size, at)
    return tuple(
        Piece(holder, np.array([_numbers(each) for each in rows], np.int64), total(rows))
        for holder, rows in _blocks_of(source).wanted(target, rank, at).items()
    )


def pieces_of(layout: Layout, window: Extent, rank: int, size: int) -> Pieces:
    """Return what one of ``size`` ranks takes from each, to have a window of a matrix."""
    row, column, rows, columns = window
    target = _whole((rows, columns), rank)
    return pieces_between(layout, target, rank, size, (row, column))


def pieces_into(layout: Layout, window: Extent, rank: int, size: int) -> Pieces:
    """Return the same, to have the window where it lies in the whole matrix."""
    row, column, _, columns = window
    found = []
    for holder, table, n in pieces_of(layout, window, rank, size):
        lands = table.copy()
        down, across = np.divmod(table[:, 4], columns)
        lands[:, 4] = (row + down) * layout.shape[1] + column + across
        lands[:, 5] = layout.shape[1]
        found.append(Piece(holder, lands, n))
    return tuple(found)


def _numbers(rows: Rows) -> tuple[int, ...]:
    return rows.n, rows.rows, rows.src, rows.src_step, rows.dst, rows.dst_step


@lru_cache(1024)
def _whole(shape: Shape, rank: int) -> Layout:
    return replicated(shape, [rank])


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


def _require_match(source: Layout, target: Layout, size: int, at: tuple[int, int] | None) -> None:
    if source.shape != target.shape and at is None:
        raise LayoutError(f"{source} and {target} differ in shape")
    if max((*source.ranks, *target.ranks), default=0) >= size:
        raise LayoutError(f"{source} or {target}: there are {size} ranks")


class _Blocks:
    """The blocks of a layout, by their edges."""

    def __init__(self, layout: Layout) -> None:
        self._stored = {
            block: src for holder in layout.ranks for block, src in layout.placed(holder)
        }
        self._holders = layout.holders
        self._extents = list(layout.holders)
        table: Any = np.array(self._extents, np.int64).reshape(-1, 4)
        self._begins, self._ends = table[:, :2], table[:, :2] + table[:, 2:]

    def wanted(
        self, target: Layout, wanting: int, at: tuple[int, int] | None
    ) -> dict[int, list[Rows]]:
        """Return what a rank takes from each, which begins ``at`` some place."""
        down, right = at or (0, 0)
        found: dict[int, list[Rows]] = defaultdict(list)
        for taken, dst in target.placed(wanting):
            block = replace(taken, row=taken.row + down, column=taken.column + right)
            begin = block.row, block.column
            end = block.row + block.rows, block.column + block.columns
            shares = ((self._begins < end) & (self._ends > begin)).all(1)
            for number in np.flatnonzero(shares):
                extent = self._extents[number]
                holder = _giver(self._holders[extent], wanting)
                giving = Block(holder, *extent)
                found[holder].append(_shared(giving, self._stored[giving], block, dst))
        return found


@lru_cache(64)
def _blocks_of(layout: Layout) -> _Blocks:
    return _Blocks(layout)


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
