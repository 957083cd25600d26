"""Sums, maxima and what is made of them: each rank's blocks first, then all ranks in order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray, make
from pgasdl.matrix.elements import Array, as_computed, computed, core_dtype, late
from pgasdl.matrix.layout import Block, Layout, rows
from pgasdl.matrix.space import UFUNCS

_COPIED = 1 << 17  # elements, to be computed in another dtype
_ADDED = ("sum", "prod")
Axis = int | tuple[int, ...] | None
Moments = tuple[int, float, float]


@late
def reduce(
    array: DistributedArray,
    op: str,
    axis: Axis,
    keepdims: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Any:
    """Reduce over an axis, or over all elements. Collective; see :meth:`DistributedMatrix.sum`.

    ``dtype`` : of the result; None: NumPy's
    """
    wanted = None if dtype is None else as_numpy_dtype(dtype)
    ufunc, result = UFUNCS[op], _result(op, array.dtype, wanted)
    if axis == ():
        return array.astype(result)
    axis = _axis(array, axis)
    if not (array.size if axis is None else array.shape[axis]) and op in ("max", "min"):
        raise ValueError(f"the {op} of no elements")
    if axis is None and op == "sum" and result.kind not in "iub":
        total = _added(array, op, (mine for _, mine, _ in _moments(array)))
        return _alone(array, total.astype(result), keepdims)
    if axis is None:
        exact = np.dtype(np.float64) if op in _ADDED and result.kind not in "iu" else result
        wide, pieces = computed(result), _pieces(array, computed(array.dtype))
        parts = [ufunc.reduce(each, dtype=wide) for each in pieces]
        return _alone(array, combined(array, op, parts, op, exact).astype(result), keepdims)

    def part(block: Block, mine: Array) -> Array:
        del block
        return ufunc.reduce(as_computed(mine), axis, computed(result))  # type: ignore[no-any-return]

    return _kept(over_axis(array, axis, op, part, result), axis, keepdims)


@lru_cache(256)
def _result(op: str, given: np.dtype[Any], wanted: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the dtype of a result: NumPy's, if none is wanted."""
    found: np.dtype[Any] = wanted or UFUNCS[op].reduce(np.empty(1, given)).dtype
    core_dtype(found)
    return found


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of means of elements of this one."""
    return np.dtype(np.float64) if dtype.kind in "iub" else dtype


@lru_cache(256)
def _exact(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which moments of elements of this one are computed."""
    return computed(_real(dtype))


def _kept(vector: DistributedArray, axis: int, keepdims: bool) -> Any:
    """Return it as a matrix of one column, or one row, if dimensions are kept."""
    layout = vector.layout if axis else vector.layout.T
    return make(2, vector.space, layout, vector.dtype, vector.flat) if keepdims else vector


def _alone(array: DistributedArray, total: Any, keepdims: bool) -> Any:
    """Return a number, or an array of it if dimensions are kept."""
    if not keepdims:
        return total
    everywhere = array.space.layout((1, 1), "replicated")
    return make(array.ndim, array.space, everywhere, total.dtype, np.reshape(total, 1))


def _axis(array: DistributedArray, axis: Axis) -> int | None:
    """Return the axis that is reduced; None: all are."""
    if axis is None:
        return None
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = [*map(operator.index, given)]
    if not axes or not all(-array.ndim <= each < array.ndim for each in axes):
        raise LayoutError(f"axis {axis} of an array of {array.ndim} dimensions")
    found = {each % array.ndim for each in axes}
    if len(found) < len(axes):
        raise LayoutError(f"axis {axis} has a duplicate value")
    return None if len(found) == array.ndim else found.pop()


def combined(array: DistributedArray, what: str, parts: list[Any], op: str, dtype: Any) -> Any:
    """Return the reduction of all ranks' numbers, the same on each; ``what`` names it."""
    core = _core(dtype)
    mine = UFUNCS[op].reduce(parts or [_identity(op, core)], dtype=core, keepdims=True)
    return array.space.reduce(f"{what} of {array.identity}", mine, op)[0]


def _pieces(array: DistributedArray, element: np.dtype[Any]) -> list[Array] | Iterator[Array]:
    """Return what counts here, as it is computed: what is copied for that in smaller pieces."""
    flats = array.counted()
    if array.dtype == element:
        return flats
    pieces = (flat[at : at + _COPIED] for flat in flats for at in range(0, len(flat), _COPIED))
    return (each.astype(element) for each in pieces)


def _moments(array: DistributedArray, squares: str = "") -> list[Moments]:
    """Return number, sum and sum of squares of parts of this rank's elements, in float64."""
    pieces = _pieces(array, _exact(array.dtype))
    return [(each.size, *_native.moments(each, squares)) for each in pieces]


def _together(parts: list[Moments]) -> Moments:
    """Return the moments of parts as those of one, with squares of distances from the mean."""
    n, total, squares = map(sum, zip((0, 0.0, 0.0), *parts, strict=True))
    apart = (k * (mine / k - total / n) ** 2 for k, mine, _ in parts if k and len(parts) > 1)
    return n, total, squares + sum(apart)


def _added(array: DistributedArray, what: str, mine: Iterable[float]) -> np.float64:
    """Return the sum of all ranks' numbers, the same on each."""
    told = array.space.gather(f"{what} of {array.identity}", sum(mine, 0.0))
    return np.float64(sum(each for (each,) in told))


def over_axis(
    array: DistributedArray,
    axis: int,
    op: str,
    part: Callable[[Block, Array], Array],
    result: np.dtype[Any],
) -> Any:
    """Return the vector that is reduced over an axis: ``part`` returns what a block adds to it.

    It has the layout of the other axis if no block is cut along this one; else every rank has it.
    """
    across = array.layout if axis else array.layout.T
    layout = _first_column(across)
    if layout is not None:
        vector = make(1, array.space, layout, result)
        parts = [part(block, mine) for block, mine in array.blocks()]
        if parts:
            vector.flat[:] = np.concatenate(parts)
        return vector
    core, n = _core(result), across.shape[0]
    whole = np.full(n, _identity(op, core), core)
    for block, mine in array.kept():
        here = whole[block.where[1 - axis]]
        UFUNCS[op](here, part(block, mine), out=here, casting="unsafe")
    whole = array.space.reduce(f"{op} over axis {axis} of {array.identity}", whole, op)
    everywhere = array.space.layout((n, 1), "replicated")
    return make(1, array.space, everywhere, result, whole.astype(result))


@lru_cache(256)
def _first_column(layout: Layout) -> Layout | None:
    """Return the layout of the rows' first elements; None: some are cut, or there are none."""
    if not (layout.whole_rows and layout.shape[1]):
        return None
    found = (Block(b.rank, b.row, 0, b.rows, 1) for b in layout.blocks)
    return Layout((layout.shape[0], 1), found, layout.name)


def _core(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which ranks combine elements of this one."""
    return np.dtype(np.int32) if dtype.kind == "b" else computed(dtype)


def _identity(op: str, dtype: np.dtype[Any]) -> Any:
    if op in _ADDED:
        return dtype.type(op == "prod")
    low = op == "max"
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).min if low else np.iinfo(dtype).max)
    return dtype.type(-math.inf if low else math.inf)


@late
def mean(array: DistributedArray, axis: Axis, keepdims: bool) -> Any:
    """Return the mean, or the means over an axis: added up in float32 at least, as by NumPy."""
    element = _real(array.dtype)
    total = reduce(array, "sum", axis, keepdims, computed(element))
    if axis == ():
        return total.astype(element)
    over = _axis(array, axis)
    return (total / (array.size if over is None else array.shape[over])).astype(element)


@late
def variance(array: DistributedArray, axis: Axis, correction: float, keepdims: bool) -> Any:
    """Return the variance, or the variances over an axis, as ``numpy.var``."""
    element = _real(array.dtype)
    over = None if axis == () else _axis(array, axis)
    if axis != () and over is None:
        mine = _together(_moments(array, "mean"))
        told: Any = array.space.gather(f"variance of {array.identity}", *mine)
        _, _, squares = _together(told)
        found = np.float64(squares) / max(array.size - correction, 0)
        return _alone(array, found.astype(element), keepdims)
    wide = computed(element)
    exact = array if array.dtype == wide else array.astype(wide)
    away: Any = np.square(exact - mean(exact, axis, True))
    n = 1 if over is None else array.shape[over]
    return (reduce(away, "sum", axis, keepdims) / max(n - correction, 0)).astype(element)


@late
def place(array: DistributedArray, op: str, axis: int | None, keepdims: bool) -> Any:
    """Return where the first maximum or minimum is, as ``numpy.argmax``; the first nan is both."""
    over = None if axis is None else _axis(array, operator.index(axis))
    best = reduce(array, op, over, array.ndim == 2 and over is not None)
    whole = best.everywhere() if isinstance(best, DistributedArray) else np.reshape(best, (1, 1))
    whole, index = np.broadcast_to(whole, array.layout.shape), np.dtype(np.int64)

    def part(block: Block, mine: Array) -> Array:
        due, mine = as_computed(whole[block.where]), as_computed(mine)
        at = np.ogrid[block.where]
        number = at[0] * array.layout.shape[1] + at[1] if over is None else at[over]
        hit = (mine == due) | ((mine != mine) & (due != due))  # noqa: PLR0124 (of nan)
        found: Array = np.where(hit, number, array.size).min(over, initial=array.size)
        return found

    if over is not None and array.ndim == 2:
        return _kept(over_axis(array, over, "min", part, index), over, keepdims)
    total = combined(array, f"place of {op}", [part(*each) for each in array.kept()], "min", index)
    return _alone(array, total, keepdims)


@late
def norm(array: DistributedArray, axis: Axis = None) -> Any:
    """Return the Frobenius or Euclidean norm, or those over an axis: added up in float64."""
    exact, over = np.dtype(np.float64), _axis(array, axis)

    def part(block: Block, mine: Array) -> Array:
        del block
        return np.square(mine, dtype=exact).sum(over)  # type: ignore[no-any-return]

    if over is None:
        squares = (mine for _, _, mine in _moments(array, "items"))
        total = np.sqrt(_added(array, "norm", squares))
    else:
        total = np.sqrt(over_axis(array, over, "sum", part, exact))
    return total.astype(computed(array.dtype)) if array.dtype.kind not in "iub" else total


@late
def softmax(array: DistributedArray) -> Any:
    """Return the softmax of each row. Where rows are cut, it is made by rows, and moved back."""
    layout = array.layout
    if not layout.whole_rows:
        by_rows = array.replica(rows(layout.shape, layout.ranks))
        return softmax(by_rows).remap(layout)
    element = _real(array.dtype)
    result = make(2, array.space, layout, element)
    for (_, mine), (_, out) in zip(array.blocks(), result.blocks(), strict=True):
        values = mine.astype(computed(element))
        values -= values.max(1, keepdims=True)
        np.exp(values, out=values)
        out[...] = values / values.sum(1, keepdims=True)
    return result
