"""Where a data set's files are, and their bytes: local paths, and what fsspec reads."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote

from pgasdl.errors import ClosedError, DataError, UnavailableError
from pgasdl.input.descriptors import Descriptors
from pgasdl.input.files import File, Remote, expanded, local, magic, names_of
from pgasdl.input.remote import ask, cause, is_refusal, library, ranged
from pgasdl.input.threads import at_once

log = logging.getLogger("pgasdl")

# Names of versions in HTTP, and in fsspec's libraries.
_VERSIONS = ("ETag", "Last-Modified", "etag", "LastModified", "last_modified", "mtime")
# Of a URL in an error: it may have a signature.
_QUERY = re.compile(r"(?<=://)([^\s?'\"]*)\?[^\s'\"]*")
_Out = TypeVar("_Out")


class Storage:
    """Finds files and reads ranges of them; threads may share it. :meth:`close` it.

    Local paths and ``file://`` are read with pread; other URLs with fsspec, whose caches are not
    used. A request that fails, or takes longer than ``timeout``, is made ``tries`` times, with a
    ``pause`` that doubles. A file that storage does not have, or refuses (HTTP's 401, 403, 404 and
    410), is not tried again.

    At the end of a try, the connection of a protocol that fsspec has asynchronously (HTTP, S3 and
    the other clouds) is closed. Others (FTP, SFTP) take a connection for each try, in a thread that
    stays until their library gives up.
    """

    def __init__(self, *, tries: int = 5, pause: float = 0.5, timeout: float = 60.0) -> None:
        if tries < 1 or pause < 0 or timeout <= 0:
            raise ValueError(
                f"tries {tries}, pause {pause}, timeout {timeout}: at least 1, at least 0, above 0"
            )
        self._tries, self._pause, self._timeout = tries, pause, timeout
        self._descriptors = Descriptors()
        self._closed = threading.Event()
        self._ranges_ignored = False
        self._versions: dict[str, str] = {}  # of files that were found or read

    def find(self, remote: Remote) -> list[File]:
        """Return the files that a path, a URL, a pattern, or a list of these names, in that order.

        A folder stands for all files below it, sorted by name, without those whose names or folders
        begin with a dot; a pattern with ``*``, ``?``, ``[]`` or ``**`` for the files that match,
        sorted. Each may have ranges, ``{0000..0099}``. An HTTP server has to list its folders.
        Local files get absolute paths. DataError: there is no file, or one twice; a name has no
        file; storage fails, or has no sizes. UnavailableError: fsspec, or the package that it
        needs, is not installed.
        """
        patterns = [url for name in names_of(remote) for url in expanded(name)]
        # Local ones in turn, as those of a folder: to start threads takes longer.
        lists: Iterable[list[File]] = map(self._list, patterns)
        if any("://" in each for each in patterns):
            lists = at_once(self._list, patterns)
        found = [each for some in lists for each in some]
        unknown = [file for file in found if file.nbytes < 0]
        known = {file.url: file for file in at_once(self._ask_for, unknown)}
        files: dict[str, File] = {}
        for file in found:
            if file.url in files:
                raise DataError(f"{file.name} is named twice")
            files[file.url] = known.get(file.url, file)
            if "://" not in file.url:
                self._versions[file.url] = file.version
        if not files:
            raise DataError("no file is named")
        return list(files.values())

    def fill(self, file: File, offset: int, out: memoryview) -> None:
        """Fill ``out`` with a range of a file that :meth:`find` gave; ValueError: there is none.

        DataError, with the URL, the range, the number of tries and the last error: no try
        succeeded, or the file has changed since it was found, or first read here: by its size or
        time where it is local, its ETag or else time over HTTP. ClosedError: the storage is closed.
        """
        end = offset + out.nbytes
        if not 0 <= offset <= end <= file.nbytes:
            raise ValueError(f"{file.name}, bytes {offset} to {end}: it has {file.nbytes}")
        if out.nbytes:
            read = self._fetch if "://" in file.url else self._pread
            bytes_of = out.cast("B")
            self._persist(
                lambda: _range(file, offset, bytes_of), lambda: read(file, offset, bytes_of)
            )

    def is_another(self, file: File) -> bool:
        """Whether a local file has another time here than where it was found."""
        return "://" not in file.url and self._versions.get(file.url) != file.version

    def announce(self, file: File, offset: int, nbytes: int) -> None:
        """Let the kernel fetch a range of a local file that will be read soon."""
        if "://" not in file.url:
            with suppress(OSError):  # the read raises the error
                self._descriptors.get(file.url).announce(offset, nbytes)

    def close(self) -> None:
        """Close the local files, and end the pauses between tries. Idempotent."""
        self._closed.set()
        self._descriptors.close()

    def _persist(self, what: Callable[[], str], call: Callable[[], _Out]) -> _Out:
        """Call until it succeeds, or another try cannot succeed."""
        for number in range(self._tries):
            if number:
                self._closed.wait(self._pause * 2 ** (number - 1))
            if self._closed.is_set():
                raise ClosedError(f"{what()}: the storage is closed")
            try:
                return call()
            except (DataError, UnavailableError):
                raise
            except Exception as error:  # each library has its own
                last = cause(error)
                if is_refusal(last):
                    break
        told = " ".join(f"{type(last).__name__}: {last}".split())  # aiohttp's have several lines
        tries = "1 try" if number == 0 else f"{number + 1} tries"
        raise DataError(_QUERY.sub(r"\1", f"{what()}: {told}, after {tries}")) from last

    def _pread(self, file: File, offset: int, out: memoryview) -> None:
        try:
            descriptor = self._descriptors.get(file.url)
            filled = descriptor.fill(offset, out)
            status = os.fstat(descriptor.number)
        except OSError:  # a network's file system may want it to be opened again
            self._descriptors.forget(file.url)
            raise
        if not filled or status.st_size != file.nbytes:
            raise DataError(
                f"{_range(file, offset, out)}: the file has {status.st_size} bytes and had "
                f"{file.nbytes} when it was found: it has been cut, or has grown"
            )
        # Where another rank has found it, not its time: each host may have a copy.
        self._require_same(file, offset, out, str(status.st_mtime_ns))

    def _require_same(
        self, file: File, offset: int, out: memoryview, version: str, before: str = ""
    ) -> None:
        """Raise DataError if a file has another version than before."""
        if (before := self._versions.setdefault(file.url, before or version)) != version:
            raise DataError(
                f"{_range(file, offset, out)}: the file has changed: its version is {version}, "
                f"was {before}"
            )

    def _fetch(self, file: File, offset: int, out: memoryview) -> None:
        end = offset + len(out)
        if file.url.startswith(("http://", "https://")):
            data, told = ask(file.url, ranged, self._timeout, start=offset, end=end)
            if version := _version(told):
                both_tags = version.endswith('"') == file.version.endswith('"')
                self._require_same(file, offset, out, version, file.version if both_tags else "")
        else:
            data = ask(file.url, "cat_file", self._timeout, start=offset, end=end)
        if len(data) == file.nbytes > len(out):
            if not self._ranges_ignored:
                self._ranges_ignored = True
                log.warning("%s: the server sends whole files where ranges are wanted", file.name)
            data = data[offset : offset + len(out)]
        if len(data) != len(out):
            raise OSError(f"{len(data)} bytes came; the file was listed with {file.nbytes}")
        out[:] = data

    def _ask_for(self, found: File) -> File:
        file = _file(found.url, self._info(found.url), found.root)
        if file.nbytes < 0:
            raise DataError(f"{file.name}: the server does not tell its size")
        return file

    def _info(self, url: str) -> dict[str, Any]:
        name = File(url, 0).name
        info: dict[str, Any] = self._persist(lambda: name, lambda: ask(url, "info", self._timeout))
        return info

    def _list(self, url: str) -> list[File]:
        """Return what a name without ranges stands for."""
        if url.startswith("file://"):
            url = unquote(url.removeprefix("file://").removeprefix("localhost"))
        if "://" not in url:
            return local(url)
        start, name = magic(url), File(url, 0).name
        if start < len(url):
            root = url[: url.rindex("/", 0, start) + 1]
            depth = math.inf if "**" in url else url.count("/", start) + 1
            matching = re.compile(library("fsspec.utils").glob_translate(name))
            found = [each for each in self._below(root, 0, depth) if matching.match(each.name)]
        elif name.endswith("/"):
            found = list(self._below(url, len(name)))
        else:
            info = self._info(url)
            # By an HTTP server: a folder.
            redirected = File(str(info.get("url", "")), 0).name.endswith("/")
            if info["type"] != "directory" and not redirected:
                return [_file(url, info)]
            found = list(self._below(url, len(name) + 1))
        if not found:
            raise DataError(f"{name}: no file")
        return sorted(found, key=lambda file: file.name)

    def _below(self, url: str, root: int, depth: float = math.inf) -> Iterator[File]:
        """Yield the files of a remote folder and of those in it; ``root`` is as in File."""
        folder = File(url, 0).name.rstrip("/")
        for info in self._persist(lambda: url, lambda: ask(url, "ls", self._timeout, detail=True)):
            path = File(info["name"], 0).name.strip("/")
            name = path.rpartition("/")[2]
            if name.startswith(".") or folder.endswith(path):  # or a link to sort by size
                continue
            inner = info["name"] if "://" in path else f"{folder}/{name}"
            if info["type"] == "file":
                yield _file(inner, info, root)
            elif info["type"] == "directory" and depth > 1:
                yield from self._below(inner, root, depth - 1)


def _range(file: File, offset: int, out: memoryview) -> str:
    """Return a range of a file as errors name it."""
    return f"{file.name}, bytes {offset} to {offset + len(out)}"


def _file(url: str, info: dict[str, Any], root: int = 0) -> File:
    """Return a file as a library describes it; its size is -1 where the library has none."""
    return File(url, -1 if info["size"] is None else int(info["size"]), _version(info), root)


def _version(told: Mapping[str, Any]) -> str:
    """Return a version by its first name; a proxy that packs makes a tag weak, ``W/"..."``."""
    version = next((str(told[name]) for name in _VERSIONS if told.get(name)), "")
    return version.removeprefix("W/")
