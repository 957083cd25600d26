"""The tables of a data set's files as bytes: for other ranks, and for the next job."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pgasdl.input.disk import DiskCache
from pgasdl.input.files import Files
from pgasdl.input.formats import Table


def packed(tables: Mapping[int, Table]) -> bytes:
    """Return the tables of some files, by their numbers, as bytes."""
    file = io.BytesIO()
    arrays = {f"{k}/{name}": array for k, each in tables.items() for name, array in each.items()}
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpacked(blobs: Iterable[bytes], n_files: int) -> list[Table]:
    """Return the tables of all files out of what :func:`packed` made of some each."""
    tables: list[Table] = [{} for _ in range(n_files)]
    for blob in blobs:
        with np.load(io.BytesIO(blob), allow_pickle=False) as arrays:
            for name, array in arrays.items():
                number, key = name.split("/")
                tables[int(number)][key] = array
    return tables


class KeptIndex:
    """The tables of a data set on the local disk, for the next job: a block of their own."""

    def __init__(self, local: Any, files: Files, format: str, limit: int | None) -> None:
        digest = hashlib.sha256(f"{files.digest} {format}".encode()).hexdigest()[:32]
        self._disk = None if local is None else DiskCache(local, digest, limit=limit)

    def get(self) -> bytes:
        """Return what was put; nothing, if it is not there."""
        length = bytearray(8)
        if self._disk is None or not self._disk.get(0, 0, memoryview(length)):
            return b""
        blob = bytearray(int.from_bytes(length, "little"))
        return bytes(blob) if self._disk.get(0, len(length), memoryview(blob)) else b""

    def put(self, blob: bytes) -> None:
        """Keep the tables, if there is room."""
        if self._disk is not None:
            self._disk.put(0, memoryview(len(blob).to_bytes(8, "little") + blob))
