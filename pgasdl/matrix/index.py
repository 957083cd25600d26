"""Elements by index: only what is asked for moves."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray, require_same_space
from pgasdl.matrix.elements import Array


def get(array: DistributedArray, key: Any) -> Any:
    """Return elements as NumPy has them, on every rank. Collective.

    Numbers and slices take what is asked for, or the range in which steps go; others take it all.
    """
    key = _plain(array, key)
    if _chosen(key):
        _require(array, key)
        return np.asarray(array)[key]
    taken, left_to_do = _covered(array, key)
    found = _range_of(array, taken)
    return found if left_to_do is None else found[left_to_do]


def _plain(array: DistributedArray, key: Any) -> Any:
    """Return a key in which what is distributed is what every rank has. Collective."""
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(each, DistributedArray) for each in keys):
        return key
    require_same_space(array, *(each for each in keys if isinstance(each, DistributedArray)))
    keys = tuple(np.asarray(each) if isinstance(each, DistributedArray) else each for each in keys)
    return keys if isinstance(key, tuple) else keys[0]


def _chosen(key: Any) -> bool:
    """Whether it is more than numbers, slices and an ellipsis: masks, lists, new dimensions."""
    keys = key if isinstance(key, tuple) else (key,)

    def usual(each: Any) -> bool:
        truth = isinstance(each, bool) or getattr(each, "dtype", None) == np.bool_
        number = hasattr(each, "__index__") and not truth
        return isinstance(each, slice) or each is Ellipsis or (number and np.ndim(each) == 0)

    return not all(map(usual, keys)) or sum(each is Ellipsis for each in keys) > 1


def _require(array: DistributedArray, key: Any) -> Array:
    """Raise IndexError if NumPy does, before anything moves, or return elements that are not set.

    They take no memory but for what is chosen by lists.
    """
    return np.broadcast_to(np.empty((), array.dtype), array.shape)[key]  # type: ignore[no-any-return]


def _covered(array: DistributedArray, key: Any) -> tuple[Any, Any]:
    """Return a key without steps, and what is to be taken of that; None: all."""
    keys = key if isinstance(key, tuple) else (key,)
    if all(each.step in (None, 1) for each in keys if isinstance(each, slice)):
        return key, None
    taken: list[Any] = []
    steps: list[Any] = []
    for each, n in zip(_full(array, key), array.shape, strict=True):
        if isinstance(each, slice):
            places = range(n)[each]
            low, high = (
                (min(places[0], places[-1]), max(places[0], places[-1])) if places else (0, -1)
            )
            each = slice(low, high + 1)  # noqa: PLW2901
            steps.append(slice(None, None, places.step))
        taken.append(each)
    return tuple(taken), tuple(steps)


def _range_of(array: DistributedArray, key: Any) -> Any:
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
    if isinstance(value, DistributedArray):
        require_same_space(array, value)
        value = np.asarray(value)
    known = isinstance(key, DistributedArray | np.ndarray)
    if known and key.dtype == bool and key.shape == array.shape and np.ndim(value) == 0:
        value = np.asarray(value, array.dtype)
        if isinstance(key, DistributedArray):
            array.flat[key.replica(array.layout).flat] = value
        else:
            for block, mine in array.blocks():
                mine[key.reshape(array.layout.shape)[block.where]] = value
        array.changed()
        return
    key = _plain(array, key)
    if _chosen(key):
        _put_chosen(array, key, value)
        return
    keys = _full(array, key) + [0] * (2 - array.ndim)
    rows, columns = map(_places, keys, array.layout.shape)
    single = not isinstance(keys[0], slice), not isinstance(keys[1], slice)
    whole = _spread(np.asarray(value, array.dtype), (len(rows), len(columns)), single)
    for block, mine in array.blocks():
        down = _within(rows, block.row, block.rows)
        right = _within(columns, block.column, block.columns)
        if down and right:
            mine[down[0], right[0]] = whole[down[1], right[1]]
    array.changed()


def _put_chosen(array: DistributedArray, key: Any, value: Any) -> None:
    """Set what a mask or a list chooses: every rank finds all places, and sets its own."""
    chosen = np.shape(_require(array, key))
    values = _fitting(np.asarray(value, array.dtype), chosen)
    height, width = whole = array.layout.shape
    short = np.min_scalar_type(max(whole))  # these are all that takes memory for others' elements
    rows, columns = (
        np.asarray(np.broadcast_to(each.astype(short), whole).reshape(array.shape)[key])
        for each in np.ogrid[:height, :width]
    )
    for block, mine in array.blocks():
        here = (rows >= block.row) & (rows < block.row + block.rows)
        here &= (columns >= block.column) & (columns < block.column + block.columns)
        mine[rows[here] - block.row, columns[here] - block.column] = values[here]
    array.changed()


def _places(key: Any, n: int) -> range:
    """Return which of ``n`` rows or columns are meant."""
    return range(n)[key] if isinstance(key, slice) else range(*_range(key, n)[:2])


def _within(places: range, begin: int, length: int) -> tuple[slice, slice] | None:
    """Return where places lie in a part, and which of them do; None: none."""
    turn = 1 if places.step > 0 else -1
    rising = places[::turn]
    edges = (-((rising.start - edge) // rising.step) for edge in (begin, begin + length))
    first, last = (min(max(0, each), len(rising)) for each in edges)
    if first == last:
        return None
    here, which = rising[first:last], range(len(rising))[::turn][first:last]
    stop = None if which.stop < 0 else which.stop
    return slice(here[0] - begin, here[-1] - begin + 1, here.step), slice(which[0], stop, turn)


def _spread(given: Array, shape: tuple[int, int], single: tuple[bool, bool]) -> Array:
    """Return a value as NumPy spreads it over elements of an index, of two dimensions."""
    kept = tuple(n for n, one in zip(shape, single, strict=True) if not one)
    return _fitting(given, kept)[tuple(None if one else slice(None) for one in single)]


def _fitting(given: Array, shape: tuple[int, ...]) -> Array:
    while given.ndim > len(shape) and given.shape[0] == 1:
        given = given[0]
    try:
        return np.broadcast_to(given, shape)
    except ValueError:
        raise LayoutError(f"a value of shape {given.shape} for elements of shape {shape}") from None


def ranges_of(
    array: DistributedArray, key: Any
) -> tuple[tuple[tuple[int, int], tuple[int, int]], tuple[bool, bool]]:
    """Return the rows and columns that are meant, and for which of them one number was given."""
    keys = _full(array, key)
    found = [_range(each, n) for each, n in zip(keys, array.shape, strict=True)]
    if array.ndim == 1:
        found.append((0, 1, True))
    (top, bottom, row), (left, right, column) = found
    return ((top, bottom), (left, right)), (row, column)


def _full(array: DistributedArray, key: Any) -> list[Any]:
    """Return a key for each dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for at in [place for place, each in enumerate(keys) if each is Ellipsis][:1]:
        keys[at : at + 1] = [slice(None)] * (array.ndim - len(keys) + 1)
    keys += [slice(None)] * (array.ndim - len(keys))
    if len(keys) > array.ndim:
        raise IndexError(f"{len(keys)} indices of an array of {array.ndim} dimensions")
    return keys


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
