"""Homes: where ranks' parts of a matrix lie in the pool, for peers that load or read them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pgasdl import _native
from pgasdl.buffers import Memory, memory_of
from pgasdl.errors import QueueFullError
from pgasdl.group import Group
from pgasdl.matrix.elements import Array, core_dtype
from pgasdl.matrix.moves import Pieces
from pgasdl.segment import Segment

if TYPE_CHECKING:
    from pgasdl.context import Context

_MOST_ROWS = 65536  # of one request
_OUTSIDE, _EMPTY = b"outside", "0 -1"
# Segment and offset of a part; None: it is empty.
Place = tuple[Segment, int] | None


class Homes:
    """A matrix in the memory of its ranks: this rank's part, and the places of all parts."""

    def __init__(self, group: Group, flat: Array, places: Sequence[Place]) -> None:
        self._group, self._flat = group, flat
        self._places = places

    def address(self, rank: int) -> int:
        """Return where a rank's part is mapped here; 0: it is not, or it is empty."""
        group, place = self._group, self._places[rank]
        if rank == group.rank or place is None:
            return self._flat.ctypes.data
        return place[0].address_of(group.ranks[rank]) + place[1] if group.mapped else 0

    def view(self, pieces: Pieces) -> Array:
        """Return rows of one rank's part, as they lie there: here, or mapped."""
        ((holder, table, _),) = pieces
        ((n, rows, source, step, _, _),) = table.tolist()
        item, dtype = self._flat.itemsize, self._flat.dtype
        length = (rows - 1) * step + n
        if holder == self._group.rank:
            flat = self._flat[source : source + length]
        else:
            begin, keeper = self.address(holder) + source * item, self._places[holder]
            memory = Memory(begin, length * item, dtype, (length,), keeper)
            flat = memory.on_host().view(dtype)
        if step == n:
            return flat.reshape(rows, n)
        return np.lib.stride_tricks.as_strided(flat, (rows, n), (step * item, item))

    def fetch(self, pieces: Pieces, target: Array, queue: int = 0) -> None:
        """Fill an array with pieces of ranks' parts.

        Those of peers that are not mapped are read, into the pool: they are there after
        ``context.wait(queue)``.
        """
        names = core_dtype(target.dtype), core_dtype(self._flat.dtype)
        for holder, table, _ in pieces:
            begin, peer = self.address(holder), self._group.ranks[holder]
            if begin:
                rows = table.ctypes.data, len(table)
                to, source = (target.ctypes.data, names[0]), (begin, names[1])
                _native.load_rows(self._group.context, peer, *rows, to, source)
            else:
                self._read(holder, table, target, queue)

    def _read(self, holder: int, table: Any, target: Array, queue: int) -> None:
        """Post the reads from one rank."""
        context, item = _context(self._group), target.itemsize
        home = self._places[holder]
        to, at = context.segments.at(memory_of(target))
        assert home is not None and to is not None
        slices = [
            (
                to[at + into * item : at + (into + n) * item],
                home[0][home[1] + of * item : home[1] + (of + n) * item],
            )
            for n, rows, source, step, landing, landing_step in table.tolist()
            for of, into in zip(
                range(source, source + rows * step, step),
                range(landing, landing + rows * landing_step, landing_step),
                strict=True,
            )
        ]
        peer = self._group.ranks[holder]
        for begin in range(0, len(slices), _MOST_ROWS):
            part = slices[begin : begin + _MOST_ROWS]
            try:
                context.read_list(part, peer, queue=queue)
            except QueueFullError:
                context.wait(queue)
                context.read_list(part, peer, queue=queue)


def find_homes(
    group: Group,
    what: str,
    flats: Sequence[Array],
    timeout: float | None = None,
    buffers: Sequence[Array] = (),
) -> tuple[list[Homes], list[int]]:
    """Return where all ranks' parts of matrices lie. Collective; all ranks agree on ``what``.

    If a part, or a buffer that a rank reads into, lies outside the pool: no homes, but these ranks.
    """
    told = group.allgather(what, _told(group, flats, buffers), timeout)
    outside = [rank for rank, each in zip(group.ranks, told, strict=True) if each == _OUTSIDE]
    if outside:
        return [], outside
    numbers = [[int(word) for word in each.split()] for each in told]
    found = []
    for k, flat in enumerate(flats):
        places = [_place(group, *each[2 * k : 2 * k + 2]) for each in numbers]
        found.append(Homes(group, flat, places))
    return found, []


def in_pool(group: Group, array: Array) -> bool:
    """Whether an array lies in the pool of the group, or is empty."""
    return not array.size or _place_of(group, array) is not None


def _told(group: Group, flats: Sequence[Array], buffers: Sequence[Array]) -> bytes:
    places = [_place_of(group, flat) if flat.size else _EMPTY for flat in flats]
    if None in places or not all(in_pool(group, each) for each in buffers):
        return _OUTSIDE
    return " ".join(map(str, places)).encode()


def _place_of(group: Group, array: Array) -> str | None:
    """Return where an array lies in the pool; None: it does not."""
    segment, offset = _context(group).segments.at(memory_of(array))
    if segment is None or not segment.pooled or not group.within(segment.group):
        return None
    return f"{segment.id} {offset}"


def _place(group: Group, number: int, offset: int) -> Place:
    if offset < 0:
        return None
    segment = _context(group).segments.of(number)
    assert segment is not None
    return segment, offset


def _context(group: Group) -> Context:
    return group.context  # type: ignore[return-value]
