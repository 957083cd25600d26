"""Paths: files beside the server's database, folders of jobs, and the root around them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pgasdl.errors import ConfigError
from pgasdl.jobs.schema import refused
from pgasdl.trust import who_else_writes


def default_file() -> Path:
    """Return ``pgasdl/jobs.db`` in the user's state folder (XDG_STATE_HOME).

    ConfigError: the user has no home folder, as in some containers.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local/state"
    except RuntimeError as error:
        raise ConfigError("no home folder: set HOME or XDG_STATE_HOME, or name a file") from error
    return base / "pgasdl/jobs.db"


@dataclass(frozen=True, slots=True)
class Places:
    """The files and folders that lie beside the database ``file``."""

    file: Path

    def require_private(self) -> None:
        """Raise ConfigError unless only this user can change what lies beside the file.

        The commands in it are run, and clients send the token to the address that stands there.
        """
        folder = self.file.parent
        try:
            problem = who_else_writes(folder)
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
        if problem:
            raise ConfigError(
                f"{problem}: give --file in a folder that only you can write to (mkdir -m 700)"
            )

    def _beside(self, suffix: str) -> Path:
        return self.file.with_name(self.file.name + suffix)

    @property
    def lock(self) -> Path:
        """The lock that the server holds while it uses the file."""
        return self._beside(".lock")

    @property
    def token(self) -> Path:
        """The secret that clients show."""
        return self._beside(".token")

    @property
    def url(self) -> Path:
        """Where the server answers, while it runs."""
        return self._beside(".url")

    @property
    def reserve(self) -> Path:
        """The file that reserves space for the end of jobs on a full disk."""
        return self._beside(".reserve")

    def job(self, job: int) -> Path:
        """Return the folder of a job."""
        return self._beside(".d") / str(job)

    def log(self, job: int) -> Path:
        """Return the file with the output of a job's programs."""
        return self.job(job) / "log"

    def own(self, job: int) -> Path:
        """Return the folder that is the program's own: PGASDL_JOB_FOLDER."""
        return self.job(job) / "folder"

    def link(self, job: int) -> Path:
        """Return the file by which a job's program finds the server: PGASDL_JOB_LINK."""
        return self.job(job) / "link.json"

    def records(self, job: int) -> Path:
        """Return the folder of the flight records that its ranks leave: PGASDL_TRACE."""
        return self.job(job) / "records"

    def step(self, job: int, step: int) -> Path:
        """Return the folder of one of its supervisors."""
        return self.job(job) / f"step-{step}"


def regular_bytes(file: Path, offset: int = 0, most: int = 1 << 20) -> bytes:
    """Read from a byte on, or a negative number of the last ones.

    A pipe, which a job's program may have put there, is FileNotFoundError, too: it has no end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(file))
        return os.pread(
            descriptor, most, offset if offset >= 0 else max(0, status.st_size + offset)
        )
    finally:
        os.close(descriptor)


def inside(root: Path, path: str, field: str, *, base: Path | None = None) -> Path:
    """Resolve a path, and see that it lies under ``root``, which is resolved.

    JobError with status 422: ``..``, a symbolic link or an absolute path leads out.
    """
    try:
        found = (base or root).joinpath(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name too long
        raise refused(field, f"{path[:200]} cannot be resolved: {error}") from error
    if not found.is_relative_to(root):
        raise refused(field, f"{path[:200]} is not under the server's root {root}")
    return found


def folder_of(root: Path, folder: str) -> Path:
    """Return the folder of a request: it exists, and lies under the root."""
    found = inside(root, folder, "folder")
    if not os.path.isdir(found):  # which never raises
        raise refused("folder", f"there is no folder {found}")
    return found


def program_of(root: Path, folder: Path, program: tuple[str, ...]) -> list[str]:
    """Return the words of a program: its file exists under the root, and is named in full."""
    if program[0] == "-m":
        return list(program)
    found = inside(root, program[0], "program[0]", base=folder)
    if not os.path.exists(found):
        raise refused("program[0]", f"there is no program {found}")
    if os.path.isdir(found) and not os.path.exists(found / "__main__.py"):
        raise refused("program[0]", f"{found} is a folder without __main__.py")
    return [str(found), *program[1:]]
