"""Readers: elements of a matrix by one-sided reads, in which no other rank takes part."""

from __future__ import annotations

from typing import Any

from pgasdl.errors import PoolFullError
from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.homes import find_homes, in_pool
from pgasdl.matrix.index import dropped, ranges_of
from pgasdl.matrix.moves import pieces_of


class Reader:
    """Reads elements of a matrix or vector from the ranks that have them: ``reader[2:5, 0]``.

    Made by :meth:`DistributedMatrix.reader`, collectively. Reading is local: any rank does it at
    any time, as with segments. The program orders it after the owner's last change and before the
    next one, by a notification or a barrier. Every rank keeps its reader as long as any reads: it
    keeps the memory.
    """

    def __init__(self, array: DistributedArray) -> None:
        self._array = array
        what = f"a reader of {array.layout.digest}"
        homes, outside = find_homes(array.space.group, what, [array.flat])
        if outside:
            raise PoolFullError(
                f"ranks {outside} have their blocks outside the pool: ctx.pool(nbytes) on every "
                "rank, before the matrix is made"
            )
        self._homes = homes[0]

    def __getitem__(self, key: Any) -> Any:
        """Return elements as NumPy has them, in memory of the pool.

        Numbers, and slices without a step.

        Raises
        ------
        PoolFullError
            The pool has no room for them.
        PeerLostError, PgasTimeoutError
        """
        array, space = self._array, self._array.space
        ((top, bottom), (left, right)), single = ranges_of(array, key)
        shape = bottom - top, right - left
        values = space.empty(shape[0] * shape[1], array.dtype)
        if not in_pool(space.group, values):
            raise PoolFullError(
                f"{values.nbytes} bytes to read into do not fit into the pool: ctx.pool(nbytes)"
            )
        window = top, left, *shape
        pieces = pieces_of(array.layout, window, space.rank, space.group.size)
        self._homes.fetch(pieces, values)
        space.context.wait()
        return dropped(values.reshape(shape), single)
