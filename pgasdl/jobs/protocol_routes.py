"""Endpoints of jobs that train: commands and metrics for users, commands and reports for jobs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pgasdl.errors import JobError
from pgasdl.jobs import telemetry
from pgasdl.jobs.job import ACTIVE, State
from pgasdl.jobs.messages import COMMAND, NAME, REPORT, Command
from pgasdl.jobs.operations import ID, CheckedRequest, Operation
from pgasdl.jobs.requests import LARGEST
from pgasdl.jobs.schema import Schema, record
from pgasdl.jobs.store import Store

_WAIT = 10.0  # seconds until a question for commands is answered by none
_LOOK = 0.5  # seconds between two looks whether the server ends
_MOST_COMMANDS = 100  # of an answer
_MOST_POINTS = 10_000  # of a metric in an answer
_MOST_NAMES = 100

_NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST, "default": 0}
_COMMANDS = record({"commands": {"type": "array", "items": record({"id": ID, "command": COMMAND})}})
_METRICS: Schema = {
    "type": "object",
    "description": "Of each name: points of iteration, value (null: not finite) and time.",
    "additionalProperties": {
        "type": "array",
        "items": {"type": "array", "items": {"type": ["number", "null"]}},
    },
}


class Protocol:
    """The endpoints; ``reports`` counts reports by job since the server began.

    ``closing``: the server ends, so that answers that wait have to be given now.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.closing = False
        self.reports: Counter[int] = Counter()
        self._sent: dict[int, asyncio.Event] = {}  # jobs whose programs wait for commands

    def operations(self, job: str) -> tuple[Operation, ...]:
        """Return the rows of the table of operations."""
        name = {**NAME, "pattern": r"^([A-Za-z][A-Za-z0-9_./-]*)?$", "default": ""}
        query = {
            "name": name,
            "after": name,
            "first": _NUMBER,
            "points": {"type": "integer", "minimum": 1, "maximum": _MOST_POINTS, "default": 1000},
            "thinned": {"type": "string", "maxLength": 3, "enum": ("yes", "no"), "default": "yes"},
        }
        return (
            Operation(
                "POST", job + "/messages", "send", "Tell a job that runs a command.",
                self.send, record({"id": ID}), status=201, body=COMMAND, refusals=(409,),
            ),
            Operation(
                "GET", job + "/metrics", "metrics",
                "Metrics of a job, one or 100 whose names come after another, from an iteration "
                "on; at most so many points, evenly chosen or the first ones.",
                self.metrics, _METRICS, query=query,
            ),
            Operation(
                "GET", job + "/commands", "commands",
                "The commands to this run of a job; waits for the next. With the job's own secret.",
                self.commands, _COMMANDS, query={"after": _NUMBER},
            ),
            Operation(
                "POST", job + "/reports", "report",
                "Metrics and events of a job. With the job's own secret.",
                self.report, record({}), body=REPORT, refusals=(409,),
            ),
        )  # fmt: skip

    async def send(self, _: Request, call: CheckedRequest) -> Response:
        """Keep a command for the job."""
        command = Command.from_json(call.body)
        number = await run_in_threadpool(self._send, call.job, command)
        if sent := self._sent.pop(call.job, None):
            sent.set()
        return JSONResponse({"id": number}, 201)

    def _send(self, job: int, command: Command) -> int:
        state = self._store.job(job).state
        if state is not State.RUNNING:
            raise JobError(f"job {job} is {state}: commands are for one that runs", 409)
        with self._store.transaction() as database:
            return telemetry.note(database, job, "command", command.as_json())

    async def commands(self, request: Request, call: CheckedRequest) -> Response:
        """Wait for commands, and send them."""
        limit = time.monotonic() + _WAIT
        while True:
            # Made before the look: a command that is sent later sets this event.
            sent = self._sent.setdefault(call.job, asyncio.Event())
            if found := await run_in_threadpool(self._commands, call.job, call.query["after"]):
                return JSONResponse({"commands": found})
            while not sent.is_set():
                if self.closing or time.monotonic() > limit or await request.is_disconnected():
                    return JSONResponse({"commands": []})
                with suppress(TimeoutError):
                    await asyncio.wait_for(sent.wait(), _LOOK)

    def _commands(self, job: int, after: int) -> list[Any]:
        self._store.job(job)
        with self._store.reading() as database:
            return telemetry.commands(database, job, after, _MOST_COMMANDS)

    async def report(self, _: Request, call: CheckedRequest) -> Response:
        """Keep a job's report, all of it or nothing."""
        await run_in_threadpool(self._report, call.job, call.body)
        return JSONResponse({})

    def _report(self, job: int, report: dict[str, Any]) -> None:
        state = self._store.job(job).state
        if state not in ACTIVE:
            raise JobError(f"job {job} is {state}: what is left of it has nothing to say", 409)
        with self._store.transaction() as database:
            telemetry.add_metrics(database, job, report["metrics"])
            telemetry.keep_counters(database, job, report.get("ranks", []))
            for event in report["events"]:
                telemetry.note(database, job, "event", event)
            if report["dropped"]:
                text = f"the job had no room for {report['dropped']} messages"
                body = {"iteration": 0, "time": time.time(), "name": "dropped", "text": text}
                telemetry.note(database, job, "event", body)
        self.reports[job] += 1

    async def metrics(self, _: Request, call: CheckedRequest) -> Response:
        """Send metrics."""
        return JSONResponse(await run_in_threadpool(self._metrics, call.job, call.query))

    def _metrics(self, job: int, query: dict[str, Any]) -> dict[str, Any]:
        self._store.job(job)
        with self._store.reading() as database:
            chosen = [query["name"]] if query["name"] else None
            which = telemetry.thinned if query["thinned"] == "yes" else telemetry.points
            return {
                name: which(database, job, name, query["first"], query["points"])
                for name in chosen or telemetry.names(database, job, _MOST_NAMES, query["after"])
            }
