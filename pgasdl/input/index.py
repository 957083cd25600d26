"""The tables of a data set's files as bytes: for other ranks, and for the next job."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import numpy as np

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
