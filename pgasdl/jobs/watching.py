"""Endpoints for users who watch: events, ranks' counters, and flight records of failed jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pgasdl import openmetrics
from pgasdl.jobs import telemetry
from pgasdl.jobs.job import ENDED, JobRow
from pgasdl.jobs.messages import COUNTERS, RankCounters
from pgasdl.jobs.operations import ID, CheckedRequest, Operation
from pgasdl.jobs.places import Places, regular_bytes
from pgasdl.jobs.protocol_routes import Protocol
from pgasdl.jobs.requests import LARGEST, MOST_RANKS
from pgasdl.jobs.schema import Schema
from pgasdl.jobs.store import Store

MEDIA_TYPE = "text/event-stream"
_HEARTBEAT = 10.0  # seconds of silence, at most


def message(kind: str, document: dict[str, Any], number: int | None = None) -> str:
    """Return an event as it is sent."""
    name = "" if number is None else f"id: {number}\n"
    return f"{name}event: {kind}\ndata: {json.dumps(document)}\n\n"


def stream(
    news: Callable[[], tuple[Iterable[str], bool]], closing: Callable[[], bool], every: float
) -> StreamingResponse:
    """Answer with the events that ``news`` returns, called in a thread every so many seconds.

    It returns the events since its last call, and whether these were the last ones of all.
    ``closing`` : whether the server ends
    """

    async def events() -> AsyncIterator[str]:
        spoke = time.monotonic()
        while not closing():
            found, over = await run_in_threadpool(news)
            for each in found:
                spoke = time.monotonic()
                yield each
            if over:
                return
            if time.monotonic() > spoke + _HEARTBEAT:
                spoke = time.monotonic()
                yield ":\n\n"
            await asyncio.sleep(every)

    return StreamingResponse(events(), 200, {"Cache-Control": "no-store"}, MEDIA_TYPE)


_LOOK = 0.2  # seconds between two looks at a job that is followed
_LOOK_AT_ALL = 0.5  # seconds between two looks at all jobs
_MOST_EVENTS = 1000
_MOST_NAMES = 100  # of metrics
_MOST_RANKS = 64  # of an answer
_MOST_RECORD_BYTES = 1 << 16  # of each, its end

_AFTER = {"after": {"type": "integer", "minimum": 0, "maximum": LARGEST, "default": 0}}


def _record(**fields: Schema) -> Schema:
    return {"type": "object", "required": list(fields), "properties": fields}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_TEXT: Schema = {"type": "string"}
_TIME: Schema = {"type": "number", "description": "Seconds since 1970."}
_HISTORY = _record(
    events=_list_of(_record(id=ID, time=_TIME, event=_TEXT)),
    log={"type": "integer", "description": "The bytes that there are."},
)
_RANKS = _record(ranks=_list_of(COUNTERS))
_RECORDS = _record(records=_list_of(_record(name=_TEXT, time=_TIME, text=_TEXT)))


class Watching:
    """The endpoints."""

    def __init__(self, store: Store, protocol: Protocol, places: Places, slots: int) -> None:
        self._store = store
        self._protocol = protocol
        self._places = places
        self._slots = slots

    def operations(self, job: str) -> tuple[Operation, ...]:
        """Return the rows of the table of operations."""
        ranks = {
            "first": {"type": "integer", "minimum": 0, "maximum": MOST_RANKS, "default": 0},
            "limit": {
                "type": "integer", "minimum": 1, "maximum": _MOST_RANKS, "default": _MOST_RANKS,
            },
        }  # fmt: skip
        return (
            Operation(
                "GET", job + "/events", "events",
                "What happened and happens to it, until it ends: server-sent events `state`, "
                "`command`, `event`, `log` (bytes that there are) and `end`.",
                self.events, MEDIA_TYPE, query=_AFTER,
            ),
            Operation(
                "GET", job + "/history", "history", "The last things that happened to it.",
                self.history, _HISTORY,
            ),
            Operation(
                "GET", job + "/ranks", "ranks", "What its ranks counted last, from a rank on.",
                self.ranks, _RANKS, query=ranks,
            ),
            Operation(
                "GET", job + "/records", "records",
                "The flight records that its ranks left: their last operations before they failed.",
                self.records, _RECORDS,
            ),
            Operation(
                "GET", "/api/v1/events", "watch",
                "What happens to all jobs from now on: server-sent events `now`, then `state`, "
                "`command` and `event`, and `news` of jobs that run: how many reports came, and "
                "the bytes of the log.",
                self.watch, MEDIA_TYPE,
            ),
            Operation(
                "GET", "/metrics", "openmetrics", "Jobs and counters, for Prometheus.",
                self.openmetrics, openmetrics.MEDIA_TYPE.partition(";")[0],
            ),
        )  # fmt: skip

    async def events(self, _: Request, call: CheckedRequest) -> Response:
        """Send what happens to a job, as it happens."""
        await run_in_threadpool(self._store.job, call.job)  # 404 before anything is sent
        after, told = call.query["after"], -1

        def news() -> tuple[list[str], bool]:
            nonlocal after, told
            # The state is read first: a job that has ended gets no more events or output.
            ended = self._store.job(call.job).state in ENDED
            found = []
            for event in self._store.events(call.job, after):
                after = event.id
                found.append(message(event.kind, event.as_json(), event.id))
            if (size := self._log_size(call.job)) != told:
                told = size
                found.append(message("log", {"size": size}))
            return found + [message("end", {})] * ended, ended

        return stream(news, lambda: self._protocol.closing, _LOOK)

    async def watch(self, _: Request, __: CheckedRequest) -> Response:
        """Send what happens to all jobs from now on."""
        after = await run_in_threadpool(self._store.last_event)
        told: dict[int, dict[str, int]] = {}
        first = [message("now", {})]

        def news() -> tuple[list[str], bool]:
            nonlocal after, told
            found, running = first[:], self._store.active()
            first.clear()
            for event in self._store.events_of_all(after):
                after = event.id
                found.append(message(event.kind, {"job": event.job, **event.as_json()}, event.id))
            fresh = {job.id: self._news_of(job) for job in running}
            found += [message("news", fresh[job]) for job in fresh if fresh[job] != told.get(job)]
            told = fresh
            return found, False

        return stream(news, lambda: self._protocol.closing, _LOOK_AT_ALL)

    def _news_of(self, job: JobRow) -> dict[str, int]:
        reports, size = self._protocol.reports[job.id], self._log_size(job.id)
        return {"job": job.id, "reports": reports, "size": size}

    def _log_size(self, job: int) -> int:
        log = self._places.log(job)
        return log.stat().st_size if log.exists() else 0

    async def history(self, _: Request, call: CheckedRequest) -> Response:
        """Send what happened to a job."""
        await run_in_threadpool(self._store.job, call.job)
        found = await run_in_threadpool(self._store.last_events, call.job, _MOST_EVENTS)
        events = [{"id": each.id, "event": each.kind, **each.as_json()} for each in found]
        log = await run_in_threadpool(self._log_size, call.job)
        return JSONResponse({"events": events, "log": log})

    async def ranks(self, _: Request, call: CheckedRequest) -> Response:
        """Send what ranks counted."""
        return JSONResponse({"ranks": await run_in_threadpool(self._ranks, call)})

    def _ranks(self, call: CheckedRequest) -> list[Any]:
        self._store.job(call.job)
        with self._store.reading() as database:
            return telemetry.counters(database, call.job, call.query["first"], call.query["limit"])

    async def records(self, _: Request, call: CheckedRequest) -> Response:
        """Send flight records."""
        await run_in_threadpool(self._store.job, call.job)
        found = await run_in_threadpool(lambda: list(_records(self._places.records(call.job))))
        return JSONResponse({"records": found})

    async def openmetrics(self, _: Request, __: CheckedRequest) -> Response:
        """Send jobs, and the counters of those that run."""
        text = await run_in_threadpool(self._openmetrics)
        return Response(text, media_type=openmetrics.MEDIA_TYPE)

    def _openmetrics(self) -> str:
        running = self._store.active()
        with self._store.reading() as database:
            states = telemetry.states(database)
            ranks = [
                (job.id, RankCounters.from_json(record))
                for job in running
                for record in telemetry.counters(database, job.id, 0, MOST_RANKS)
            ]
            metrics: list[openmetrics.Sample] = [
                ({"job_id": job.id, "name": name}, value)
                for job in running
                for name in telemetry.names(database, job.id, _MOST_NAMES)
                if (value := telemetry.last(database, job.id, name)[1]) is not None
            ]
        labelled: list[tuple[openmetrics.Labels, RankCounters]] = [
            ({"job_id": job, "rank": each.rank}, each) for job, each in ranks
        ]
        return "".join((
            openmetrics.gauge("jobs", "Jobs by state.", (
                ({"state": state}, number) for state, number in states
            )),
            openmetrics.gauge("slots", "Ranks that may run at once.", [({}, self._slots)]),
            openmetrics.gauge("job_metric", "What a job that runs told last.", metrics),
            openmetrics.gauge("rank_iteration", "Iteration of a rank.", (
                (labels, each.iteration) for labels, each in labelled
            )),
            openmetrics.gauge("rank_resident_memory_bytes", "Memory of a rank's process.", (
                (labels, each.memory) for labels, each in labelled
            )),
            openmetrics.counted([(labels, each.counters) for labels, each in labelled]),
            openmetrics.END,
        ))  # fmt: skip


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the ends of the newest files."""
    files = [(file.stat().st_mtime, file) for file in folder.glob("*.txt") if file.is_file()]
    for moment, file in sorted(files)[-_MOST_RANKS:]:
        with contextlib.suppress(OSError):
            text = regular_bytes(file, -_MOST_RECORD_BYTES, _MOST_RECORD_BYTES)
            yield {"name": file.name, "time": moment, "text": text.decode(errors="replace")}
