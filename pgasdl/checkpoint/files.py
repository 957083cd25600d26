"""The common part of all forms: partial names, syncing, hashing files, reporting damage."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pgasdl.errors import CheckpointError, PgasError, UnavailableError
from pgasdl.trust import keep_others_out, make_folder, who_else_writes, who_else_wrote


def require(package: str, reason: str) -> None:
    """Raise UnavailableError unless a package is installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{reason} needs {package}: pip install {package}")


def partial(path: Path) -> Path:
    """Return the name that a checkpoint has until it is complete."""
    return path.with_name(path.name + ".partial")


def begin(path: Path) -> Path:
    """Remove the leftovers of an earlier try; return the name to write to."""
    make_folder(path.parent)
    remove(partial(path))
    return partial(path)


def finish(path: Path) -> None:
    """Let a checkpoint reach the disk, and then give it its name."""
    for each in _all_of(partial(path)):
        keep_others_out(each)
    sync(partial(path))
    if path.is_dir():  # only an empty folder can be replaced
        remove(path)
    partial(path).replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_private(folder: Path) -> None:
    """Raise CheckpointError if another user could exchange the checkpoints in a folder."""
    if problem := who_else_writes(folder):
        raise CheckpointError(
            f"checkpoints in {folder} are not believed: {problem}: take that right away (chmod "
            "go-w), or use a folder that only you can write to; load reads one of them"
        )


def require_own(path: Path) -> None:
    """Raise CheckpointError if another user could have written a part of a checkpoint."""
    for each in _all_of(path):
        status = each.lstat()
        problem = who_else_wrote(each, status)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            problem = problem or f"{each} is no file"
        if problem:
            raise CheckpointError(f"checkpoint {path} is not believed: {problem}")


def _all_of(path: Path) -> list[Path]:
    """Return a file, or a folder and what lies in it."""
    return [path, *path.rglob("*")]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error in the ``with`` block into a CheckpointError that names ``path``."""
    try:
        yield
    except PgasError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"checkpoint {path} is damaged or unreadable ({reason})") from error
