"""Blocks, and looks at the folder of a cache, for tests of ``pgasdl.input.disk``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pgasdl.input.disk import DiskCache

MINE, OTHER = "0123456789abcdef" * 2, "f" * 32
SIZE = 1000
STORED = SIZE + 20  # with a checksum and a trailer


def content(block: int, nbytes: int = SIZE) -> bytes:
    start = block * 7 % 253
    return (bytes(range(253)) * (nbytes // 253 + 2))[start : start + nbytes]


def put(cache: DiskCache, *blocks: int) -> None:
    for block in blocks:
        cache.put(block, memoryview(content(block)))


def get(cache: DiskCache, block: int, offset: int = 0, nbytes: int = SIZE) -> bytes | None:
    out = memoryview(bytearray(nbytes))
    return bytes(out) if cache.get(block, offset, out) else None


def kept(folder: Path, digest: str = MINE) -> set[int]:
    return {int(name) for name in os.listdir(folder / digest)}


def nbytes_of(folder: Path) -> int:
    """All but the lock; files may be renamed meanwhile, and are counted once."""
    sizes = {}
    for path in folder.glob("**/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.name != "lock" and not path.is_dir():
                status = path.stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def unfinished(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name not in ("lock", MINE, OTHER)]
