"""Layouts: which rank has which block of a matrix. Every rank knows every layout.

A layout is data, and the same on all ranks. Its ranks are places in a group.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product

import numpy as np

from pgasdl.errors import LayoutError

Shape = tuple[int, int]
# First row and column, number of rows and columns.
Extent = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A block of a matrix, and the rank that has it.

    Attributes
    ----------
    rank : int
        Place in the group.
    row, column : int
        Where it begins.
    rows, columns : int
        How large it is.
    """

    rank: int
    row: int
    column: int
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def extent(self) -> Extent:
        """What it covers."""
        return self.row, self.column, self.rows, self.columns

    @property
    def where(self) -> tuple[slice, slice]:
        """What it covers, as an index of the whole matrix."""
        return (
            slice(self.row, self.row + self.rows),
            slice(self.column, self.column + self.columns),
        )

    @property
    def T(self) -> Block:  # noqa: N802 (NumPy's name)
        """The same block of the transposed matrix."""
        return Block(self.rank, self.column, self.row, self.columns, self.rows)


class Layout:
    """Blocks of a matrix on ranks. They cover it; two that overlap are replicas of one another.

    A rank stores its blocks one after another, each in C order.

    Parameters
    ----------
    shape : tuple[int, int]
        Of the whole matrix.
    blocks : Iterable[Block]
        In any order; a rank stores its own in this order. Empty ones are left out.
    name : str, default "blocks"
        What ``repr`` calls it.

    Raises
    ------
    LayoutError
        A block leaves the matrix, an element is in no block, blocks overlap that are not equal, or
        a rank has a block twice.
    """

    def __init__(self, shape: Shape, blocks: Iterable[Block], name: str = "blocks") -> None:
        self.shape = shape
        self.name = name
        self.blocks = tuple(block for block in blocks if block.count)
        self._check()

    def _check(self) -> None:
        m, n = self.shape
        if min(m, n) < 0:
            raise LayoutError(f"a matrix of shape {self.shape}")
        for block in self.blocks:
            right, bottom = block.column + block.columns, block.row + block.rows
            if min(block.rank, block.row, block.column) < 0 or bottom > m or right > n:
                raise LayoutError(f"{block} is no part of a matrix of {m} x {n}")
        if len(set(self.blocks)) < len(self.blocks):
            raise LayoutError("a rank has a block twice")
        rows = sorted({0, m, *(edge for b in self.blocks for edge in (b.row, b.row + b.rows))})
        columns = sorted(
            {0, n, *(edge for b in self.blocks for edge in (b.column, b.column + b.columns))}
        )
        at_row = {edge: place for place, edge in enumerate(rows)}
        at_column = {edge: place for place, edge in enumerate(columns)}
        covered = np.zeros((len(rows) - 1, len(columns) - 1), np.int32)
        for row, column, height, width in self.holders:
            covered[
                at_row[row] : at_row[row + height], at_column[column] : at_column[column + width]
            ] += 1
        for place in np.argwhere(covered != 1)[:1]:
            row, column = rows[place[0]], columns[place[1]]
            many = "several blocks that differ" if covered[tuple(place)] else "no block"
            raise LayoutError(f"element [{row}, {column}] is in {many}")

    @property
    def size(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    @cached_property
    def holders(self) -> dict[Extent, tuple[int, ...]]:
        """The ranks that have each block."""
        found: dict[Extent, list[int]] = defaultdict(list)
        for block in self.blocks:
            found[block.extent].append(block.rank)
        return {extent: tuple(sorted(ranks)) for extent, ranks in found.items()}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have any block."""
        return tuple(sorted({block.rank for block in self.blocks}))

    @cached_property
    def _own(self) -> dict[int, tuple[Block, ...]]:
        found: dict[int, list[Block]] = defaultdict(list)
        for block in self.blocks:
            found[block.rank].append(block)
        return {rank: tuple(blocks) for rank, blocks in found.items()}

    @cached_property
    def _counts(self) -> dict[int, int]:
        return {rank: sum(block.count for block in own) for rank, own in self._own.items()}

    def of(self, rank: int) -> tuple[Block, ...]:
        """Return a rank's blocks, in the order in which it stores them."""
        return self._own.get(rank, ())

    def count(self, rank: int) -> int:
        """Return the number of elements that a rank has."""
        return self._counts.get(rank, 0)

    def placed(self, rank: int) -> Iterator[tuple[Block, int]]:
        """Yield a rank's blocks, and the elements that it stores before each."""
        blocks = self.of(rank)
        return zip(blocks, accumulate((block.count for block in blocks), initial=0), strict=False)

    def keeper(self, block: Block) -> int:
        """Return the one of a block's holders that counts, where each element counts once."""
        return self.holders[block.extent][0]

    @cached_property
    def _keepers(self) -> frozenset[int]:
        others = {block.rank for block in self.blocks if self.keeper(block) != block.rank}
        return frozenset(self.ranks) - others

    def keeps(self, rank: int) -> bool:
        """Whether a rank has blocks, all of which count there."""
        return rank in self._keepers

    @property
    def replicated(self) -> bool:
        """Every rank that has any block has the whole matrix in one."""
        return all(block.extent == (0, 0, *self.shape) for block in self.blocks)

    @property
    def whole_rows(self) -> bool:
        """No row is cut."""
        return all(block.columns == self.shape[1] for block in self.blocks)

    @cached_property
    def T(self) -> Layout:  # noqa: N802 (NumPy's name)
        """The layout of the transposed matrix, with each block where it was."""
        names = {"rows": "columns", "columns": "rows"}
        name = names.get(self.name, self.name)
        return Layout(self.shape[::-1], (block.T for block in self.blocks), name)

    @cached_property
    def digest(self) -> str:
        """Short text that differs between layouts: there may be many blocks to compare."""
        blocks = [tuple(map(int, (b.rank, *b.extent))) for b in self.blocks]
        text = str((tuple(map(int, self.shape)), blocks))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def identity(self) -> str:
        """Text that is the same for equal layouts, whatever their names, and only for these."""
        return f"{self._extent} ({self.digest})"

    @property
    def _extent(self) -> str:
        m, n = self.shape
        at = "no rank" if not self.ranks else f"ranks {_short(self.ranks)}"
        return f"{m} x {n}, {len(self.blocks)} blocks on {at}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Layout {self.name} of {self._extent}>"


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``n`` into parts of equal size, of which the last that are not empty may be smaller.

    Returns ``(begin, length)`` of each, as :func:`torch.chunk` and DTensor cut.

    >>> cuts(10, 4)
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    >>> cuts(4, 3)
    [(0, 2), (2, 2), (4, 0)]
    """
    if parts < 1:
        raise LayoutError("a layout on no rank")
    size = -(-n // parts)
    return [(min(n, p * size), max(0, min(size, n - p * size))) for p in range(parts)]


def rows(shape: Shape, ranks: Sequence[int]) -> Layout:
    """Return the layout in which each rank has some whole rows."""
    m, n = shape
    at = zip(ranks, cuts(m, len(ranks)), strict=True)
    return Layout(shape, (Block(rank, row, 0, height, n) for rank, (row, height) in at), "rows")


def columns(shape: Shape, ranks: Sequence[int]) -> Layout:
    """Return the layout in which each rank has some whole columns."""
    return rows(shape[::-1], ranks).T


def grid(shape: Shape, ranks: Sequence[int], across: int | None = None) -> Layout:
    """Return the layout in two dimensions: a block for each rank, row by row of a grid.

    ``across`` : columns of the grid, which divide the number of ranks; None: as square as can be
    """
    if across is None and ranks:
        few = next(q for q in range(int(len(ranks) ** 0.5), 0, -1) if len(ranks) % q == 0)
        across = len(ranks) // few if shape[1] >= shape[0] else few
    if not across or across < 1 or len(ranks) % across or not ranks:
        raise LayoutError(f"a grid of {len(ranks)} ranks has no {across} columns")
    tall = cuts(shape[0], len(ranks) // across)
    wide = cuts(shape[1], across)
    places = product(tall, wide)
    found = (
        Block(rank, row, column, height, width)
        for rank, ((row, height), (column, width)) in zip(ranks, places, strict=True)
    )
    return Layout(shape, found, "grid")


def cyclic(
    shape: Shape, ranks: Sequence[int], block: tuple[int, int] = (64, 64), across: int = 1
) -> Layout:
    """Return the block-cyclic layout: blocks are dealt to a grid of ranks in turn.

    Parameters
    ----------
    block : tuple[int, int], default (64, 64)
        Rows and columns of a block; the last of a row or column may be smaller.
    across : int, default 1
        Columns of the grid of ranks.
    """
    (height, width), (m, n) = block, shape
    if min(height, width) < 1:
        raise LayoutError(f"blocks of {height} x {width}")
    if across < 1 or len(ranks) % across or not ranks:
        raise LayoutError(f"a grid of {len(ranks)} ranks has no {across} columns")
    down = len(ranks) // across
    found = (
        Block(
            ranks[i % down * across + j % across],
            i * height,
            j * width,
            min(height, m - i * height),
            min(width, n - j * width),
        )
        for i in range(-(-m // height))
        for j in range(-(-n // width))
    )
    return Layout(shape, found, "cyclic")


def replicated(shape: Shape, ranks: Sequence[int]) -> Layout:
    """Return the layout in which every rank has the whole matrix."""
    name = "replicated" if len(ranks) > 1 else "whole"
    return Layout(shape, (Block(rank, 0, 0, *shape) for rank in ranks), name)


_NAMED = {
    "rows": rows,
    "columns": columns,
    "grid": grid,
    "cyclic": cyclic,
    "replicated": replicated,
}


@lru_cache(256)
def named(name: str, shape: Shape, size: int) -> Layout:
    """Return a layout by its name, on all of ``size`` ranks, with what its function has by default.

    Raises
    ------
    LayoutError
        No such name.
    """
    make = _NAMED.get(name)
    if make is None:
        raise LayoutError(f"no layout {name!r}; there are {', '.join(_NAMED)}")
    return make(shape, range(size))
