"""Every exception that pgasdl raises, its meaning, and the caller's remedy.

Each derives from :class:`PgasError` and from the nearest builtin, so that code which does not know
pgasdl (``except TimeoutError``) handles it correctly. Names end in Error, as PEP 8 wants; those of
before 0.2 name the same classes, with a DeprecationWarning.
"""

from __future__ import annotations

import warnings

# Python has a TimeoutError, which a name of ours must not hide.
RENAMED = {
    "BufferRefused": "BufferRefusedError",
    "PeerLost": "PeerLostError",
    "PoolFull": "PoolFullError",
    "QueueFull": "QueueFullError",
    "Timeout": "PgasTimeoutError",
}


def __getattr__(name: str) -> type[PgasError]:
    return of_old_name(name, __name__)


def of_old_name(name: str, module: str) -> type[PgasError]:
    """Return the class that had a name before 0.2, and warn the caller of its caller."""
    if name not in RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = RENAMED[name]
    warnings.warn(f"{module}.{name} is {module}.{new} now", DeprecationWarning, stacklevel=3)
    found: type[PgasError] = globals()[new]
    return found


class PgasError(Exception):
    """Base of all exceptions of pgasdl."""


class PgasTimeoutError(PgasError, TimeoutError):
    """The deadline passed.

    A call that posts has posted nothing. To continue a collective, call it again with the same
    arguments.
    """


class QueueFullError(PgasError):
    """The queue holds ``limits.queue_depth`` requests: ``wait(queue)``, then post again."""


class PeerLostError(PgasError, ConnectionError):
    """A rank died, was stopped for too long, or left; or it aborted what this rank waits for.

    Attributes
    ----------
    rank : int
        The lost rank; the first if the message names several, -1 if unknown.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RankError(PgasError, ValueError):
    """No such rank, or not a member of the group."""


class SegmentError(PgasError, ValueError):
    """No such segment, a deleted segment, or a slice outside of it."""


class AlignmentError(PgasError, ValueError):
    """An atomic's target is not a multiple of 8 bytes."""


class NotificationError(PgasError, ValueError):
    """A notification id out of range, or the value 0, which stands for "not raised"."""


class PoolFullError(PgasError, MemoryError):
    """The pool has no free block so long, or there is none: ``ctx.pool(nbytes)`` on every rank."""


class QueueError(PgasError, ValueError):
    """No such queue, or no more queues available."""


class BufferRefusedError(PgasError, ValueError):
    """An array that is strided, read-only, or of the wrong dtype or size. Nothing was copied."""


class ClosedError(PgasError, RuntimeError):
    """A closed context, a context of this forked process's parent, or a second context."""


class ConfigError(PgasError, ValueError):
    """A wrong ``PGASDL_*`` variable or argument of ``init``."""


class BootstrapError(PgasError, RuntimeError):
    """The ranks could not find each other, or one could not prove that it belongs to the job."""


class MismatchError(PgasError, RuntimeError):
    """The ranks disagree on a collective: its order, size, dtype or layer list."""


class PlanError(PgasError, ValueError):
    """A wrong plan, or one that the transport cannot run."""


class LayoutError(PgasError, ValueError):
    """Blocks that do not cover a matrix, or overlap; or matrices that do not fit together."""


class DataError(PgasError, ValueError):
    """A data set that is damaged, cut, missing or not of one kind, or whose storage fails."""


class CheckpointError(PgasError, ValueError):
    """A checkpoint is damaged, cannot be read, or could not be written by all of its ranks."""


class JobError(PgasError, RuntimeError):
    """The job server refused a request, or cannot be reached.

    Attributes
    ----------
    status : int
        That of HTTP, such as 404 (no such job) or 409 (not in this state); 0: no answer came.
    field : str
        The field of the request that is wrong, as in "stage.local"; "" if it is none.
    """

    def __init__(self, message: str, status: int = 0, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class UnavailableError(PgasError, RuntimeError):
    """A transport or feature that is not available here; the message gives the reason."""
