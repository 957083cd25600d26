"""Readers: elements of a matrix by one-sided reads, in which no other rank takes part."""

from __future__ import annotations

from typing import Any

from pgasdl.buffers import memory_of
from pgasdl.errors import PoolFull, QueueFull
from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.index import dropped, ranges_of
from pgasdl.matrix.layout import replicated
from pgasdl.matrix.moves import pairs_between
from pgasdl.plans.algorithms.remap import Rows
from pgasdl.segment import Segment

_MOST_ROWS = 65536  # of one request


class Reader:
    """Reads elements of a matrix or vector from the ranks that have them: ``reader[2:5, 0]``.

    Made by :meth:`DistributedMatrix.reader`, collectively. Reading is local: any rank does it at
    any time, as with segments. The program orders it after the owner's last change and before the
    next one, by a notification or a barrier. Every rank keeps its reader as long as any reads: it
    keeps the memory.
    """

    def __init__(self, array: DistributedArray) -> None:
        self._array = array
        space = array.space
        self._segments = space.context.segments
        segment, offset = (None, 0)
        if array.flat.size:
            segment, offset = self._segments.at(memory_of(array.flat))
        here = "none" if not array.flat.size else f"{segment.id} {offset}" if segment else ""
        told = space.group.allgather("a reader of a matrix", here.encode())
        outside = [rank for rank, each in zip(space.group.ranks, told, strict=True) if not each]
        if outside:
            raise PoolFull(
                f"ranks {outside} have their blocks outside the pool: ctx.pool(nbytes) on every "
                "rank, before the matrix is made"
            )
        self._homes = [self._home(each.decode()) for each in told]

    def _home(self, told: str) -> tuple[Segment | None, int]:
        if told == "none":
            return None, 0
        number, offset = map(int, told.split())
        return self._segments.of(number), offset

    def __getitem__(self, key: Any) -> Any:
        """Return elements as NumPy has them, in memory of the pool.

        Numbers, and slices without a step.

        Raises
        ------
        PoolFull
            The pool has no room for them.
        PeerLost, Timeout
        """
        array, space = self._array, self._array.space
        ((top, bottom), (left, right)), single = ranges_of(array, key)
        shape, item = (bottom - top, right - left), array.dtype.itemsize
        nbytes = shape[0] * shape[1] * item
        found = space.context._pool.host_bytes(nbytes, space.group) if nbytes else None
        if nbytes and found is None:
            raise PoolFull(
                f"{nbytes} bytes to read into do not fit into the pool: ctx.pool(nbytes)"
            )
        if found is None:
            return dropped(array.flat[:0].reshape(shape), single, array.ndim)
        values = found.view(array.dtype)
        window = replicated(shape, [space.rank])
        pairs = pairs_between(array.layout, window, space.group.size, (top, left))
        segment, at = self._segments.at(memory_of(found))
        assert segment is not None
        for (holder, _), moves in pairs.items():
            if holder == space.rank:
                for rows in moves:
                    for of, to in _runs(rows):
                        values[to : to + rows.n] = array.flat[of : of + rows.n]
            else:
                self._read(holder, moves, segment, at, item)
        space.context.wait()
        return dropped(values.reshape(shape), single, array.ndim)

    def _read(self, holder: int, moves: list[Rows], to: Segment, at: int, item: int) -> None:
        """Post the reads from one rank."""
        context, home = self._array.space.context, self._homes[holder]
        assert home[0] is not None
        slices = [
            (
                to[at + into * item : at + (into + rows.n) * item],
                home[0][home[1] + of * item : home[1] + (of + rows.n) * item],
            )
            for rows in moves
            for of, into in _runs(rows)
        ]
        peer = self._array.space.group.ranks[holder]
        for begin in range(0, len(slices), _MOST_ROWS):
            part = slices[begin : begin + _MOST_ROWS]
            try:
                context.read_list(part, peer)
            except QueueFull:
                context.wait()
                context.read_list(part, peer)


def _runs(rows: Rows) -> list[tuple[int, int]]:
    """Return where each row begins, and where it goes."""
    return [(rows.src + i * rows.src_step, rows.dst + i * rows.dst_step) for i in range(rows.rows)]
