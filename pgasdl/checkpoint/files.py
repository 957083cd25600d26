"""The common part of all forms: partial names, syncing, hashing files, reporting damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pgasdl.errors import CheckpointError, PgasError, UnavailableError
from pgasdl.trust import keep_others_out, make_folder, who_else_writes, who_else_wrote

# Numbers of errors that a damaged checkpoint causes; safetensors' own have none.
_DAMAGE = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG, None}


def require(package: str, reason: str) -> None:
    """Raise UnavailableError unless a package is installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"{reason} needs {package}: pip install {package}")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Remove what killed writers left; give the name to write to, of which nothing stays."""
    make_folder(path.parent)
    require_private(path.parent)
    for left in path.parent.glob("*.partial/lock"):
        with suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its writer lives
            shutil.rmtree(left.parent)
    work = Path(tempfile.mkdtemp(".partial", f"{path.name}.", path.parent))
    try:
        with (work / "new").open("w") as lock:
            with suppress(OSError):  # without locks nobody else removes it
                fcntl.flock(lock, fcntl.LOCK_EX)
                (work / "new").rename(work / "lock")
            yield work / path.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


def finish(partial: Path, path: Path) -> None:
    """Let a checkpoint reach the disk, and then give it its name."""
    for each in _all_of(partial):
        keep_others_out(each)
    sync(partial)
    old = path.with_name("0" + path.name)  # the same iteration: it counts until the new one does
    if path.is_dir():  # only an empty folder can be replaced
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
    partial.replace(path)
    sync(path.parent)
    if old.exists():
        old.replace(partial)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if problem := who_else_wrote(each, status) or ("" if plain else f"{each} is no file"):
            raise CheckpointError(f"checkpoint {path} is not believed: {problem}")


def _all_of(path: Path) -> list[Path]:
    """Return a file, or a folder and what lies in it."""
    return [path, *path.rglob("*")]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn damage found in the ``with`` block into a CheckpointError that names ``path``."""
    try:
        yield
    except (PgasError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise  # the disk's or this process's trouble: the checkpoint may be whole
        if "can't allocate memory" in str(error):  # PyTorch's RuntimeError
            raise MemoryError(f"reading {path}: {error}") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"checkpoint {path} is damaged or unreadable ({reason})") from error
