"""Trust in files and folders: could another user have written them? Standard library only."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOR_OTHERS = 0o755


def who_else_wrote(path: str | Path, status: os.stat_result) -> str:
    """Return why another user could have written a file or folder; "": this user or root alone.

    A link is refused: its target changes with its folder.
    """
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to uid {status.st_uid}, not to this user"
    if _others_write(status):
        return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_of_one(status.st_gid)


def _is_of_one(group: int) -> bool:
    """Whether it is this user's own group: where each user has one, umask 002 is usual."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = found.gr_gid == user.pw_gid and found.gr_name == user.pw_name
    return own and {*found.gr_mem} <= {user.pw_name}


def who_else_writes(folder: Path) -> str:
    """Return why another user could exchange the files of a folder; "": nobody can.

    The folder is this user's or root's, and nobody else may write to it, nor rename it or a folder
    above it.
    """
    folder = folder.resolve()
    if problem := who_else_wrote(folder, folder.stat()):
        return problem
    for above in folder.parents:
        status = above.stat()
        if _others_write(status) and not status.st_mode & stat.S_ISVTX:
            return f"others can rename {folder}: they can write to {above}"
    return ""


def make_folder(path: Path) -> None:
    """Make a folder and those above it, for this user alone to write to, whatever the umask is."""
    for each in (*reversed(path.parents), path):
        each.mkdir(_FOR_OTHERS, exist_ok=True)


def keep_others_out(path: Path) -> None:
    """Take from others the right to write to a file or folder of this user."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_WRITE)


def open_plain(path: str, flags: int) -> int:
    """Open or make a file in a folder that others may write to; return its descriptor.

    OSError, too, if it is a link, a pipe or the like, or has other names: another user may have put
    it there, so that we write to another file.
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_CREAT | safe, 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "a hard link, a pipe or the like lies there", path)
    return descriptor
