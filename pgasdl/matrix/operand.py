"""Operands of a product: parts of a matrix or of its transpose, in place where that can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.elements import Array
from pgasdl.matrix.homes import Homes, in_pool
from pgasdl.matrix.kept import Windows
from pgasdl.matrix.layout import Extent, Layout
from pgasdl.matrix.moves import Pieces, pieces_into, pieces_of

Range = tuple[int, int]


class Operand:
    """A matrix as this rank sees it, or its transpose, which is not copied.

    It has two buffers for windows that are not in place: one is filled while the other is used.
    """

    def __init__(self, array: DistributedArray, turned: bool = False) -> None:
        self.array, self._turned = array, turned
        space = array.space
        # Where its parts lie; at first this rank knows its own.
        self.homes = Homes(space.group, array.flat, [None] * space.group.size)
        self.buffers: list[Array] = []
        self.windows: Windows | None = None  # what is kept of it

    @property
    def identity(self) -> str:
        """As of an array."""
        return self.array.identity + (", transposed" if self._turned else "")

    @property
    def layout(self) -> Layout:
        """As it is multiplied."""
        return self.array.layout.T if self._turned else self.array.layout

    @property
    def kept(self) -> int:
        """Bytes of it that this rank keeps."""
        windows = self.array.space.kept.find(self.array)
        return 0 if windows is None else windows.nbytes

    @property
    def T(self) -> Operand:  # noqa: N802 (NumPy's name)
        """The transposed one."""
        return Operand(self.array, not self._turned)

    def reserve(self, windows: Iterable[tuple[Range, Range]], keep: bool = True) -> None:
        """Make memory for some windows, in the pool if that has room: kept, or two buffers."""
        extents = [self._extent(*each) for each in windows]
        longest = max((each[2] * each[3] for each in extents if not self._direct(each)), default=0)
        space, dtype = self.array.space, self.array.dtype
        if keep and longest and not space.group.mapped:
            kept = space.kept.of(self.array)
            if kept is not None and in_pool(space.group, kept.flat):
                self.windows = kept
                return
            space.kept.drop(self.array)  # the pool has no room for it
        self.buffers = [space.empty(longest, dtype) for _ in range(2 if longest else 0)]

    def window(self, rows: Range, columns: Range, number: int) -> Array:
        """Return a window: in place, or in what is kept, or in one of the buffers.

        There it is read from peers that are not mapped: it is there after ``context.wait()``.
        """
        extent = self._extent(rows, columns)
        pieces = self._pieces(extent)
        if self._direct(extent):
            found = self.homes.view(pieces)
        elif self.windows is not None:
            space = self.array.space
            for part in self.windows.missing(extent):
                parts = pieces_into(self.array.layout, part, space.rank, space.group.size)
                self.homes.fetch(parts, self.windows.flat)
            top, left, height, width = extent
            found = self.windows.whole[top : top + height, left : left + width]
        else:
            target = self.buffers[number % 2][: extent[2] * extent[3]]
            self.homes.fetch(pieces, target)
            found = target.reshape(extent[2:])
        return found.T if self._turned else found

    def everywhere(self) -> Operand:
        """Return it as all ranks have all of it. Collective."""
        return Operand(self.array.replica("replicated"), self._turned)

    def rounded(self, dtype: np.dtype[Any]) -> Operand:
        """Return it in a narrower dtype, kept until it changes; itself if it is as narrow."""
        if self.array.dtype.itemsize <= dtype.itemsize:
            return self
        return Operand(self.array.replica(self.array.layout, dtype), self._turned)

    def forget(self) -> None:
        """Keep nothing: it is not known what has arrived."""
        if self.windows is not None:
            self.windows.clear()

    def _direct(self, extent: Extent) -> bool:
        """Whether a window is in one piece, here or where memory is mapped."""
        pieces, space = self._pieces(extent), self.array.space
        if len(pieces) != 1 or len(pieces[0].table) != 1:
            return False
        return space.group.mapped or pieces[0].holder == space.rank

    def _pieces(self, extent: Extent) -> Pieces:
        space = self.array.space
        return pieces_of(self.array.layout, extent, space.rank, space.group.size)

    def _extent(self, rows: Range, columns: Range) -> Extent:
        return extent_of(columns, rows) if self._turned else extent_of(rows, columns)


def extent_of(rows: Range, columns: Range) -> Extent:
    """Return the extent of some rows and columns."""
    return rows[0], columns[0], rows[1] - rows[0], columns[1] - columns[0]
