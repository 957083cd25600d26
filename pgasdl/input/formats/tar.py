"""Tars by webdataset's convention: members in a row whose names differ in extension are a sample.

The extension is all behind the first dot of a name's last part, in lower case.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import DataError, PgasError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import Numbers, Read, Table, Window

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # key and extension
_META = re.compile(r"__[^/]*__(/|$)")  # what webdataset keeps for itself
_HARMLESS = re.compile(rb"(\d+ (mtime|atime|ctime|uid|gid|uname|gname)=[^\n]*\n)+")
_SMALLEST, _LARGEST = 4096, 1 << 20  # bytes of a read of headers
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


class Tar:
    """Samples of tars: ``{"__key__": str, extension: bytes, ...}``.

    Attributes
    ----------
    extensions : list of str
        All that samples have, sorted.
    """

    def __init__(self, files: Files, tables: Sequence[Table]) -> None:
        def joined(name: str) -> npt.NDArray[Any]:
            return np.concatenate([table[name] for table in tables])

        names = [_unpacked(table["extensions"], table["extension_nbytes"]) for table in tables]
        self.extensions = sorted(set().union(*names))
        numbers = {name: number for number, name in enumerate(self.extensions)}
        # Of members: their extension, address and size.
        self._extension = np.concatenate(
            [
                np.array([numbers[name] for name in mine], np.int32)[table["extension"]]
                for mine, table in zip(names, tables, strict=True)
            ]
        )
        self._address = np.concatenate(
            [start + table["offset"] for start, table in zip(files.starts, tables, strict=False)]
        )
        self._nbytes = joined("nbytes")
        # Of samples: where their members and keys begin.
        self._members = _starts(joined("n_members"))
        self._keys, self._key_starts = joined("keys"), _starts(joined("key_nbytes"))

    @staticmethod
    def scan(files: Files, number: int, read: Read) -> Table:
        """Read the headers of a tar."""
        keys: list[str] = []
        n_members: list[int] = []
        extensions: dict[str, int] = {}
        members: list[tuple[int, int, int]] = []
        fields: set[str] = set()  # of the last sample
        for name, offset, nbytes in _members(files, number, read):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            key, extension = match[1], match[2].lower()
            if not keys or key != keys[-1]:
                keys.append(key)
                n_members.append(0)
                fields = {"__key__", "__url__"}  # webdataset's own
            if extension in fields:
                raise DataError(
                    f"{files[number].url}, byte {offset}: {name!r}: its sample has a field "
                    f"{extension!r} already"
                )
            fields.add(extension)
            n_members[-1] += 1
            members.append((extensions.setdefault(extension, len(extensions)), offset, nbytes))
        columns = np.array(members, np.int64).reshape(-1, 3).T
        key_blob, key_nbytes = _packed(keys)
        extension_blob, extension_nbytes = _packed(list(extensions))
        return {
            "keys": key_blob,
            "key_nbytes": key_nbytes,
            "n_members": np.array(n_members, np.int32),
            "extensions": extension_blob,
            "extension_nbytes": extension_nbytes,
            "extension": columns[0].astype(np.int32),
            "offset": columns[1].copy(),
            "nbytes": columns[2].copy(),
        }

    def __len__(self) -> int:
        return len(self._members) - 1

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return one range, from the sample's first field to its last."""
        first, last = self._members[row], self._members[row + 1] - 1
        begin, end = int(self._address[first]), int(self._address[last] + self._nbytes[last])
        return [(begin, end - begin)] if end > begin else []

    def bounds(self) -> tuple[Numbers, Numbers]:
        """Return each sample's range."""
        begins, lasts = self._address[self._members[:-1]], self._members[1:] - 1
        return begins, self._address[lasts] + self._nbytes[lasts] - begins

    def record(self, row: int, read: Read) -> dict[str, Any]:
        """Return a sample's key and fields."""
        key = self._keys[self._key_starts[row] : self._key_starts[row + 1]]
        record: dict[str, Any] = {"__key__": _decoded(key.tobytes())}
        data = memoryview(b"")
        for part in self.ranges(row):  # one, or none
            data = memoryview(read(*part))
        members = slice(self._members[row], self._members[row + 1])
        begins = self._address[members] - self._address[members.start]
        ends = begins + self._nbytes[members]
        for extension, begin, end in zip(self._extension[members], begins, ends, strict=True):
            record[self.extensions[extension]] = bytes(data[begin:end])
        return record


class _Headers:
    """Headers of the common kind, read in pieces that grow while members are small."""

    def __init__(self, read: Callable[[int, int], Any], nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        self._begin, self._data = 0, b""

    def block(self, offset: int) -> bytes:
        """Return the 512 bytes at an offset; fewer at the end."""
        end = self._begin + len(self._data)
        if not self._begin <= offset <= end - tarfile.BLOCKSIZE:
            near = 0 <= offset - end < len(self._data)
            nbytes = min(2 * len(self._data), _LARGEST) if near else _SMALLEST
            nbytes = max(0, min(nbytes, self._nbytes - offset))
            self._begin, self._data = offset, bytes(self._read(offset, nbytes)) if nbytes else b""
        at = offset - self._begin
        return self._data[at : at + tarfile.BLOCKSIZE]

    def member(self, offset: int) -> tuple[str, int, int] | None:
        """Return name, offset of the data, and size; None: tarfile has to look at this header."""
        header = self.block(offset)
        if header[156:157] == b"x":  # Pax: as a rule, times that have fractions
            length, offset = _size(header), offset + tarfile.BLOCKSIZE
            if not length or length > tarfile.BLOCKSIZE:
                return None
            if not _HARMLESS.fullmatch(self.block(offset)[:length]):
                return None
            offset += tarfile.BLOCKSIZE
            header = self.block(offset)
        size = _size(header)
        if size is None or header[156] != ord("0") or header[345]:  # kind; a name's beginning
            return None
        name = header[:100].partition(b"\0")[0]
        return _decoded(name), offset + tarfile.BLOCKSIZE, size


def _walk(tar: Any, headers: _Headers) -> Iterator[tuple[int, str, int, int, bool]]:
    """Yield of each member its offset, name, where its data begin, size, and whether it has holes.

    What is no file has no name.
    """
    while (member := tar.next()) is not None:
        tar.members.clear()  # else it keeps all
        name = member.name if member.isreg() else ""
        yield member.offset, name, member.offset_data, member.size, member.issparse()
        while not tar.pax_headers and (plain := headers.member(tar.offset)):
            offset, (name, begin, size) = tar.offset, plain
            tar.offset = begin - (-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            yield offset, name, begin, size, False


def _size(header: bytes) -> int | None:
    """Return the size in a header that is sound and has its numbers as programs write them."""
    digits, check = header[124:135], header[148:154]
    if len(header) < tarfile.BLOCKSIZE or not (digits.isdigit() and check.isdigit()):
        return None
    try:  # a checksum takes its own field as blanks; Adler's has the sum of bytes, modulo a prime
        total = int(check, 8) + sum(header[148:156]) - 8 * ord(" ")
        sound = (1 + total) % 65521 == zlib.adler32(header) & 0xFFFF
        return int(digits, 8) if sound and header[135] in b"\0 " else None
    except ValueError:  # 8 or 9
        return None


def _members(files: Files, number: int, read: Read) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of a tar's regular members."""
    url, nbytes = files[number].url, files[number].nbytes
    # The buffer has one header and the byte before, which tarfile reads to find the end.
    window = io.BufferedReader(Window(files, number, read), 2 * tarfile.BLOCKSIZE)
    start = window.peek(8)
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{url} is compressed: unpack it ({command}), so that records can be read "
                "from anywhere in it"
            )
    headers = _Headers(lambda at, n: read(int(files.starts[number]) + at, n), nbytes)
    offset = 0
    try:
        with tarfile.open(fileobj=window, mode="r:", encoding="utf-8") as tar:
            for member in _walk(tar, headers):
                offset, name, begin, size, sparse = member
                if not 0 <= size <= nbytes - begin:
                    raise ValueError(f"{name!r} has {size} bytes by its header")
                if sparse:
                    raise ValueError(f"{name!r} is a sparse file: pack it without --sparse")
                if name and not _META.match(name):
                    yield name, begin, size
            offset = tar.offset
            window.seek(offset)
            if window.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("neither a member's header nor the end of a tar")
    except PgasError:
        raise
    except (tarfile.TarError, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise DataError(f"{url}, byte {offset}: a damaged tar, or none: {error}") from error


def _starts(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _packed(names: list[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Return the bytes of names, and how many each has."""
    words = [name.encode("utf-8", "surrogateescape") for name in names]
    return np.frombuffer(b"".join(words), np.uint8), np.array([*map(len, words)], np.int32)


def _unpacked(blob: npt.NDArray[np.uint8], nbytes: npt.NDArray[np.int32]) -> list[str]:
    data, starts = blob.tobytes(), _starts(nbytes)
    return [_decoded(data[a:b]) for a, b in pairwise(starts)]


def _decoded(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")
