"""What products read of peers' blocks, kept within a limit until the matrix changes (dMath)."""

from __future__ import annotations

from typing import Any

from pgasdl.matrix.elements import Array
from pgasdl.matrix.layout import Extent, Shape


class Windows:
    """Windows of one matrix, in memory for all of it: each lies where the matrix has it."""

    def __init__(self, flat: Array, shape: Shape) -> None:
        self.flat, self.whole = flat, flat.reshape(shape)
        self._extents: list[Extent] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are there."""
        return self.flat.itemsize * sum(rows * columns for _, _, rows, columns in self._extents)

    def missing(self, window: Extent) -> list[Extent]:
        """Return parts of a window that are not there yet, and count them as there."""
        parts = [window]
        for extent in self._extents:
            parts = [rest for part in parts for rest in _outside(part, extent)]
        for part in parts:
            self._note(part)
        return parts

    def clear(self) -> None:
        """Forget what is there: some of it may not have arrived."""
        self._extents.clear()

    def _note(self, extent: Extent) -> None:
        for other in self._extents:
            joined = _joined(other, extent)
            if joined is not None:
                self._extents.remove(other)
                return self._note(joined)
        self._extents.append(extent)


class Kept:
    """The windows of a space's matrices. Those that were not used for the longest time go first."""

    def __init__(self) -> None:
        self.limit = 0
        self._windows: dict[tuple[Any, ...], Windows] = {}

    def find(self, array: Any) -> Windows | None:
        """Return what is kept of an array as it is now."""
        return self._windows.get(_key(array))

    def of(self, array: Any) -> Windows | None:
        """Return where windows of an array are to be kept; None: it is larger than the limit."""
        key, nbytes = _key(array), array.size * array.dtype.itemsize
        found = self._windows.pop(key, None)
        if found is None:
            if not 0 < nbytes <= self.limit or not array.number:
                return None
            self.shrink(self.limit - nbytes)
            flat = array.space.empty(array.size, array.dtype)
            found = Windows(flat, array.layout.shape)
        self._windows[key] = found
        return found

    def shrink(self, limit: int) -> None:
        """Drop windows until they take so many bytes."""
        while sum(each.flat.nbytes for each in tuple(self._windows.values())) > limit:
            self._windows.pop(next(iter(self._windows)), None)

    def drop(self, array: Any) -> None:
        """Drop what is kept of an array, and of its replicas: by any thread that collects it."""
        for key in tuple(self._windows):
            if key[0] == array.number:
                self._windows.pop(key, None)


def _key(array: Any) -> tuple[Any, ...]:
    return array.number, array.version, array.layout, array.dtype


def _outside(part: Extent, other: Extent) -> list[Extent]:
    """Return what of an extent lies outside another one: above, below, left and right of it."""
    row, column, rows, columns = part
    top, bottom = max(row, other[0]), min(row + rows, other[0] + other[2])
    left, right = max(column, other[1]), min(column + columns, other[1] + other[3])
    if top >= bottom or left >= right:
        return [part]
    found = (
        (row, column, top - row, columns),
        (bottom, column, row + rows - bottom, columns),
        (top, column, bottom - top, left - column),
        (top, right, bottom - top, column + columns - right),
    )
    return [each for each in found if each[2] and each[3]]


def _joined(one: Extent, other: Extent) -> Extent | None:
    """Return two extents as one, if they are neighbours along a whole edge."""
    for axis in (0, 1):
        first, second = sorted((one, other), key=lambda each: each[axis])
        alike = first[1 - axis :: 2] == second[1 - axis :: 2]
        if alike and first[axis] + first[axis + 2] == second[axis]:
            joined = list(first)
            joined[axis + 2] += second[axis + 2]
            return tuple(joined)  # type: ignore[return-value]
    return None
