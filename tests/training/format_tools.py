"""Data sets in memory, in several formats, for tests of ``pgasdl.input.formats``."""

from __future__ import annotations

import io
import itertools
import tarfile
from typing import Any

import numpy as np

from pgasdl.input.files import File, Files
from pgasdl.input.formats import FORMATS, Format


class Memory:
    """Files in memory, and what was read of them."""

    def __init__(self, *contents: bytes, urls: list[str] | None = None) -> None:
        urls = urls or [f"s3://bucket/{number}" for number in range(len(contents))]
        self.files = Files([File(url, len(c)) for url, c in zip(urls, contents, strict=True)])
        self.data = b"".join(contents)
        self.reads: list[tuple[int, int]] = []

    def read(self, address: int, nbytes: int) -> memoryview:
        assert 0 <= address < address + nbytes <= len(self.data)
        self.reads.append((address, nbytes))
        return memoryview(self.data)[address : address + nbytes]

    def open(self, format: str) -> Format:
        kind = FORMATS[format]
        tables = [kind.scan(self.files, number, self.read) for number in range(len(self.files))]
        for array in itertools.chain.from_iterable(table.values() for table in tables):
            assert isinstance(array, np.ndarray) and not array.dtype.hasobject
        self.reads.clear()
        return kind(self.files, tables)

    def records(self, format: str) -> list[dict[str, Any]]:
        """All records; each reads no more than its ranges."""
        opened = self.open(format)
        result = []
        bounds = np.stack(opened.bounds(), 1).tolist()
        assert len(bounds) == len(opened)
        backwards = np.arange(len(opened))[::-1]
        assert np.stack(opened.bounds(backwards), 1).tolist() == bounds[::-1]
        for row in range(len(opened)):
            assert opened.ranges(row) == [(at, n) for at, n in bounds[row : row + 1] if n]
            self.reads.clear()
            result.append(opened.record(row, self.read))
            for address, nbytes in self.reads:
                assert any(
                    a <= address and address + nbytes <= a + n for a, n in opened.ranges(row)
                )
        return result


Member = tuple[str, bytes | None]  # None: a folder


def tar_of(members: list[Member], format: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content or b""))
    return out.getvalue()
