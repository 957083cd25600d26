"""A folder of pictures, or of any files: each is a record, and its sub-folder is its class."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from pgasdl.errors import DataError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import ALL, Numbers, Read, Table

log = logging.getLogger("pgasdl")


class Folder:
    """Records ``{"__key__": path without extension, extension: bytes, "cls": int}``.

    The root is the deepest folder that has all files. Files in it have no "cls"; those of a
    sub-folder have its place in ``classes``, which is sorted, however deep below they lie. Several
    folders that were named, with all files in sub-folders, are one. DataError: a file's extension
    is "cls".
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        self._files = files
        every = [(file.name, file.root) for file in files]
        self._named = all(root and name.find("/", root) > 0 for name, root in every)
        paths = {name[self._named and root : name.rfind("/") + 1] for name, root in every}
        folders = [path.split("/")[:-1] for path in paths]
        depth = 0
        while all(len(parts) > depth and parts[depth] == folders[0][depth] for parts in folders):
            depth += 1
        self._root = sum(len(part) + 1 for part in folders[0][:depth])  # characters
        self.classes = sorted({parts[depth] for parts in folders if len(parts) > depth})
        for name, _ in every if self.classes else ():
            if name[-4:].lower() == ".cls":
                raise DataError(f"{name}: a record has its folder's number as cls")
        log.info("input: %d classes: %.999s", len(self.classes), ", ".join(self.classes))
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
        file = self._files[row]
        path = file.name[self._root + (self._named and file.root) :]
        key, extension = os.path.splitext(path)
        data = b"".join(read(*part) for part in self.ranges(row))
        record: dict[str, Any] = {"__key__": key, extension[1:].lower(): data}
        folder, found, _ = path.partition("/")
        return {**record, "cls": self._labels[folder]} if found else record
