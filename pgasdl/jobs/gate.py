"""Who may ask: the name under which the server was found, the token, and how much is sent."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgasdl.errors import ConfigError, JobError
from pgasdl.jobs import secret
from pgasdl.jobs.assets import is_asset
from pgasdl.jobs.places import Places
from pgasdl.jobs.problems import problem
from pgasdl.jobs.requests import MOST_BYTES

OPEN_PATHS = ("/livez", "/readyz", "/openapi.json")  # tell nothing about jobs
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def token_of(file: Path) -> str:
    """Read the token from its file, which is made, with mode 0600, if there is none.

    Raises
    ------
    ConfigError
        Others can read the file, or it holds no token.
    """
    try:
        # Whole before it has its name: a client may read it at any time.
        new = file.with_name(file.name + ".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="ascii") as writing:
            writing.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(new, file)
        except FileExistsError:
            pass
        finally:
            new.unlink()
        mode = file.stat().st_mode & 0o777
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{file} has mode {mode:o}: others can read the token; chmod 600 {file}")
    if len(token) < 32:
        raise ConfigError(f"{file} holds no token of 32 characters or more; remove it")
    return token


class Gate:
    """Middleware: refuses what has no right to be answered, before anything else looks at it."""

    def __init__(self, app: ASGIApp, token: str, local: bool, places: Places) -> None:
        self._app = app
        self._places = places
        self._expected = f"Bearer {token}".encode()
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").encode("latin-1")
        job = secret.job_of(scope["path"])
        if job is None:
            known = hmac.compare_digest(given, self._expected)
        else:
            known = secret.is_of(self._places, job, given)
        if self._local and _host(headers.get("host", "")) not in _LOCAL_NAMES:
            # A page from elsewhere, whose name was made to mean this machine.
            answer = problem(421, "this server answers under the names of this machine only")
        elif not known and not _is_open(scope["path"]):
            answer = problem(401, headers={"WWW-Authenticate": "Bearer"})
        else:
            return await self._app(scope, _Counting(receive), send)
        await answer(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_asset(path)


class _Counting:
    """Hands on a body, and ends one that is longer than is read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > MOST_BYTES:
            raise JobError(f"the body is longer than {MOST_BYTES} bytes", 413)
        return message


def _host(header: str) -> str:
    """Return the name in a Host header, without the port; "" if it makes no sense."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
