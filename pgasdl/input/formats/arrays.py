"""NumPy's files: a record is an element of the first axis, whose fields have names or none."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from pgasdl.errors import DataError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import Numbers, Read, Table

_LONGEST_HEADER = 1 << 16  # bytes
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Arrays:
    """Arrays in ``.npy`` files, one after another; all have the same dtype and shape of a record.

    A record of an array without named fields is ``{"array": ...}``.
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        self._starts, counts, elements = [], [], []
        for number, table in enumerate(tables):
            header = table["header"].tobytes()
            self._starts.append(int(files.starts[number]) + len(header))
            count, element, _ = _parsed(header)
            counts.append(count)
            elements.append(element)
            if element != elements[0]:
                raise DataError(
                    f"{files[number].url} has records of {element}, {files[0].url} of {elements[0]}"
                )
        self._rows = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._element = elements[0]

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Return the header of a file."""
        url, nbytes = files[number].url, files[number].nbytes
        data = bytes(read(int(files.starts[number]), min(nbytes, _LONGEST_HEADER)))
        try:
            count, element, start = _parsed(data)
        except Exception as error:  # NumPy lets those of its parser through
            raise DataError(f"{url} is no file of NumPy's records: {error}") from error
        end = start + count * element.itemsize
        if end != nbytes:
            raise DataError(f"{url} has {nbytes} bytes; {count} records of {element} end at {end}")
        return {"header": np.frombuffer(data[:start], np.uint8)}

    def __len__(self) -> int:
        return int(self._rows[-1])

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return where a record lies."""
        number = int(np.searchsorted(self._rows, row, "right")) - 1
        nbytes = self._element.itemsize
        return [(self._starts[number] + (row - int(self._rows[number])) * nbytes, nbytes)]

    def bounds(self) -> tuple[Numbers, Numbers]:
        """Return where each record lies."""
        nbytes = self._element.itemsize
        counts = np.diff(self._rows)
        begins = np.repeat(np.array(self._starts) - self._rows[:-1] * nbytes, counts)
        return begins + np.arange(len(self)) * nbytes, np.full(len(self), nbytes)

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return a record's fields."""
        (where,) = self.ranges(row)
        dtype = self._element.base
        array = np.frombuffer(read(*where), dtype).reshape(self._element.shape)
        if dtype.names is None:
            return {"array": array}
        return {name: array[name] for name in dtype.names}


def _parsed(header: bytes) -> tuple[int, np.dtype[Any], int]:
    """Return the number of records, the dtype of one, and where the first begins."""
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of NumPy's format")
    shape, by_column, dtype = _VERSIONS[version](file)
    if not shape or dtype.hasobject or (by_column and len(shape) > 1):
        raise ValueError(f"{dtype} of shape {shape}: wanted rows of plain numbers")
    return shape[0], np.dtype((dtype, shape[1:])), file.tell()
