"""The operations of the server's interface: one table for routes, checks and /openapi.json."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pgasdl.errors import JobError
from pgasdl.jobs.requests import LARGEST
from pgasdl.jobs.schema import Schema, check, refused

ID: Schema = {"type": "integer", "minimum": 1, "maximum": LARGEST}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    name: str
    summary: str
    endpoint: Callable[[Request, CheckedRequest], Awaitable[Response]]
    answer: Schema | str  # the schema of a JSON document, or the media type of something else
    status: int = 200
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    refusals: tuple[int, ...] = ()  # statuses of its own, beside those that any request may get
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """The checked parts of a request."""

    job: int  # the id in the path; 0: there is none
    query: dict[str, Any]  # parameters, with defaults
    body: Any  # the document


async def read(request: Request, operation: Operation) -> CheckedRequest:
    """Check a request; JobError says what is wrong."""
    job = int(request.path_params.get("id", 0))
    if "id" in request.path_params and not 1 <= job <= LARGEST:
        raise JobError(f"there is no job {job}", 404)
    query = _query(request, operation.query)
    body = None
    if operation.body is not None:
        body = await _document(request)
        check(body, operation.body)
    elif operation.method == "POST" and await request.body():
        raise refused("", "this operation takes no body")
    return CheckedRequest(job, query, body)


def _query(request: Request, known: Mapping[str, Schema]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name not in known:
            raise refused(name[:100], f"unknown parameter; there are {', '.join(known) or 'none'}")
        if name in found:
            raise refused(name, "given twice")
        number = known[name]["type"] == "integer" and re.fullmatch("[0-9]{1,16}", text)
        found[name] = int(text) if number else text
        check(found[name], known[name], name)
    return {name: schema["default"] for name, schema in known.items()} | found


async def _document(request: Request) -> object:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise JobError("the body has to be application/json", 415)
    body = await request.body()
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise JobError(f"the body is no JSON: {error}", 400) from error
    found: object = value
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number")
