"""Cholesky factors and linear equations, panel by panel (right-looking, as in LAPACK).

Rows are dealt to the ranks. Every rank gets the present panel of columns and factors what of it is
not spread over ranks; all find the same, or raise the same error. Then each rank changes its own
rows by a product. Rows never move: those that were pivots are marked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.elements import STORED, Array
from pgasdl.matrix.index import get
from pgasdl.matrix.layout import Block, cyclic

_WIDTH = 64  # columns of a panel, and rows that are dealt at once


def cholesky(x: Any, *, upper: bool = False) -> Any:
    """Return the lower or upper factor of a matrix, in its layout; that triangle is read.

    LinAlgError: it is not square or not positive definite.
    """
    n = _order(x)
    work = _dealt(x.T if upper else x, _element(x.dtype))
    for begin in range(0, n, _WIDTH):
        end = min(n, begin + _WIDTH)
        columns = slice(begin, end)
        corner = np.linalg.cholesky(get(work, (columns, columns)))
        for block, mine in work.blocks():
            if block.row > begin:
                mine[:, columns] = np.linalg.solve(corner, mine[:, columns].T).T
            elif block.row == begin:
                mine[:, columns], mine[:, end:] = corner, 0
        work.changed()
        panel = get(work, (slice(end, n), columns)) if end < n else corner
        for block, mine in work.blocks():
            if block.row > begin:
                length = block.row + block.rows - end  # what is right of the diagonal is not used
                mine[:, end : end + length] -= mine[:, columns] @ panel[:length].T
        work.changed()
    return (work.T if upper else work).remap(x.layout)


def solve(x1: DistributedArray, x2: DistributedArray) -> Any:
    """Return the solution of linear equations, in the layout of the right side.

    LU with partial pivoting. LinAlgError: the matrix is not square or singular.
    """
    require_same_space(x1, x2)
    n, element = _order(x1), _element(np.result_type(x1.dtype, x2.dtype))
    if x2.shape[0] != n:
        raise LayoutError(f"a right side of shape {x2.shape} for a matrix of {n} x {n}")
    a, b = _dealt(x1, element), _dealt(x2, element)
    found = make(x2.ndim, b.space, b.layout, element)
    left = np.arange(n)  # rows that were no pivots yet
    steps: list[tuple[slice, Array, Array]] = []
    for begin in range(0, n, _WIDTH):
        columns = slice(begin, min(n, begin + _WIDTH))
        panel = get(a, (slice(None), columns))
        pivots = _factor(panel, left)
        left = np.setdiff1d(left, pivots)
        steps.append((columns, pivots, np.triu(panel[pivots])))
        lower = np.tril(panel[pivots], -1) + np.eye(len(pivots), dtype=element)
        for array, first in ((a, columns.stop), (b, 0)):
            rows = np.linalg.solve(lower, _rows(array, pivots, first))
            for block, mine in array.blocks():
                here, at = _within(block, pivots)
                mine[here, first:] = rows[at]
                here, at = _within(block, left)
                mine[here, first:] -= panel[left[at]] @ rows
            array.changed()
    for columns, pivots, upper in reversed(steps):
        rows = np.linalg.solve(upper, _rows(b, pivots, 0))
        blocks = zip(b.blocks(), found.blocks(), a.blocks(), strict=False)  # b may have no columns
        for (block, mine), (_, out), (_, factor) in blocks:
            # Also in rows that are solved: nobody needs them any more.
            np.subtract(mine, factor[:, columns] @ rows, out=mine)
            if block.row == columns.start:
                out[...] = rows
        b.changed()
    return found.remap(x2.layout)


def _order(x: DistributedArray) -> int:
    if x.ndim != 2 or x.shape[0] != x.shape[1]:
        raise LinAlgError(f"a matrix of shape {x.shape} is not square")
    return x.shape[0]


def _element(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype in STORED:
        raise TypeError(f"there is no linear algebra in {dtype}: use astype(np.float32) first")
    return dtype if dtype.kind == "f" else np.dtype(np.float64)


def _dealt(x: DistributedArray, element: np.dtype[Any]) -> Any:
    """Return a copy whose rows are dealt to all ranks."""
    space, (m, n) = x.space, x.layout.shape
    layout = cyclic((m, n), range(space.group.size), (_WIDTH, max(1, n)))
    return x.remap(layout).astype(element)


def _factor(panel: Array, left: Array) -> Array:
    """Factor a panel in place, and return the rows that were its pivots, in order."""
    pivots = []
    for column in range(panel.shape[1]):
        at = np.argmax(abs(panel[left, column]))
        pivot, left = left[at], np.delete(left, at)
        if panel[pivot, column] == 0:
            raise LinAlgError("a singular matrix")
        pivots.append(pivot)
        panel[left, column] /= panel[pivot, column]
        panel[left, column + 1 :] -= np.outer(panel[left, column], panel[pivot, column + 1 :])
    return np.array(pivots)


def _within(block: Block, rows: Array) -> tuple[Array, Array]:
    """Return which rows of a block are among some, and their places there."""
    at = np.flatnonzero((rows >= block.row) & (rows < block.row + block.rows))
    return rows[at] - block.row, at


def _rows(array: DistributedArray, places: Array, first: int) -> Array:
    """Return some rows from a column on, on all ranks. Collective."""
    found = np.zeros((len(places), array.layout.shape[1] - first), array.dtype)
    for block, mine in array.blocks():
        here, at = _within(block, places)
        found[at] = mine[here, first:]
    if found.size:
        flat = array.space.reduce(f"pivot rows of {array.identity}", found.reshape(-1))
        found = flat.reshape(found.shape)
    return found
