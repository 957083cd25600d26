"""Ranges that lie close to each other are read as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from pgasdl.errors import DataError

Range = tuple[int, int]  # address and bytes

_CLOSE = 16 << 10  # bytes that are read with what lies around them
_WINDOW = 64 << 10  # bytes of small records that are read at once


def merged(ranges: Iterable[Range], most: float = math.inf) -> Iterator[Range]:
    """Yield ranges; those that follow each other closely are one, of so many bytes at most."""
    begin = end = -_CLOSE
    for at, nbytes in ranges:
        if not end <= at < end + _CLOSE or at + nbytes - begin > most:
            if end > begin:
                yield begin, end - begin
            begin = at
        end = at + nbytes
    if end > begin:
        yield begin, end - begin


class Nearby:
    """A function that reads ranges known before; the first one of several brings the others.

    One thread calls it. Where the whole cannot be read, each range is read alone, so that an error
    is that of the record that has it.
    """

    def __init__(self, ranges: Iterable[Range], read: Callable[[int, int], bytearray]) -> None:
        self._read = read
        self._wholes = dict(merged(ranges, _WINDOW))
        self._begin, self._data = 0, memoryview(b"")

    def __call__(self, address: int, nbytes: int) -> bytearray | memoryview:
        """Return some bytes; those of several ranges are one, of which this is a view."""
        at = address - self._begin
        if at >= 0 and at + nbytes <= len(self._data):
            return self._data[at : at + nbytes]
        whole = self._wholes.get(address, 0)
        if whole > nbytes:
            with suppress(DataError):
                self._data, self._begin = memoryview(self._read(address, whole)), address
                return self._data[:nbytes]
        return self._read(address, nbytes)
