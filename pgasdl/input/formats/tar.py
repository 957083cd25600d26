"""Tars by webdataset's convention: members in a row whose names differ in extension are a sample.

The extension is all behind the first dot of a name's last part, in lower case.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import DataError, PgasError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import Read, Table, Window

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # key and extension
_META = re.compile(r"__[^/]*__(/|$)")  # what webdataset keeps for itself
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
    offset = 0
    try:
        with tarfile.open(fileobj=window, mode="r:", encoding="utf-8") as tar:
            for member in iter(tar.next, None):
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps all
                offset = member.offset
                if not 0 <= member.size <= nbytes - member.offset_data:
                    raise ValueError(f"{member.name!r} has {member.size} bytes by its header")
                if member.issparse():
                    raise ValueError(f"{member.name!r} is a sparse file: pack it without --sparse")
                if member.isreg() and not _META.match(member.name):
                    yield member.name, member.offset_data, member.size
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
