"""Striped files: the index, and the header and records of a file that it names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from pgasdl.errors import DataError
from pgasdl.input import StripedFiles, StripedWriter

_RECORDS = np.frombuffer(bytes(range(15)), [("x", "u1"), ("y", "<u2")])
_folder = tempfile.TemporaryDirectory(prefix="stripes-", dir="/dev/shm")
_root = Path(_folder.name)
with StripedWriter(_root / "i", _RECORDS.dtype, files=["a", "b"], stripe=2) as _writer:
    _writer.append(_RECORDS)
_genuine = {name: (_root / name).read_bytes() for name in ("i", "a", "b")}


def one(data: bytes) -> None:
    """Damage is refused by DataError; what is understood has the records that were written."""
    name = data[:1].decode("latin-1")
    if name not in _genuine:
        return
    (_root / name).write_bytes(data[1:])
    try:
        with StripedFiles(_root / "i") as files:
            batch = files[range(len(files))]
            files.verify()
            assert files.dtype == _RECORDS.dtype
            for field, array in batch.items():
                assert np.array_equal(array, _RECORDS[field])
    except DataError:
        pass
    finally:
        (_root / name).write_bytes(_genuine[name])
