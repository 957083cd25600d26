"""The first records of tars, which are served before the index of all is complete."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from pgasdl.errors import PgasError
from pgasdl.input.files import Files
from pgasdl.input.formats.tar import Tar
from pgasdl.input.formats.tar_headers import TarHeaders
from pgasdl.input.formats.window import Read, Table

_LEAST = 32  # records of the first look


class FirstRecords:
    """Samples of tars in their order, as many as were asked for; threads may share it.

    ``tables`` has those of all files, once the last one was read. DataError: one of the first
    records is damaged.
    """

    def __init__(self, files: Files, read: Read) -> None:
        self._files, self._read = files, read
        self._headers: list[TarHeaders] = []
        self._lock = threading.Lock()
        self._steps = self._walk()
        self._known: tuple[int, Tar | None] = 0, None
        self._error: Exception | None = None
        self.tables: list[Table] | None = None
        self.reach(_LEAST)

    def reach(self, count: int) -> Tar | None:
        """Return records, at least so many; None: there are fewer. DataError: a tar is damaged."""
        known, form = self._known  # without the lock, which another thread holds while it reads
        if count <= known:
            return form
        with self._lock:
            if count > self._known[0] and self.tables is None:
                if self._error is None:
                    # A quarter more: each look takes as long as what is known is long.
                    self._read_on(max(count, self._known[0] * 5 // 4))
                if count > self._known[0] and self._error is not None:
                    raise self._error
            known, form = self._known
        return form if count <= known else None

    def _walk(self) -> Iterator[None]:
        for number in range(len(self._files)):
            self._headers.append(TarHeaders(self._files, number, self._read))
            yield from self._headers[-1].steps()

    def _read_on(self, wanted: int) -> None:
        """Read headers until so many samples are whole: the last one may have more fields."""
        ended = False
        try:
            while sum(map(len, self._headers)) <= wanted:
                next(self._steps)
        except StopIteration:
            ended = True
        except (PgasError, OSError) as error:
            self._error = error
        tables = [each.table() for each in self._headers]
        form = Tar(self._files, tables)
        self._known = len(form) - (not ended), form
        self.tables = tables if ended else None
