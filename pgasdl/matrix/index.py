"""Elements by index: only what is asked for moves."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.elements import Array


def get(array: DistributedArray, key: Any) -> Any:
    """Return elements as NumPy has them, on every rank. Collective."""
    ranges, single = ranges_of(array, key)
    (top, bottom), (left, right) = ranges
    shape = bottom - top, right - left
    window = array.space.layout(shape, "replicated")
    found = np.empty(shape[0] * shape[1], array.dtype)
    array.space.move(array, window, found, (top, left))
    return dropped(found.reshape(shape), single)


def put(array: DistributedArray, key: Any, value: Any) -> None:
    """Set elements to a scalar, or to an array that every rank has."""
    array.require_original()
    ranges, single = ranges_of(array, key)
    (top, bottom), (left, right) = ranges
    whole = _spread(np.asarray(value, array.dtype), (bottom - top, right - left), single)
    for block, mine in array.blocks():
        rows = max(top, block.row), min(bottom, block.row + block.rows)
        columns = max(left, block.column), min(right, block.column + block.columns)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            here = mine[_less(rows, block.row), _less(columns, block.column)]
            here[...] = whole[_less(rows, top), _less(columns, left)]
    array.changed()


def _spread(given: Array, shape: tuple[int, int], single: tuple[bool, bool]) -> Array:
    """Return a value as NumPy spreads it over elements of an index, of two dimensions."""
    kept = tuple(n for n, one in zip(shape, single, strict=True) if not one)
    while given.ndim > len(kept) and given.shape[0] == 1:
        given = given[0]
    try:
        spread = np.broadcast_to(given, kept)
    except ValueError:
        raise LayoutError(f"a value of shape {given.shape} for elements of shape {kept}") from None
    return spread[tuple(None if one else slice(None) for one in single)]


def _less(limits: tuple[int, int], by: int) -> slice:
    return slice(limits[0] - by, limits[1] - by)


def ranges_of(
    array: DistributedArray, key: Any
) -> tuple[tuple[tuple[int, int], tuple[int, int]], tuple[bool, bool]]:
    """Return the rows and columns that are meant, and for which of them one number was given."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for at in [place for place, each in enumerate(keys) if each is Ellipsis][:1]:
        keys[at : at + 1] = [slice(None)] * (array.ndim - len(keys) + 1)
    keys += [slice(None)] * (array.ndim - len(keys))
    if len(keys) > array.ndim:
        raise IndexError(f"{len(keys)} indices of an array of {array.ndim} dimensions")
    found = [_range(each, n) for each, n in zip(keys, array.shape, strict=True)]
    if array.ndim == 1:
        found.append((0, 1, True))
    (top, bottom, row), (left, right, column) = found
    return ((top, bottom), (left, right)), (row, column)


def _range(key: Any, n: int) -> tuple[int, int, bool]:
    if isinstance(key, slice):
        begin, end, step = key.indices(n)
        if step != 1:
            raise IndexError(f"a slice with a step of {step}: only whole ranges are cut out")
        return begin, max(begin, end), False
    try:
        number = operator.index(key)
    except TypeError:
        number = None
    if number is None or isinstance(key, bool):
        raise IndexError(f"an index of type {type(key).__name__}: numbers and slices only")
    if not -n <= number < n:
        raise IndexError(f"index {number} of {n}")
    return number % n, number % n + 1, True


def dropped(found: Array, single: tuple[bool, bool]) -> Any:
    """Return it without the dimensions for which one number was given, or that a vector lacks."""
    return found[tuple(0 if one else slice(None) for one in single)]
