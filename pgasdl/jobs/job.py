"""A job: its states, the changes between them, and the document that clients get."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pgasdl.jobs.requests import LARGEST, REQUEST, JobRequest
from pgasdl.jobs.schema import Schema, record


class State(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    STAGING = "staging"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


# In these states processes of the job may run; it holds its slots.
ACTIVE = (State.STAGING, State.RUNNING, State.STOPPING)
ENDED = (State.DONE, State.FAILED, State.STOPPED, State.LOST)

# A job goes back to the queue if it is started again, or if the server ended before its start.
NEXT: dict[State, tuple[State, ...]] = {
    State.QUEUED: (State.STAGING, State.RUNNING, State.STOPPED, State.FAILED),
    State.STAGING: (State.RUNNING, State.STOPPING, State.QUEUED, *ENDED),
    State.RUNNING: (State.STOPPING, State.QUEUED, *ENDED),
    State.STOPPING: ENDED,
    **dict.fromkeys(ENDED, (State.QUEUED,)),
}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of the table of jobs. Times are seconds since 1970."""

    id: int  # from 1
    state: State
    reason: str  # for people: why it is in this state
    status: int | None  # exit status of its program, 128 + the signal's number if it was killed
    submitted: float
    queued: float  # its turn in the queue: the lowest is the first
    started: float | None  # the last time
    ended: float | None
    step: int  # number of its supervisor; each start of ``pgasdl stage`` or ``run`` has one
    restarts_left: int  # after a failure
    request: JobRequest

    def as_json(self) -> dict[str, Any]:
        """Return the document that clients get: :data:`JOB`."""
        return {
            "id": self.id,
            "name": self.request.title(),
            "state": str(self.state),
            "reason": self.reason,
            "status": self.status,
            "submitted": self.submitted,
            "started": self.started,
            "ended": self.ended,
            "restarts_left": self.restarts_left,
            "request": self.request.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job: a new "state" and why, a "command", the job's "event"."""

    id: int
    job: int
    time: float
    kind: str
    body: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the document that clients get."""
        return {"time": self.time, **self.body}


_TIME: Schema = {"type": ["number", "null"], "description": "Seconds since 1970."}
JOB = record(
    {
        "id": {"type": "integer", "minimum": 1, "maximum": LARGEST},
        "name": {"type": "string"},
        "state": {"type": "string", "enum": [str(state) for state in State]},
        "reason": {"type": "string"},
        "status": {
            "type": ["integer", "null"],
            "description": "Exit status, 128 + the signal's number if it was killed.",
        },
        "submitted": _TIME,
        "started": _TIME,
        "ended": _TIME,
        "restarts_left": {"type": "integer"},
        "request": REQUEST,
    }
)
