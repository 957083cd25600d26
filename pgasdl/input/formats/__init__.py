"""The records of a data set: one module for each format of its files.

A format reads bytes through a function alone, by their addresses in :class:`Files`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from pgasdl.input.files import Files
from pgasdl.input.formats.arrays import Arrays
from pgasdl.input.formats.folder import Folder
from pgasdl.input.formats.parquet import Parquet
from pgasdl.input.formats.tar import Tar
from pgasdl.input.formats.window import ALL, Numbers, Read, Table

__all__ = ["FORMATS", "Format", "Read", "Table", "format_of"]


class Format(Protocol):
    """The records of some files; threads share it."""

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        """Take the table of each file, as :meth:`scan` gave it."""

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Return a table of a file's records; DataError: the file is damaged."""

    def __len__(self) -> int: ...

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return address and length of what :meth:`record` reads."""

    def bounds(self, rows: Numbers | slice = ALL) -> tuple[Numbers, Numbers]:
        """Return where some records begin, and their lengths, as :meth:`ranges` does."""

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return the fields of a record; DataError: it is damaged."""


FORMATS: dict[str, type[Format]] = {
    "tar": Tar,
    "folder": Folder,
    "parquet": Parquet,
    "npy": Arrays,
}

_ENDINGS = {
    "tar": (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"),  # Tar says: unpack it
    "folder": (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
    "parquet": (".parquet",),
    "npy": (".npy",),
}


def format_of(files: Files) -> str:
    """Return the format of files, by their names; ValueError: these say no format, or several."""
    names = [file.name.rpartition("/")[2].lower() for file in files]
    for format, endings in _ENDINGS.items():
        if names and all(name.endswith(endings) for name in names):
            return format
    counts = Counter("*." + name.rpartition(".")[2] if "." in name else name for name in names)
    there = ", ".join(f"{count} {ending}" for ending, count in counts.most_common(9))
    known = "; ".join(f"{format}: {' '.join(ends)}" for format, ends in _ENDINGS.items())
    raise ValueError(
        f"{len(files)} files, {there}: wanted files of one format ({known}); "
        'a pattern such as folder/*.tar takes some of a folder\'s files; format="folder" any'
    )
