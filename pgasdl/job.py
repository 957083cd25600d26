"""The job of a context: an interface that start-up implements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pgasdl import _native


class Job(Protocol):
    """Kept by start-up for a context; :class:`pgasdl.runtime.job.StartedJob` implements it."""

    threads: _native.LoopbackWorld | None
    mpi: _native.MpiWorld | None
    survivable: bool  # ranks may go on after a loss

    @property
    def token(self) -> bytes:
        """A secret of the ranks of this job."""
        ...

    def exchange(self, key: str, value: bytes) -> list[bytes]:
        """Return every rank's ``value``, by rank. Collective."""
        ...

    def form(
        self, context: _native.ContextCore, members: tuple[int, ...], limit: float
    ) -> _native.GroupCore:
        """Set up a group of ``members``, in ascending order, all reachable."""
        ...

    def give_up(self, members: tuple[int, ...]) -> None:
        """Let the next group of ``members`` be another one than the one that was not completed."""
        ...

    def accept(self, lost: Iterable[int]) -> None:
        """Allow groups although these ranks are lost."""
        ...

    def report(self, context: _native.ContextCore, error: BaseException) -> None:
        """Report the error that ends this rank."""
        ...

    def dump(self, context: _native.ContextCore, reason: str) -> None:
        """Write the flight record."""
        ...

    def leave(self, context: _native.ContextCore, patience: float) -> None:
        """Leave the job: the context is closed. Let others leave first, for so many seconds."""
        ...
