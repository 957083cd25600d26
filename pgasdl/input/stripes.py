"""Striped files: an index in JSON, and files of NumPy's format with a record in each element.

Record i lies in file ``(i // stripe) % n_files``, as swCaffe (5.2) lays its data over disk arrays:
ranks that read at random keep all of them busy.
"""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pgasdl.errors import DataError

NAME = "pgasdl striped files"
VERSION = 1
_LONGEST_INDEX = 1 << 24  # bytes


@dataclass(frozen=True, slots=True)
class StripeFile:
    """One of the files: its path, relative to the index's folder, and the CRC-32 of its records."""

    path: str
    crc32: int


@dataclass(frozen=True, slots=True)
class Index:
    """The content of the index."""

    n_records: int
    stripe: int
    files: tuple[StripeFile, ...]

    def place(self, record: int) -> tuple[int, int]:
        """Return the file of a record, and its place there."""
        block, within = divmod(record, self.stripe)
        row, file = divmod(block, len(self.files))
        return file, row * self.stripe + within

    def count(self, file: int) -> int:
        """Return the number of records in a file."""
        rows, rest = divmod(self.n_records, self.stripe * len(self.files))
        return rows * self.stripe + min(max(rest - file * self.stripe, 0), self.stripe)

    @property
    def crc32(self) -> int:
        """The CRC-32 of all but the paths: files may be moved."""
        numbers = self.n_records, self.stripe, *(file.crc32 for file in self.files)
        return zlib.crc32(repr(numbers).encode())

    def text(self) -> str:
        """Return the index as JSON."""
        head = {"format": NAME, "version": VERSION, "crc32": self.crc32}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"


def read_index(path: Path) -> Index:
    """Read and check an index.

    Raises
    ------
    OSError
        It cannot be read.
    DataError
        It is no index, or damaged.
    """
    with path.open("rb") as file:
        text = file.read(_LONGEST_INDEX + 1)
    try:
        if len(text) > _LONGEST_INDEX:
            raise ValueError("too long")
        return _index(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path} is no index of striped files: {type(error).__name__}: {error}"
        ) from error


def _index(document: Any) -> Index:
    if document["format"] != NAME:
        raise ValueError(f"its format is {document['format']!r}")
    if document["version"] != VERSION:
        raise ValueError(f"its version is {document['version']!r}, this is {VERSION}")
    files = tuple(
        StripeFile(_path(file["path"]), _number(file["crc32"])) for file in document["files"]
    )
    if not files:
        raise ValueError("it names no file")
    index = Index(_number(document["n_records"]), _number(document["stripe"], 1), files)
    if index.crc32 != document["crc32"]:
        raise ValueError("its numbers do not fit its checksum")
    return index


def _number(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is no number of at least {least}")
    return value


def _path(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{value!r} is no path")
    return value


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless records of ``dtype`` can lie in files."""
    fields = dtype.fields
    if not fields or dtype.names is None:
        raise ValueError(f'dtype {dtype} has no fields: pass [("image", "u1", (3, 8, 8))], say')
    sizes = [fields[name][0].itemsize for name in dtype.names]
    if dtype.hasobject or not all(sizes):
        raise ValueError(f"dtype {dtype} has fields of Python objects, or of no bytes")
    if sum(sizes) != dtype.itemsize:
        raise ValueError(f"dtype {dtype} has gaps or overlaps: pass packed fields")


def header(dtype: np.dtype[Any], n_records: int) -> bytes:
    """Return the header of a file; its length does not depend on ``n_records``."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": (n_records,)}
    )
    return file.getvalue()


def read_header(file: BinaryIO) -> tuple[np.dtype[Any], int]:
    """Read a header that :func:`header` wrote: the dtype and the number of records.

    Raises
    ------
    ValueError
        It is none, or damaged.
    """
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of NumPy's format")
    try:
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception as error:  # NumPy lets those of its parser through
        raise ValueError(f"{type(error).__name__}: {error}") from error
    check_dtype(dtype)
    if len(shape) != 1:
        raise ValueError(f"its shape is {shape}")
    return dtype, shape[0]
