"""The tables of a data set's files as bytes: for other ranks, and for the next job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

from pgasdl.input.formats import Table


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
