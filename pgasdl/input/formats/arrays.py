"""NumPy's files: a record is an element of the first axis, whose fields have names or none."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import DataError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import ALL, Numbers, Read, Table

_LONGEST_HEADER = 1 << 16  # bytes
_PIECE = 256 << 10  # bytes that are read at a time: they stay in the core's cache
Array = npt.NDArray[Any]
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Arrays:
    """Arrays in ``.npy`` files, one after another; all have the same dtype and shape of a record.

    A record, whose fields ``dtype`` has, is ``{"array": ...}`` where the array has no named fields.
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        starts, counts, elements = [], [], []
        for number, table in enumerate(tables):
            header = table["header"].tobytes()
            starts.append(int(files.starts[number]) + len(header))
            count, element, _ = _parsed(header)
            counts.append(count)
            elements.append(element)
            if element != elements[0]:
                raise DataError(
                    f"{files[number].name} has records of {element}, the first file {elements[0]}"
                )
        self._starts = np.array(starts, np.int64)
        self._rows = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._element = elements[0]
        empty = self._fields(self._elements(bytearray()))
        self.dtype = np.dtype([(name, a.dtype, a.shape[1:]) for name, a in empty.items()])

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Return the header of a file."""
        url, nbytes = files[number].name, files[number].nbytes
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
        return [(int(self._starts[number] + (row - self._rows[number]) * nbytes), nbytes)]

    def bounds(self, rows: Numbers | slice = ALL) -> tuple[Numbers, Numbers]:
        """Return where some records lie."""
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        nbytes = self._element.itemsize
        files = np.searchsorted(self._rows, numbers, "right") - 1
        begins = self._starts[files] + (numbers - self._rows[files]) * nbytes
        return begins, np.full(len(numbers), nbytes)

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return a record's fields, which the caller may change."""
        (where,) = self.ranges(row)
        data = read(*where)  # a view is of other records' bytes, too
        own = bytearray(data) if isinstance(data, memoryview) else data
        fields = self._fields(self._elements(own))
        return {name: array[0, ...] for name, array in fields.items()}

    def fill(
        self, rows: Any, out: Mapping[str, Array], fill: Callable[[int, memoryview], None]
    ) -> None:
        """Read records by their numbers into arrays that have the record as first axis."""
        rows = self._numbers(rows)
        self._require_fit(out, len(rows))
        nbytes = self._element.itemsize
        at = self.bounds(rows)[0]
        # Records that follow each other are read together, as many as a piece holds.
        ends = [*(np.flatnonzero(np.diff(at) != nbytes) + 1).tolist(), len(rows)]
        most = max(_PIECE // max(nbytes, 1), 1)
        memory = bytearray(min(most, len(rows)) * nbytes)
        elements = self._elements(memory)
        first = 0
        for end in ends:
            while first < end:
                count = min(end - first, most)
                fill(int(at[first]), memoryview(memory)[: count * nbytes])
                for name, array in self._fields(elements[:count]).items():
                    out[name][first : first + count] = array
                first += count

    def batch(self, rows: Any, fill: Callable[[int, memoryview], None]) -> dict[str, Array]:
        """Return several records, in new arrays."""
        rows = self._numbers(rows)
        out = {name: np.empty(len(rows), self.dtype[name]) for name in self.dtype.names or ()}
        self.fill(rows, out, fill)
        return out

    def _elements(self, data: bytes | bytearray | memoryview) -> Array:
        """Return the elements of the file's array that some bytes are."""
        shape = self._element.shape
        return np.frombuffer(data, self._element.base).reshape(-1, *shape)

    def _fields(self, elements: Array) -> dict[str, Array]:
        names = elements.dtype.names
        return {"array": elements} if names is None else {name: elements[name] for name in names}

    def _numbers(self, rows: Any) -> Numbers:
        numbers = np.asarray(rows)
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
            raise TypeError(
                f"{numbers.dtype} of shape {numbers.shape}: wanted the numbers of records, which "
                "np.flatnonzero gives for a mask"
            )
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"record {wrong[0]}: there are {len(self)}, from 0")
        return numbers.astype(np.int64, copy=False)

    def _require_fit(self, out: Mapping[str, Array], n_rows: int) -> None:
        for name in self.dtype.names or ():
            field, array = self.dtype[name], out[name]
            if array.shape != (n_rows, *field.shape) or array.dtype != field.base:
                raise ValueError(
                    f"{name}: {array.dtype} of shape {array.shape}, wanted {field.base} of shape "
                    f"{(n_rows, *field.shape)}"
                )


def _parsed(header: bytes) -> tuple[int, np.dtype[Any], int]:
    """Return the number of records, the dtype of one, and where the first begins."""
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of NumPy's format")
    shape, by_column, dtype = _VERSIONS[version](file, max_header_size=_LONGEST_HEADER)
    element = np.dtype((dtype, shape[1:]))
    if by_column and len(shape) > 1:
        raise ValueError("it lies by columns: save np.ascontiguousarray(array)")
    if not shape or dtype.hasobject or not element.itemsize:
        raise ValueError(f"{dtype} of shape {shape}: wanted rows of plain numbers")
    return shape[0], element, file.tell()
