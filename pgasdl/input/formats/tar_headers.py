"""The headers of a tar: the core walks over plain members, tarfile looks at all others."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from pgasdl import _native
from pgasdl.errors import DataError, PgasError
from pgasdl.input.files import Files
from pgasdl.input.formats.window import Read, Table, Window

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # key and extension
_META = re.compile(r"__[^/]*__(/|$)")  # what webdataset keeps for itself
_SMALLEST, _LARGEST = 4096, 1 << 20  # bytes of a read of headers
_NEAR = 32 << 10  # bytes that take less time to read than another read
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


class TarHeaders:
    """The samples of a tar, as far as its headers were read."""

    def __init__(self, files: Files, number: int, read: Read) -> None:
        self._url, self._nbytes = files[number].name, files[number].nbytes
        self._start, self._read = int(files.starts[number]), read
        self._window = Window(files, number, read)
        self._samples = _native.TarSamples(self._nbytes)
        self._begin, self._data = 0, memoryview(b"")

    def steps(self) -> Iterator[None]:
        """Read the headers; yield before each piece of the tar. DataError: it is damaged."""
        samples, tar, offset = self._samples, None, 0
        try:
            while (stop := samples.walk(self._data, self._begin)) != "end":
                if stop == "more":
                    yield
                    if self._refill():
                        continue
                if stop == "name":
                    offset = samples.offset
                    name, begin, nbytes = samples.found
                    self._add(name.decode("utf-8", "surrogateescape"), begin, nbytes)
                    samples.offset = begin - (-nbytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    continue
                offset = max(offset, samples.last)
                if tar is None:
                    tar = self._tarfile()
                    if samples.offset:  # else its first member, which it has looked at
                        tar.firstmember, tar.offset = None, samples.offset
                tar.offset = max(tar.offset, samples.offset)
                while (member := tar.next()) is not None:
                    tar.members.clear()  # else it keeps all
                    offset = member.offset
                    self._look_at(member)
                    if not tar.pax_headers:  # which hold for all members behind them
                        break
                    yield
                else:
                    offset = tar.offset
                    tar.fileobj.seek(offset)
                    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                        raise ValueError("neither a member's header nor the end of a tar")
                    return
                samples.offset = tar.offset
                yield
        except PgasError:
            raise
        except (tarfile.TarError, ValueError, LookupError, OverflowError, MemoryError) as error:
            raise DataError(
                f"{self._url}, byte {offset}: a damaged tar, or none: {error}"
            ) from error

    def __len__(self) -> int:
        return len(self._samples)

    def table(self) -> Table:
        """Return the samples so far; the last may have more fields."""
        columns = self._samples.columns()
        extensions = self._samples.extensions
        return {
            "keys": np.frombuffer(columns["keys"], np.uint8),
            "key_nbytes": np.frombuffer(columns["key_nbytes"], np.int32),
            "n_members": np.frombuffer(columns["n_members"], np.int32),
            "extensions": np.frombuffer(b"".join(extensions), np.uint8),
            "extension_nbytes": np.array([*map(len, extensions)], np.int32),
            "extension": np.frombuffer(columns["extension"], np.int32),
            "offset": np.frombuffer(columns["offset"], np.int64),
            "nbytes": np.frombuffer(columns["nbytes"], np.int64),
        }

    def _refill(self) -> bool:
        """Read the headers that are wanted; False: the file ends before."""
        offset, have = self._samples.offset, len(self._data)
        near = offset - self._begin - have < _NEAR
        nbytes = max(min(2 * have, _LARGEST) if near else 0, _SMALLEST)
        nbytes = min(nbytes, self._nbytes - offset)
        if nbytes < tarfile.BLOCKSIZE or (offset == self._begin and nbytes <= have):
            return False
        self._data = memoryview(self._read(self._start + offset, nbytes))
        self._begin = offset
        return True

    def _tarfile(self) -> Any:
        # The buffer has one header and the byte before, which tarfile reads to find the end.
        window = io.BufferedReader(self._window, 2 * tarfile.BLOCKSIZE)
        start = window.peek(8)
        for magic, command in _COMPRESSED.items():
            if start.startswith(magic):
                raise DataError(
                    f"{self._url} is compressed: unpack it ({command}), so that records can be "
                    "read from anywhere in it"
                )
        return tarfile.open(fileobj=window, mode="r:", encoding="utf-8")

    def _look_at(self, member: tarfile.TarInfo) -> None:
        """Take a member that tarfile has found."""
        name = member.name if member.isreg() else ""
        begin, nbytes = member.offset_data, member.size
        if not 0 <= nbytes <= self._nbytes - begin:
            raise ValueError(f"{name!r} has {nbytes} bytes by its header")
        if member.issparse():
            raise ValueError(f"{name!r} is a sparse file: pack it without --sparse")
        self._add(name, begin, nbytes)

    def _add(self, name: str, begin: int, nbytes: int) -> None:
        match = _NAME.fullmatch(name)
        if not name or _META.match(name) or match is None:
            return
        key, extension = match[1], match[2].lower()
        words = [word.encode("utf-8", "surrogateescape") for word in (key, extension)]
        if not self._samples.add(words[0], words[1], begin, nbytes):
            raise DataError(
                f"{self._url}, byte {begin}: {name!r}: its sample has a field {extension!r} already"
            )
