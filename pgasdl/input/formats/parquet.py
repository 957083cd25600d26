"""Parquet: a record is a row, and is decoded with the row group that it lies in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from pgasdl.errors import DataError, PgasError, UnavailableError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import ALL, Numbers, Read, Table, Window

_KEPT = 256 << 20  # bytes of decoded row groups
_TAIL = 8  # the footer's length in 4 bytes, and a magic word


class Parquet:
    """Rows of Parquet files, with a field for each column.

    Lists of numbers are NumPy arrays, other lists are lists, and structs are dicts. pyarrow
    converts everything else: to bytes, str, int, float, None.

    ``mix`` is how many row groups may have their rows mixed, None: all. They are kept decoded,
    twice as many where one order passes to the next.
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        _pyarrow()
        self._files = files
        self._footers = [table["footer"] for table in tables]
        # Each row group's file, number there, address, size, and the first row of the next.
        groups = [(file, group) for file, t in enumerate(tables) for group in range(len(t["rows"]))]
        self._groups = groups
        self._address = np.concatenate(
            [start + table["offset"] for start, table in zip(files.starts, tables, strict=False)]
        )
        self._nbytes = np.concatenate([table["nbytes"] for table in tables])
        self._rows = np.concatenate([table["rows"] for table in tables])
        self._ends = np.cumsum(self._rows)
        decoded = np.concatenate([table["decoded"] for table in tables])
        self.mix = None
        if decoded.sum() > _KEPT:
            self.mix = max(1, _KEPT // 2 // int(decoded.max()))
        self._lock = threading.Lock()
        self._decoded: dict[int, Future[Any]] = {}  # by row group, the last used at the end
        self._kept = 0  # bytes of those that are done

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Read the footer of a file."""
        url, nbytes, start = files[number].name, files[number].nbytes, int(files.starts[number])
        pa = _pyarrow()
        tail = bytes(read(start + nbytes - _TAIL, _TAIL)) if nbytes > _TAIL else b""
        footer = nbytes - _TAIL - int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or footer < 0:
            raise DataError(f"{url}, {nbytes} bytes: no Parquet file, or cut: it has no footer")
        data = bytes(read(start + footer, nbytes - footer))
        try:
            metadata = pa.parquet.read_metadata(pa.BufferReader(data))
            reader = pa.parquet.ParquetFile(
                Window(files, number, _refuse), metadata=metadata, pre_buffer=True
            )
            groups = [_extent(reader, group) for group in range(metadata.num_row_groups)]
            for rows, begin, end, decoded in groups:
                if min(rows, decoded) < 0 or not 0 <= begin <= end <= footer:
                    raise ValueError(f"{rows} rows in bytes {begin} to {end}")
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{url}, byte {footer}: a damaged footer: {error}") from error
        columns = np.array(groups, np.int64).reshape(-1, 4).T
        return {
            "rows": columns[0].copy(),
            "offset": columns[1].copy(),
            "nbytes": columns[2] - columns[1],
            "decoded": columns[3].copy(),
            "footer": np.frombuffer(data, np.uint8),
        }

    def __len__(self) -> int:
        return int(self._rows.sum())

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return the range of the row's group."""
        group = self._group(row)
        nbytes = int(self._nbytes[group])
        return [(int(self._address[group]), nbytes)] if nbytes else []

    def bounds(self, rows: Numbers | slice = ALL) -> tuple[Numbers, Numbers]:
        """Return the ranges of some rows' groups."""
        groups = np.searchsorted(self._ends, np.arange(len(self))[rows], "right")
        return self._address[groups], self._nbytes[groups]

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return a row."""
        group = self._group(row)
        table = self._table(group, read)
        within = row - int(self._ends[group] - self._rows[group])
        pa = _pyarrow()
        try:
            return {name: _value(pa, table[name][within]) for name in table.column_names}
        # Text that is none, or a name that is there twice.
        except (pa.ArrowException, ValueError, LookupError) as error:
            place = self._files.place(int(self._address[group]))
            raise DataError(f"{place}: row {within} of the row group: {error}") from error

    def _group(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, "right"))

    def _table(self, group: int, read: Read) -> Any:
        """Return a row group, which one thread decodes, and others wait for."""
        with self._lock:
            future = self._decoded.pop(group, None)
            mine = future is None
            future = self._decoded[group] = future or Future()
        if mine:
            try:
                table = self._decode(group, read)
            except BaseException as error:
                with self._lock:
                    del self._decoded[group]  # it was not done, so no other thread removed it
                future.set_exception(error)
            else:
                future.set_result(table)
                with self._lock:
                    self._make_room(table.nbytes)
        return future.result()  # it ends when the other thread's reading does

    def _make_room(self, nbytes: int) -> None:
        """Count a new row group; drop those used the longest ago, but keep two."""
        self._kept += nbytes
        for group in [*self._decoded][:-2]:
            if self._kept > _KEPT and self._decoded[group].done():
                self._kept -= self._decoded.pop(group).result().nbytes

    def _decode(self, group: int, read: Read) -> Any:
        pa, (file, number) = _pyarrow(), self._groups[group]
        try:
            metadata = pa.parquet.read_metadata(pa.BufferReader(self._footers[file].tobytes()))
            reader = pa.parquet.ParquetFile(
                Window(self._files, file, read),
                metadata=metadata,
                pre_buffer=False,  # this thread reads
                page_checksum_verification=True,  # where pages have some
            )
            table = reader.read_row_group(number, use_threads=False)
            if len(table) != self._rows[group]:
                raise ValueError(f"{len(table)} rows of {self._rows[group]}")
            return table
        except PgasError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            place = self._files.place(int(self._address[group]))
            raise DataError(f"{place}: row group {number} is damaged: {error}") from error


def _pyarrow() -> Any:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise UnavailableError(
            f"Parquet files need pyarrow: pip install 'pgasdl[data]' ({error})"
        ) from error


class _Unread(Exception):
    pass


def _refuse(address: int, nbytes: int) -> bytes:
    raise _Unread


def _extent(reader: Any, number: int) -> tuple[int, int, int, int]:
    """Return the rows of a row group, where it begins and ends, and its bytes without packing."""
    # Where a footer is damaged, column() ends the process. A reader raises before it reads: first.
    with suppress(_Unread):
        reader.read_row_group(number, use_threads=False)
    group = reader.metadata.row_group(number)
    starts, ends = [], []
    for column in map(group.column, range(group.num_columns)):
        if column.total_compressed_size:  # else there is no row, and perhaps no offset
            start = column.data_page_offset
            if column.dictionary_page_offset:
                start = min(start, column.dictionary_page_offset)
            starts.append(start)
            ends.append(start + column.total_compressed_size)
    return group.num_rows, min(starts, default=0), max(ends, default=0), group.total_byte_size


def _value(pa: Any, scalar: Any) -> Any:
    """Return what a field is to Python."""
    if not scalar.is_valid:
        return None
    types, kind = pa.types, scalar.type
    if types.is_struct(kind):
        return {name: _value(pa, scalar[name]) for name in scalar}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values = scalar.values
        number = types.is_integer(values.type) or types.is_floating(values.type)
        if (number or types.is_boolean(values.type)) and not values.null_count:
            return np.array(values.to_numpy(zero_copy_only=False))  # a copy: no view of the group
        return [_value(pa, value) for value in values]
    return scalar.as_py()
