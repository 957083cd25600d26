"""A folder of pictures, or of any files: each is a record, and its sub-folder is its class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pgasdl.input.files import Files
from pgasdl.input.formats.window import ALL, Numbers, Read, Table


class Folder:
    """Records ``{"__key__": path without extension, extension: bytes, "cls": int}``.

    The root is the deepest folder that has all files. Files in it have no "cls"; those of a
    sub-folder have its place in ``classes``, which is sorted, however deep below they lie.
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        self._files = files
        folders = [*{tuple(files[number].name.split("/")[:-1]) for number in range(len(files))}]
        depth = 0
        while all(len(parts) > depth and parts[depth] == folders[0][depth] for parts in folders):
            depth += 1
        self._root = sum(len(part) + 1 for part in folders[0][:depth])  # characters
        self.classes = sorted({parts[depth] for parts in folders if len(parts) > depth})
        self._labels = {name: label for label, name in enumerate(self.classes)}

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Return an empty table: the names are enough."""
        return {}

    def __len__(self) -> int:
        return len(self._files)

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return the file's range."""
        nbytes = self._files[row].nbytes
        return [(int(self._files.starts[row]), nbytes)] if nbytes else []

    def bounds(self, rows: Numbers | slice = ALL) -> tuple[Numbers, Numbers]:
        """Return some files' ranges."""
        begins = self._files.starts[:-1][rows]
        return begins, self._files.starts[1:][rows] - begins

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return the file's name, bytes and class."""
        path = self._files[row].name[self._root :]
        key, extension = os.path.splitext(path)
        data = b"".join(read(*part) for part in self.ranges(row))
        record: dict[str, Any] = {"__key__": key, extension[1:].lower(): data}
        folder, found, _ = path.partition("/")
        return {**record, "cls": self._labels[folder]} if found else record
