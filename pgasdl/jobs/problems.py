"""Errors as answers: documents of RFC 9457, ``application/problem+json``."""

from __future__ import annotations

import errno
import logging
import sqlite3
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from pgasdl.errors import JobError
from pgasdl.jobs.schema import record

_LOG = logging.getLogger("pgasdl.jobs")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

MEDIA_TYPE = "application/problem+json"
PROBLEM = record(
    {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "field": {"type": "string", "description": 'Which one is wrong, as in "stage.local".'},
    }
)


def problem(
    status: int, detail: str = "", field: str = "", headers: dict[str, str] | None = None
) -> JSONResponse:
    """Make the answer of an error."""
    title = HTTPStatus(status).phrase
    document = {"title": title, "status": status, "detail": detail or title, "field": field}
    return JSONResponse(document, status, headers, MEDIA_TYPE)


def of_job(_: Request, error: Exception) -> JSONResponse:
    """Answer a :class:`~pgasdl.errors.JobError`."""
    assert isinstance(error, JobError)
    return problem(error.status, str(error), error.field)


def of_http(_: Request, error: Exception) -> JSONResponse:
    """Answer a refusal of Starlette: no such path, or no such method."""
    assert isinstance(error, HTTPException)
    return problem(error.status_code, headers=dict(error.headers or {}))


def of_storage(_: Request, error: Exception) -> JSONResponse:
    """Answer that the server's file cannot be written or read."""
    _LOG.error("the server's file: %s", error)
    is_full = getattr(error, "errno", 0) in _FULL
    is_full |= getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE_FULL
    return problem(507 if is_full else 500, f"the server's file cannot be used: {error}")


def of_fault(_: Request, error: Exception) -> JSONResponse:
    """Answer a fault of the server; the traceback goes to its log."""
    return problem(500, f"a fault of the server: {type(error).__name__}")


HANDLERS = {
    JobError: of_job,
    HTTPException: of_http,
    sqlite3.Error: of_storage,
    OSError: of_storage,
    Exception: of_fault,
}
