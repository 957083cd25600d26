"""Tars by webdataset's convention: members in a row whose names differ in extension are a sample.

The extension is everything behind the first dot of a name's last part, in lower case.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.input.files import Files
from pgasdl.input.formats.tar_headers import TarHeaders
from pgasdl.input.formats.window import ALL, Numbers, Read, Table


class Tar:
    """Samples of tars: ``{"__key__": str, extension: bytes, ...}``; ``extensions`` are sorted."""

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        def joined(name: str) -> npt.NDArray[Any]:
            return np.concatenate([table[name] for table in tables])

        names = [_unpacked(table["extensions"], table["extension_nbytes"]) for table in tables]
        self.extensions = sorted(set().union(*names))
        numbers = {name: number for number, name in enumerate(self.extensions)}
        # Each member's extension, address and size.
        self._extension = np.concatenate(
            [
                np.array([numbers[name] for name in mine], np.int32)[table["extension"]]
                for mine, table in zip(names, tables, strict=True)
            ]
        )
        self._address = np.concatenate(
            [start + table["offset"] for start, table in zip(files.starts, tables, strict=False)]
        )
        self._nbytes = joined("nbytes")
        # Where each sample's members and key begin.
        self._members = _starts(joined("n_members"))
        self._keys, self._key_starts = joined("keys"), _starts(joined("key_nbytes"))

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Read the headers of a tar."""
        headers = TarHeaders(files, number, read)
        for _ in headers.steps():
            pass
        return headers.table()

    def __len__(self) -> int:
        return len(self._members) - 1

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return one range, from the sample's first field to its last."""
        first, last = self._members[row], self._members[row + 1] - 1
        begin, end = int(self._address[first]), int(self._address[last] + self._nbytes[last])
        return [(begin, end - begin)] if end > begin else []

    def bounds(self, rows: Numbers | slice = ALL) -> tuple[Numbers, Numbers]:
        """Return some samples' ranges."""
        begins, lasts = self._address[self._members[:-1][rows]], self._members[1:][rows] - 1
        return begins, self._address[lasts] + self._nbytes[lasts] - begins

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return a sample's key and fields."""
        key = slice(*self._key_starts[row : row + 2].tolist())
        record: dict[str, Any] = {"__key__": _decoded(self._keys[key].tobytes())}
        members = slice(*self._members[row : row + 2].tolist())
        begins, lengths = self._address[members].tolist(), self._nbytes[members].tolist()
        whole = begins[-1] + lengths[-1] - begins[0]
        data = memoryview(read(begins[0], whole) if whole else b"")
        names = self._extension[members].tolist()
        for name, address, nbytes in zip(names, begins, lengths, strict=True):
            begin = address - begins[0]
            record[self.extensions[name]] = bytes(data[begin : begin + nbytes])
        return record


def _starts(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _unpacked(blob: npt.NDArray[np.uint8], nbytes: npt.NDArray[np.int32]) -> list[str]:
    data, starts = blob.tobytes(), _starts(nbytes)
    return [_decoded(data[a:b]) for a, b in pairwise(starts)]


def _decoded(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")
