"""Which records a data set has: found by all ranks together, and kept for the next job."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pgasdl.errors import DataError, PgasError
from pgasdl.group import Group
from pgasdl.input.files import Files
from pgasdl.input.first_records import FirstRecords
from pgasdl.input.formats import FORMATS, Format, Table
from pgasdl.input.formats.tar import Tar
from pgasdl.input.levels import BLOCK, Levels
from pgasdl.input.next_use import Blocks
from pgasdl.input.threads import at_once


class Readers:
    """The ranks of a group, or (``group`` is None) this process alone. Calls are collective."""

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.group = group if group is not None and group.size > 1 else None
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._timeout = timeout

    def from_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return what the first rank makes; if it fails, all ranks get its error."""
        return self.from_all(what, make if self.rank == 0 else None)[0]

    def from_all(
        self, what: str, make: Callable[[], bytes] | None, more: float = 0.0
    ) -> list[bytes]:
        """Return what each rank makes; if one fails, all fail.

        ``more``: seconds to wait beyond the time-out. ``what`` has to be the same on all ranks.
        """
        if self.group is None:
            return [make() if make else b""]
        try:
            blob, error = b"+" + (make() if make else b""), None
        except (PgasError, OSError, ValueError, ImportError) as caught:
            blob, error = b"-" + str(caught).encode(), caught
        blobs = self.group.allgather(what, blob, self._timeout + more)
        if error is not None:
            raise error
        for rank, each in enumerate(blobs):
            if each.startswith(b"-"):
                raise DataError(f"rank {self.group.ranks[rank]}: {each[1:].decode()}")
        return [each[1:] for each in blobs]


class Index:
    """The records of a data set; of tars ranks begin with the first ones, each by itself.

    With a group a collective. Threads may share it. ``known`` has all records; None: only the first
    ones are known yet.
    """

    def __init__(
        self, files: Files, format: str, levels: Levels, members: Readers, memory: int
    ) -> None:
        self._files, self._levels, self._members = files, levels, members
        self._format, self._number = FORMATS[format], list(FORMATS).index(format)
        self._blocks: Blocks | None = None
        self._first_records: FirstRecords | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        self.known: Format | None = None
        # All ranks know as much of it: who begins with the first records, they agree.
        kept = members.from_first(
            f"input index, {memory} bytes", lambda: levels.index(self._number)
        )
        if kept:
            self._know(unpacked([kept], len(files)))
        elif self._format is not Tar:
            self._know(self._scanned_together(), keep=True)
        else:
            members.from_all("input begins", self._begin)
        self._apart = self.known is None and members.group is not None

    @property
    def all(self) -> Format:
        """All records; where only the first ones are known, this reads the headers of all."""
        if self.known is None:
            first = self._first()
            with self._lock:
                if self.known is None:
                    self._know(first.tables or self._scanned(range(len(self._files))), keep=True)
        assert self.known is not None
        return self.known

    def together(self) -> None:
        """Read the headers of all, each rank those of a part of the files. Collective."""
        if self._apart:
            tables = self._scanned_together()
            with self._lock:
                if self.known is None:
                    self._know(tables, keep=True)
            self._apart = False

    def having(self, count: int) -> Format:
        """Return so many records, or more; or all, if there are fewer."""
        form = self._first().reach(count) if self.known is None else None
        return self.all if form is None else form

    @property
    def blocks(self) -> Blocks:
        """The first and the last block of each record."""
        if self._blocks is None:
            begins, nbytes = self.all.bounds()
            self._blocks = begins // BLOCK, (begins + np.maximum(nbytes, 1) - 1) // BLOCK
        return self._blocks

    def _begin(self) -> bytes:
        """Look at the first records; they may be all."""
        if self._first().tables is not None:
            self.known = self.all
        return b""

    def _first(self) -> FirstRecords:
        """Return the first records of tars."""
        if self._first_records is None or os.getpid() != self._process:
            # A fork's locks may be those of threads that it does not have.
            self._lock, self._process = threading.Lock(), os.getpid()
            self._first_records = FirstRecords(self._files, self._levels.read)
        return self._first_records

    def _scanned(self, numbers: Sequence[int]) -> list[Table]:
        """Return the tables of some files."""
        files, read = self._files, self._levels.read
        return at_once(lambda number: self._format.scan(files, number, read), numbers)

    def _scanned_together(self) -> list[Table]:
        """Return the tables of all files; each rank reads a part of the files."""
        members = self._members
        mine = range(members.rank, len(self._files), members.size)

        def scan() -> bytes:
            return packed(dict(zip(mine, self._scanned(mine), strict=True)))

        # Others may still read: a second for each MB is more than any storage needs.
        blobs = members.from_all("input tables", scan, self._files.nbytes / 1e6)
        return unpacked(blobs, len(self._files))

    def _know(self, tables: list[Table], keep: bool = False) -> None:
        """Take the tables of all files, and keep them for the next job."""
        if keep and self._members.rank == 0:
            self._levels.keep_index(self._number, packed(dict(enumerate(tables))))
        self.known = self._format(self._files, tables)


def packed(tables: Mapping[int, Table]) -> bytes:
    """Return the tables of some files, by their numbers, as bytes.

    They have columns of the same names and types. A column's parts lie one behind another: to read
    them takes as long as the bytes do, however many files there are. Whole numbers have as many
    bytes as the largest wants.
    """
    each = [*tables.values()]
    columns, parts = [], []
    for name in each[0] if each else ():
        whole = np.concatenate([table[name] for table in each])
        least = whole.dtype
        if whole.dtype.kind in "iu" and len(whole) and whole.min() >= 0:
            least = np.min_scalar_type(int(whole.max()))
        counts = [len(table[name]) for table in each]
        columns.append((name, whole.dtype.str, least.str, counts))
        parts.append(whole.astype(least, copy=False).tobytes())
    head = json.dumps({"files": [*tables], "columns": columns}).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def unpacked(blobs: Iterable[bytes], n_files: int) -> list[Table]:
    """Return the tables of all files out of what :func:`packed` made of some each."""
    tables: list[Table] = [{} for _ in range(n_files)]
    for blob in blobs:
        at = 8 + int.from_bytes(blob[:8], "little")
        head = json.loads(blob[8:at])
        for name, dtype, least, counts in head["columns"]:
            whole = np.frombuffer(blob, least, sum(counts), at)
            at += whole.nbytes
            whole, begin = whole.astype(dtype, copy=False), 0
            for number, count in zip(head["files"], counts, strict=True):
                tables[number][name] = whole[begin : begin + count]
                begin += count
    return tables
