"""The right to ask: the host name in the request, the token, and the size of the body."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgasdl.errors import ConfigError, JobError
from pgasdl.jobs import proof, secret
from pgasdl.jobs.assets import is_asset
from pgasdl.jobs.places import Places
from pgasdl.jobs.problems import problem
from pgasdl.jobs.requests import MOST_BYTES

OPEN_PATHS = ("/livez", "/readyz", "/openapi.json")  # they say nothing about jobs


def token_of(file: Path) -> str:
    """Read the token from its file, which is made, with mode 0600, if there is none.

    ConfigError: others can read the file, or it holds no token.
    """
    try:
        # The file is whole before it gets its name: a client may read it at any time.
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
    """Middleware: refuses requests without the right to an answer, before others see them."""

    def __init__(self, app: ASGIApp, token: str, local: bool, places: Places) -> None:
        self._app = app
        self._places = places
        self._token = token
        self._local = local
        self._challenges = proof.Challenges()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("authorization", "")
        job = secret.job_of(scope["path"])
        key = self._token if job is None else secret.of(self._places, job)
        if signed := proof.Signed.read(given):
            target = b"?".join(filter(None, (scope["raw_path"], scope["query_string"])))
            known = signed.is_by(key, scope["method"], target.decode("latin-1"))
            known = known and self._challenges.meets(signed)
            send = _signing(send, signed, key, self._challenges.now)
        else:
            known = hmac.compare_digest(given.encode(), f"Bearer {key}".encode())
        if self._local and not _is_local(headers.get("host", "")):
            # A page from elsewhere whose host name was pointed at this machine (DNS rebinding).
            answer = problem(421, "this server answers under the names of this machine only")
        elif not known and not _is_open(scope["path"]):
            answer = problem(401, headers={"WWW-Authenticate": "Bearer"})
        else:
            return await self._app(scope, _Body(receive, signed), send)
        await answer(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or is_asset(path)


class _Body:
    """Hands on a body, unless it is too long or differs from the signed one."""

    def __init__(self, receive: Receive, signed: proof.Signed | None) -> None:
        self._receive = receive
        self._signed = signed
        self._read = b""

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += message.get("body", b"")
        if len(self._read) > MOST_BYTES:
            raise JobError(f"the body is longer than {MOST_BYTES} bytes", 413)
        is_whole = message["type"] == "http.request" and not message.get("more_body")
        if is_whole and self._signed and proof.digest(self._read) != self._signed.digest:
            raise JobError("the body is not the one that was signed", 401)
        return message


def _signing(send: Send, request: proof.Signed, key: str, challenge: str) -> Send:
    """Sign an answer."""
    start: Message | None = None

    async def signed(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            body = message.get("body", b"")
            what = proof.STREAM if message.get("more_body") else proof.digest(body)
            told = request.answer(key, challenge, start["status"], what)
            header = proof.HEADER.encode(), told.encode()
            await send({**start, "headers": [*start["headers"], header]})
            start = None
        await send(message)

    return signed


def _is_local(header: str) -> bool:
    """Whether a Host header names this machine by a name that others cannot redirect to it."""
    try:
        host = urlsplit(f"//{header}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
