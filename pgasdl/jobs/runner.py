"""The interface of a place where jobs run, for the scheduler; ``local`` is this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pgasdl.jobs.job import JobRow

Kind = Literal["stage", "run"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step."""

    kind: Kind
    status: int | None  # 128 + the signal's number if it was killed; None: it did not start
    stopped: bool  # it was asked to stop before it ended
    reason: str  # an error beside the program's own status, or ""
    ended: float  # seconds since 1970
    last: str = ""  # what its program wrote last, if it failed

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StepEnd:
        """Read the document that a supervisor wrote."""
        return cls(**document)


@dataclass(frozen=True, slots=True)
class Lost:
    """A step that ended without an outcome."""

    reason: str


# The state of a step, as far as it is known.
Look = StepEnd | Lost | Literal["runs", "never began"]


class Runner(Protocol):
    """A place where jobs run; ``resources`` are those of a request that it knows.

    All but ``watch`` return at once.
    """

    resources: frozenset[str]

    def lay_out(self, job: JobRow, kind: Kind) -> None:
        """Make the folder of a step, before it is written down that it runs; raises as start."""
        ...

    def start(self, job: JobRow, kind: Kind) -> None:
        """Start the present step of a job.

        OSError: it cannot be started here. JobError: its folder or program is not there any more,
        or the place refuses it. UnavailableError: the place does not answer; ``look`` says whether
        it began.
        """
        ...

    def look(self, job: JobRow) -> Look:
        """Return the state of the present step; UnavailableError: the place does not answer."""
        ...

    def stop(self, job: JobRow) -> None:
        """Ask the present step to end; asking again changes nothing."""
        ...

    def watch(self, job: JobRow, ended: Callable[[], None]) -> None:
        """Call ``ended`` from a thread when the present step has ended; once for each step."""
        ...
