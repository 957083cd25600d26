"""A block of a matrix that is spread over ranks, and its place, as the index has it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pgasdl.checkpoint.state import Array, packed


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A block of a matrix; the blocks of all ranks together cover each element once.

    Parameters
    ----------
    name : str
        The matrix.
    shape : (int, int)
        Rows and columns of the whole matrix, the same on all ranks.
    row, column : int
        Where in the matrix the block begins.
    array : array of 2 dimensions
        The block, of the same dtype on all ranks; it may be empty. A vector is a matrix of one
        column.
    """

    name: str
    shape: tuple[int, int]
    row: int
    column: int
    array: Array


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """The description of a block, without its elements."""

    name: str
    dtype: str
    shape: tuple[int, int]
    row: int
    column: int
    rows: int
    columns: int

    @property
    def key(self) -> str:
        """The name of the block in its file."""
        rows = f"{self.row}:{self.row + self.rows}"
        return f"{self.name}[{rows},{self.column}:{self.column + self.columns}]"


def block_of(shard: Shard) -> tuple[ShardPlace, Array]:
    """Return the place of a block, and its elements as they are written.

    ValueError: it does not lie in its matrix. TypeError: safetensors does not have its dtype.
    """
    array = packed(np.asanyarray(shard.array), shard.name)
    rows, columns = map(operator.index, shard.shape)
    row, column = operator.index(shard.row), operator.index(shard.column)
    if array.ndim != 2:
        raise ValueError(f"{shard.name}: a block of {array.ndim} dimensions: there are 2")
    if min(row, rows - row - array.shape[0], column, columns - column - array.shape[1]) < 0:
        raise ValueError(
            f"{shard.name}: a block of {array.shape} at ({row}, {column}) does not lie in a matrix "
            f"of {(rows, columns)}"
        )
    return ShardPlace(
        shard.name, array.dtype.name, (rows, columns), row, column, *array.shape
    ), array


def check(places: Iterable[ShardPlace]) -> None:
    """Raise ValueError unless the blocks of every matrix fit, and cover each element once."""
    matrices: dict[str, list[ShardPlace]] = {}
    for place in places:
        matrices.setdefault(place.name, []).append(place)
    for name, blocks in matrices.items():
        kinds = sorted({(block.dtype, block.shape) for block in blocks})
        if len(kinds) > 1:
            raise ValueError(f"{name}: the ranks differ in its dtype or shape: {kinds}")
        times = _times_covered(kinds[0][1], blocks)
        if (times != 1).any():
            raise ValueError(
                f"{name}: an element lies in {times[times != 1].max()} blocks: in one it has to"
            )


def _times_covered(shape: tuple[int, int], blocks: list[ShardPlace]) -> Array:
    """Return how many blocks each cell has, of the grid in which their edges cut the matrix."""
    rows = np.unique([0, shape[0], *(at for b in blocks for at in (b.row, b.row + b.rows))])
    columns = np.unique(
        [0, shape[1], *(at for b in blocks for at in (b.column, b.column + b.columns))]
    )
    times = np.zeros((len(rows) - 1, len(columns) - 1), np.int64)
    for block in blocks:
        top, bottom = np.searchsorted(rows, (block.row, block.row + block.rows))
        left, right = np.searchsorted(columns, (block.column, block.column + block.columns))
        times[top:bottom, left:right] += 1
    return times
