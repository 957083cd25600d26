"""The files of a data set: their bytes, one file after another, are an address space."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class File:
    """A file: where storage has it, its size in bytes, and its version.

    The version is a time or an entity tag, which changes with the content; "": storage has none.
    """

    url: str
    nbytes: int
    version: str = ""


class Files:
    """Files, whose bytes have addresses: those of a file follow those of the one before.

    ``starts`` has the address of each file's first byte, and the end.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = tuple(files)
        sizes = [file.nbytes for file in self._files]
        self.starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._starts: list[int] = self.starts.tolist()  # to look at one takes less time

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> File:
        return self._files[number]

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return self._starts[-1]

    def locate(self, address: int) -> tuple[int, int]:
        """Return the file that has an address, and the offset in it."""
        number = min(bisect_right(self._starts, address), len(self)) - 1
        return number, address - self._starts[number]

    def parts(self, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield file, offset and length of each piece of a range."""
        if not 0 <= address <= address + nbytes <= self.nbytes:
            raise ValueError(f"bytes {address} to {address + nbytes}: there are {self.nbytes}")
        while nbytes:
            number, offset = self.locate(address)
            length = min(nbytes, self[number].nbytes - offset)
            yield number, offset, length
            address += length
            nbytes -= length

    def place(self, address: int) -> str:
        """Return where an address is, for messages."""
        number, offset = self.locate(address)
        return f"{self[number].url}, byte {offset}"

    @property
    def digest(self) -> str:
        """A name for this data set: other names, sizes or versions give another."""
        lines = "".join(f"{file.url}\n{file.nbytes}\n{file.version}\n" for file in self._files)
        return hashlib.sha256(lines.encode()).hexdigest()[:32]
