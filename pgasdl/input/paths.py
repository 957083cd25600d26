"""Which files a name stands for: ranges, and local paths, folders and patterns."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator

from pgasdl.errors import DataError
from pgasdl.input.files import File


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
        if os.path.isdir(path):
            paths = [each for each in _tree(path) if stat.S_ISREG(os.stat(each).st_mode)]
        elif os.path.lexists(path):
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise DataError(f"{path} is no file")
            paths = [path]
        else:
            paths = [each for each in glob.glob(path, recursive=True) if os.path.isfile(each)]
        if not paths:
            raise DataError(f"{path}: no file")
        return [_file(each) for each in sorted(paths)]
    except OSError as error:
        raise DataError(f"{path}: {error}") from error


def _file(path: str) -> File:
    status = os.stat(path)
    return File(path, status.st_size, str(status.st_mtime_ns))


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
