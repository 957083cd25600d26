"""Sums, maxima and what is made of them: each rank's blocks first, then all ranks in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray, make
from pgasdl.matrix.elements import Array, as_computed, computed
from pgasdl.matrix.layout import Block, Layout, rows

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def reduce(array: DistributedArray, op: str, axis: int | None) -> Any:
    """Reduce over an axis, or over all elements. Collective; see :meth:`DistributedMatrix.sum`."""
    ufunc = _UFUNCS[op]
    result = ufunc.reduce(np.empty(1, array.dtype)).dtype
    if axis is not None:
        if not -array.ndim <= axis < array.ndim:
            raise LayoutError(f"axis {axis} of an array of {array.ndim} dimensions")
        axis %= array.ndim
    if axis is None or array.ndim == 1:
        if not array.size and op != "sum":
            raise ValueError(f"the {op} of no elements")
        exact = np.dtype(np.float64) if op == "sum" and result.kind not in "iu" else result
        parts = [ufunc.reduce(as_computed(mine), None, exact) for _, mine in array.kept()]
        return combined(array, parts, op, exact).astype(result)
    if not array.shape[axis] and op != "sum":
        raise ValueError(f"the {op} of no elements")

    def part(block: Block, mine: Array) -> Array:
        del block
        return ufunc.reduce(as_computed(mine), axis, computed(result))  # type: ignore[no-any-return]

    return over_axis(array, axis, op, part, result)


def combined(array: DistributedArray, parts: list[Any], op: str, dtype: np.dtype[Any]) -> Any:
    """Return the reduction of all ranks' numbers, the same on each."""
    core = _core(dtype)
    mine = _UFUNCS[op].reduce([_identity(op, core), *parts]).astype(core)
    return array.space.combine(mine, op)


def over_axis(
    array: DistributedArray,
    axis: int,
    op: str,
    part: Callable[[Block, Array], Array],
    result: np.dtype[Any],
) -> Any:
    """Return the vector that is reduced over an axis of a matrix.

    It has the layout of the other axis if no block is cut along this one; else every rank has it.

    Parameters
    ----------
    part : Callable[[Block, ndarray], ndarray]
        What a block has to the vector's elements from its own first row or column on.
    """
    n = array.layout.shape[1 - axis]

    def of(block: Block) -> tuple[int, int]:
        return (block.row, block.rows) if axis else (block.column, block.columns)

    across = array.layout if axis else array.layout.T
    if across.whole_rows and array.layout.shape[axis]:
        found = (Block(b.rank, of(b)[0], 0, of(b)[1], 1) for b in array.layout.blocks)
        layout = Layout((n, 1), found, array.layout.name if axis else array.layout.T.name)
        vector = make(1, array.space, layout, result)
        parts = [part(block, mine) for block, mine in array.blocks()]
        if parts:
            vector.flat[:] = np.concatenate(parts)
        return vector
    core = _core(result)
    whole = np.full(n, _identity(op, core), core)
    for block, mine in array.kept():
        begin, length = of(block)
        here = whole[begin : begin + length]
        _UFUNCS[op](here, part(block, mine), out=here, casting="unsafe")
    array.space.add_up(whole, op)
    everywhere = array.space.layout((n, 1), "replicated")
    return make(1, array.space, everywhere, result, whole.astype(result))


def _core(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which ranks combine elements of this one."""
    return np.dtype(np.int32) if dtype.kind == "b" else computed(dtype)


def _identity(op: str, dtype: np.dtype[Any]) -> Any:
    if op == "sum":
        return dtype.type(0)
    low = op == "max"
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).min if low else np.iinfo(dtype).max)
    return dtype.type(-math.inf if low else math.inf)


def norm(array: DistributedArray) -> Any:
    """Return the Frobenius or Euclidean norm."""
    exact = np.dtype(np.float64)
    parts = [np.square(mine, dtype=exact).sum() for _, mine in array.kept()]
    total = np.sqrt(combined(array, parts, "sum", exact))
    return total.astype(computed(array.dtype)) if array.dtype.kind not in "iub" else total


def softmax(array: DistributedArray) -> Any:
    """Return the softmax of each row. Where rows are cut, it is made by rows, and moved back."""
    layout = array.layout
    if not layout.whole_rows:
        by_rows = array.replica(rows(layout.shape, layout.ranks))
        return softmax(by_rows).remap(layout)
    element = array.dtype if array.dtype.kind not in "iub" else np.dtype(np.float64)
    result = make(2, array.space, layout, element)
    for (_, mine), (_, out) in zip(array.blocks(), result.blocks(), strict=True):
        values = mine.astype(computed(element))
        values -= values.max(1, keepdims=True)
        np.exp(values, out=values)
        out[...] = values / values.sum(1, keepdims=True)
    return result
