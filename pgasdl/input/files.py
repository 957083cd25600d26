"""The files of a data set: which a name stands for, and the addresses of their bytes."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import unquote

import numpy as np

from pgasdl.errors import DataError

Remote = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class File:
    """A file: where storage has it, its size in bytes, and its version.

    The version is a time or an entity tag, which changes with the content; "": storage has none.
    ``root`` is how many characters of its name are a folder that was named; 0: it was found
    otherwise.
    """

    url: str
    nbytes: int
    version: str = ""
    root: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The URL as users see it: over HTTP decoded, without a query, which may be a signature."""
        if not self.url.startswith(("http://", "https://")):
            return self.url
        return unquote(self.url.partition("?")[0], errors="surrogateescape")


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

    def __iter__(self) -> Iterator[File]:
        return iter(self._files)

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
        return f"{self[number].name}, byte {offset}"

    @property
    def digest(self) -> str:
        """A name for this data set: other names, sizes or versions give another."""
        # A query may be all that tells two files without tags apart.
        names = [file.name if '"' in file.version else file.url for file in self._files]
        each = zip(names, self._files, strict=True)
        return _digest(f"{name}\n{file.nbytes}\n{file.version}\n" for name, file in each)

    @cached_property
    def in_order(self) -> str:
        """A digest of sizes, and of names below the folder of all: the same for a copy."""
        same = os.path.commonprefix([file.name for file in self._files])  # noqa: RUF071
        root = same.rpartition("/")[0]
        return _digest(f"{file.name[len(root) :]}\n{file.nbytes}\n" for file in self._files)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def names_of(remote: Remote) -> tuple[str, ...]:
    """Return the names of a data set's files, in the order of its records."""
    names = [remote] if isinstance(remote, str | os.PathLike) else remote
    if not isinstance(names, Sequence):
        raise TypeError(f"a {type(names).__name__} of names has no order that stays: sort it")
    paths = tuple(os.fspath(name) for name in names)
    if "" in paths:
        raise ValueError("a name of no character; the working folder is '.'")
    return paths


def expanded(pattern: str) -> Iterator[str]:
    """Yield the names that a pattern with ranges, ``{0000..0099}``, stands for."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not found:
        yield pattern
        return
    first, last = found.groups()
    padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
    width = max(len(first), len(last)) if padded else 1
    step = 1 if int(first) <= int(last) else -1
    for number in range(int(first), int(last) + step, step):
        for rest in expanded(pattern[found.end() :]):
            yield f"{pattern[: found.start()]}{number:0{width}}{rest}"


def local(name: str) -> list[File]:
    """Return the files that a local path or pattern stands for."""
    path = os.path.abspath(os.path.expanduser(name))
    try:
        root = 0
        if os.path.isdir(path):
            root = len(os.path.join(path, ""))
            paths = [each for each in _tree(path) if stat.S_ISREG(os.stat(each).st_mode)]
        elif os.path.lexists(path):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise DataError(f"{path} is no file")
            paths = [path]
        else:
            paths = [each for each in glob.glob(path, recursive=True) if os.path.isfile(each)]
        if not paths:
            raise DataError(f"{path}: no file")
        return [_file(each, root) for each in sorted(paths)]
    except OSError as error:
        raise DataError(f"{path}: {error}") from error


def _file(path: str, root: int) -> File:
    status = os.stat(path)
    return File(path, status.st_size, str(status.st_mtime_ns), root)


def _tree(path: str) -> Iterator[str]:
    """Yield what lies in a folder and in those in it, without what is hidden."""
    seen = set()
    for folder, inner, names in os.walk(path, followlinks=True, onerror=_raise):
        real = os.path.realpath(folder)
        if real in seen:
            raise DataError(f"{folder} is in {path} twice: a link leads to it")
        seen.add(real)
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def magic(url: str) -> int:
    """Return where the pattern in a URL begins; its length if it is none."""
    is_http = url.startswith("http")  # its "?" begins a query, its host may have brackets
    start = url.index("://") + 3
    if is_http:
        start = max(url.find("/", start), start)
    found = re.compile(r"[*[]" if is_http else r"[*?[]").search(url, start)
    return found.start() if found else len(url)
