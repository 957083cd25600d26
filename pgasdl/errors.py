"""Every exception pgasdl raises, each with what it means and what the caller can do.

All derive from :class:`PgasError`, and from the builtin that comes nearest, so that code which
knows nothing of pgasdl (``except TimeoutError``) still does the right thing.
"""

from __future__ import annotations


class PgasError(Exception):
    """Base of all exceptions of pgasdl."""


class Timeout(PgasError, TimeoutError):
    """The deadline passed.

    A posting call has posted nothing; a collective is continued by calling it again with the same
    arguments.
    """


class QueueFull(PgasError):
    """The queue holds ``limits.queue_depth`` requests: ``wait(queue)``, then post again."""


class PeerLost(PgasError, ConnectionError):
    """A rank died, was stopped for too long, or left.

    Attributes
    ----------
    rank : int
        The rank that was lost; of several that the message names the first, -1 if unknown.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RankError(PgasError, ValueError):
    """No such rank, or not a member of the group."""


class SegmentError(PgasError, ValueError):
    """No such segment, it was deleted, or a slice leaves it."""


class AlignmentError(PgasError, ValueError):
    """An atomic's target is not a multiple of 8 bytes."""


class NotificationError(PgasError, ValueError):
    """A notification id out of range, or the value 0, which means "not raised"."""


class QueueError(PgasError, ValueError):
    """No such queue, or no more queues available."""


class BufferRefused(PgasError, ValueError):
    """An array that is strided, read-only, or of the wrong dtype or size. Nothing was copied."""


class ClosedError(PgasError, RuntimeError):
    """The context was closed, belongs to the parent of this forked process, or exists twice."""


class ConfigError(PgasError, ValueError):
    """A ``PGASDL_*`` variable or an argument of ``init`` that cannot be right."""


class BootstrapError(PgasError, RuntimeError):
    """The ranks could not find each other, or one could not prove that it belongs to the job."""


class MismatchError(PgasError, RuntimeError):
    """The ranks disagree on a collective: its order, size, dtype or layer list."""


class PlanError(PgasError, ValueError):
    """A plan that cannot be right, or that the transport cannot run."""


class UnavailableError(PgasError, RuntimeError):
    """A transport or feature that is not available here; the message gives the reason."""
