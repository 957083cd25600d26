"""Ranks' counters for users who watch: each rank keeps its record, and rank 0 reads it.

Nobody waits for a read, and no rank knows when its record is read: a record that changes meanwhile
has a wrong checksum, and rank 0 reads it again next time.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from pgasdl.context import Context
from pgasdl.errors import PgasError, PgasTimeoutError
from pgasdl.group import Group
from pgasdl.jobs.messages import MOST_COUNTED, RankCounters

_EVERY = 1.0  # seconds from one record of a rank to its next
_BYTES = 1 << 16  # of a record
_HEADER = struct.Struct("<II")  # its length, and its checksum


class Board:
    """The record of this rank; on rank 0 also those of others. Making it is collective."""

    def __init__(self, context: Context, group: Group) -> None:
        self._context, self._group = context, group
        self._others = group.ranks[1:] if group.rank == 0 else ()
        # Rank 0 reads so many records at once, once a second: a board has room for them.
        self._batch = min(MOST_COUNTED, len(self._others))
        self._turns = cycle(self._others)
        places = 1 + self._batch
        self._segment = context.segment(places * _BYTES, notifications=1, group=group)
        self._bytes = self._segment.numpy(np.uint8)
        self._queue = context.queue_create()
        self._next = 0.0
        self._asked = 0  # reads under way

    def look(self, iteration: int, *, last: bool = False) -> Iterator[dict[str, Any]]:
        """Update this rank's record if it is time; on rank 0, yield the records that came."""
        now = time.monotonic()
        due = last or now >= self._next
        if self._asked and not last:
            yield from self._taken()
        if not due:
            return
        self._next = now + _EVERY
        counters = self._context.counters()
        told = RankCounters(self._context.rank, iteration, time.time(), _resident(), counters)
        record = told.as_json()
        data = _encoded(record)
        if self._group.rank == 0:
            yield record
        else:
            self._keep(data)
        if self._batch and not self._asked and not last:
            self._ask()

    def _keep(self, data: bytes) -> None:
        header = _HEADER.pack(len(data), zlib.crc32(data))
        self._bytes[: len(header) + len(data)] = np.frombuffer(header + data, np.uint8)

    def _ask(self) -> None:
        """Begin to read the next ranks' records, except of ranks that are lost or have left."""
        for place in range(1, self._batch + 1):
            target = self._segment[place * _BYTES : (place + 1) * _BYTES]
            source = self._segment[:_BYTES]
            self._bytes[place * _BYTES :][: _HEADER.size] = 0
            with suppress(PgasError):
                self._context.read(target, next(self._turns), source, queue=self._queue)
        self._asked = self._batch

    def _taken(self) -> Iterator[dict[str, Any]]:
        try:
            self._context.wait(self._queue, timeout=0)
        except PgasTimeoutError:
            return
        except PgasError:
            pass  # a rank has left since it was asked
        self._asked = 0
        for place in range(1, self._batch + 1):
            begin = place * _BYTES
            length, checksum = _HEADER.unpack_from(self._bytes[begin:].data)
            begin += _HEADER.size
            data = self._bytes[begin : begin + min(length, _BYTES - _HEADER.size)].tobytes()
            if data and zlib.crc32(data) == checksum:
                yield json.loads(data)


def _encoded(record: dict[str, Any]) -> bytes:
    """Return a record as JSON; if it is too long, the last layers or peers are left out."""
    while len(data := json.dumps(record).encode()) > _BYTES - _HEADER.size:
        longest = max(("layers", "peers"), key=lambda name: len(record[name]))
        record[longest] = dict(islice(record[longest].items(), len(record[longest]) // 2))
    return data


def _resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE
