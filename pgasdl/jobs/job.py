"""A job: its states, what leads from one to the next, and what clients see of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pgasdl.jobs.requests import LARGEST, REQUEST, JobRequest
from pgasdl.jobs.schema import Schema


class State(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    STAGING = "staging"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


# Processes may run; they hold the job's slots.
ACTIVE = (State.STAGING, State.RUNNING, State.STOPPING)
ENDED = (State.DONE, State.FAILED, State.STOPPED, State.LOST)

# Back to the queue: started again, or the server ended before it could start.
NEXT: dict[State, tuple[State, ...]] = {
    State.QUEUED: (State.STAGING, State.RUNNING, State.STOPPED, State.FAILED),
    State.STAGING: (State.RUNNING, State.STOPPING, State.QUEUED, *ENDED),
    State.RUNNING: (State.STOPPING, State.QUEUED, *ENDED),
    State.STOPPING: ENDED,
    **dict.fromkeys(ENDED, (State.QUEUED,)),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table of jobs.

    Attributes
    ----------
    id : int
        From 1.
    state : State
        Where it is.
    reason : str
        Why it is there, for people.
    status : int or None
        Exit status of its program, 128 + the signal's number if it was killed.
    submitted, started, ended : float or None
        Seconds since 1970: of the request, of its last start, of its end.
    queued : float
        Its present turn in the queue: the lowest is the first.
    step : int
        Number of its present supervisor; each start of ``pgasdl stage`` or ``run`` has one.
    restarts_left : int
        How often it is started again if it fails.
    request : JobRequest
        What its user asked for.
    """

    id: int
    state: State
    reason: str
    status: int | None
    submitted: float
    queued: float
    started: float | None
    ended: float | None
    step: int
    restarts_left: int
    request: JobRequest

    def as_json(self) -> dict[str, Any]:
        """Return what clients see: :data:`JOB`."""
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
        """Return what clients see."""
        return {"time": self.time, **self.body}


_TIME: Schema = {"type": ["number", "null"], "description": "Seconds since 1970."}
JOB: Schema = {
    "type": "object",
    "properties": {
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
    },
}
JOB = {**JOB, "required": list(JOB["properties"]), "additionalProperties": False}
