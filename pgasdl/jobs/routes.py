"""The endpoints of the server's operations, and the table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pgasdl.errors import JobError
from pgasdl.jobs import openapi
from pgasdl.jobs.job import JOB, JobRow, State
from pgasdl.jobs.operations import ID, CheckedRequest, Operation
from pgasdl.jobs.places import Places, folder_of, inside, program_of, regular_bytes
from pgasdl.jobs.protocol_routes import Protocol
from pgasdl.jobs.requests import LARGEST, MOST_ROWS, REQUEST, JobRequest
from pgasdl.jobs.scheduler import Scheduler
from pgasdl.jobs.schema import record
from pgasdl.jobs.store import Store
from pgasdl.jobs.watching import Watching

_MOST_LOG_BYTES = 1 << 20  # of an answer

_ANY_STATE = ("", *(str(state) for state in State))
_STATUS = record({"status": {"type": "string"}})
_PAGE = record(
    {
        "jobs": {"type": "array", "items": JOB},
        "next": {"type": ["integer", "null"], "description": "`before` of the next page."},
    }
)


class Service:
    """The endpoints."""

    def __init__(self, store: Store, scheduler: Scheduler, places: Places, root: Path) -> None:
        self._store = store
        self._scheduler = scheduler
        self._places = places
        self._root = root
        self.protocol = Protocol(store)
        self._watching = Watching(store, self.protocol, places, scheduler.slots)
        self.operations = self._operations()
        self._description = openapi.document(self.operations)

    def _operations(self) -> tuple[Operation, ...]:
        job = "/api/v1/jobs/{id:int}"
        page = {
            "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": 100},
            "before": {**ID, "default": LARGEST},
            "state": {"type": "string", "maxLength": 16, "enum": _ANY_STATE, "default": ""},
        }
        offset = {"offset": {"type": "integer", "minimum": 0, "maximum": LARGEST, "default": 0}}
        return (
            Operation(
                "POST", "/api/v1/jobs", "submit", "Put a job into the queue.",
                self.submit, JOB, status=201, body=REQUEST,
            ),
            Operation(
                "GET", "/api/v1/jobs", "list", "List jobs, the newest first.",
                self.page, _PAGE, query=page,
            ),
            Operation("GET", job, "show", "Show a job.", self.show, JOB),
            Operation(
                "POST", job + "/stop", "stop", "End a job: SIGTERM, after its grace SIGKILL.",
                self.stop, JOB, refusals=(409,),
            ),
            Operation(
                "POST", job + "/restart", "restart", "Run a job that has ended once more.",
                self.restart, JOB, refusals=(409,),
            ),
            Operation(
                "GET", job + "/log", "log", "What its programs wrote, from a byte on.",
                self.log, "application/octet-stream", query=offset,
            ),
            *self.protocol.operations(job),
            *self._watching.operations(job),
            Operation("GET", "/livez", "livez", "It answers.", self.livez, _STATUS, is_open=True),
            Operation(
                "GET", "/readyz", "readyz", "It starts and ends jobs.",
                self.readyz, _STATUS, is_open=True, refusals=(503,),
            ),
            Operation(
                "GET", "/openapi.json", "openapi", "This interface.",
                self.openapi, {"type": "object"}, is_open=True,
            ),
        )  # fmt: skip

    async def submit(self, _: Request, call: CheckedRequest) -> Response:
        """Put a job into the queue."""
        job = await run_in_threadpool(self._submit, call.body)
        return JSONResponse(job.as_json(), 201, {"Location": f"/api/v1/jobs/{job.id}"})

    def _submit(self, document: object) -> JobRow:
        request = JobRequest.from_json(document)
        self._scheduler.accept(request)
        folder = folder_of(self._root, request.folder)
        program_of(self._root, folder, request.program)
        if request.stage is not None:
            inside(self._root, request.stage.local, "stage.local", base=folder)
        job = self._store.add(request)
        self._scheduler.wake()
        return job

    async def page(self, _: Request, call: CheckedRequest) -> Response:
        """List jobs by pages."""
        limit, before, state = (call.query[name] for name in ("limit", "before", "state"))
        jobs = await run_in_threadpool(self._store.newest, limit, before, state)
        following = jobs[-1].id if len(jobs) == limit and jobs[-1].id > 1 else None
        return JSONResponse({"jobs": [job.as_json() for job in jobs], "next": following})

    async def show(self, _: Request, call: CheckedRequest) -> Response:
        """Show a job."""
        return JSONResponse((await run_in_threadpool(self._store.job, call.job)).as_json())

    async def stop(self, _: Request, call: CheckedRequest) -> Response:
        """Ask for a job's end."""
        return await self._changed(self._store.stop, call.job)

    async def restart(self, _: Request, call: CheckedRequest) -> Response:
        """Put a job that has ended into the queue."""
        return await self._changed(self._store.restart, call.job)

    async def _changed(self, change: Any, job: int) -> Response:
        changed = await run_in_threadpool(change, job)
        self._scheduler.wake(job)
        return JSONResponse(changed.as_json())

    async def log(self, _: Request, call: CheckedRequest) -> Response:
        """Send a part of a job's log, at most 1 MiB."""
        await run_in_threadpool(self._store.job, call.job)
        data = await run_in_threadpool(_read_from, self._places.log(call.job), call.query["offset"])
        return Response(data, media_type="application/octet-stream")

    async def livez(self, _: Request, __: CheckedRequest) -> Response:
        """Answer."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, _: Request, __: CheckedRequest) -> Response:
        """Say whether jobs start and end."""
        if trouble := self._scheduler.trouble:
            raise JobError(trouble, 503)
        return JSONResponse({"status": "ready"})

    async def openapi(self, _: Request, __: CheckedRequest) -> Response:
        """Describe the interface."""
        return JSONResponse(self._description)


def _read_from(log: Path, offset: int) -> bytes:
    try:
        return regular_bytes(log, offset, _MOST_LOG_BYTES)
    except FileNotFoundError:
        return b""
