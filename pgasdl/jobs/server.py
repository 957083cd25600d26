"""The server: its socket, its application, its start and its end."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pgasdl.errors import ConfigError
from pgasdl.jobs import assets, problems
from pgasdl.jobs.gate import Gate, token_of
from pgasdl.jobs.local import LocalRunner
from pgasdl.jobs.operations import Operation, read
from pgasdl.jobs.places import Places
from pgasdl.jobs.routes import Service
from pgasdl.jobs.scheduler import Scheduler
from pgasdl.jobs.slurm import SlurmRunner
from pgasdl.jobs.store import Store

_FAREWELL = 3  # seconds for answers that are under way when the server ends
_PATIENCE = 10.0  # seconds for a request to come, with all of its headers
_AT_ONCE = 64  # connections that are accepted before one of them is looked at


def serve(
    file: Path,
    root: Path,
    host: str,
    port: int,
    slots: int,
    ready: Callable[[str, bool], None],
    *,
    slurm: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. Jobs that run then run on.

    ``file`` is the database, made if there is none; jobs run under the folder ``root``, ``slots``
    ranks at once, or through Slurm. Port 0 is any that is free. ``ready`` is called with the URL,
    and whether only this machine reaches it, once requests are taken. UnavailableError: another
    server uses the file, or there is no Slurm. ConfigError: the file, the root or the address
    cannot be used.
    """
    places = Places(Path(os.path.realpath(file)))
    if not root.is_dir():
        raise ConfigError(f"--root {root}: there is no such folder")
    root = root.resolve()
    store = Store(places)
    try:
        token = token_of(places.token)
        runner = SlurmRunner(places, root) if slurm else LocalRunner(places, root)
        scheduler = Scheduler(store, runner, slots)
        service = Service(store, scheduler, places, root)
        with _listening(host, port) as listener:
            address = listener.getsockname()
            local = ipaddress.ip_address(address[0]).is_loopback
            app = application(service, token, local, places)
            url = _url(address, slurm)
            scheduler.start()
            try:
                _write_url(places.url, url)
                ready(url, local)
                _Server(app, service).run(sockets=[listener])
            finally:
                places.url.unlink(missing_ok=True)
                scheduler.close()
    finally:
        store.close()


def application(service: Service, token: str, local: bool, places: Places) -> ASGIApp:
    """Make the application of a service."""
    app = Starlette(
        routes=[*_routes(service.operations), *assets.routes()],
        exception_handlers=problems.HANDLERS,
    )
    app.router.redirect_slashes = False
    return Gate(app, token, local, places)


def _routes(operations: Iterable[Operation]) -> Iterable[Route]:
    """Yield one route for each path, so that it knows which methods there are."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    for path, methods in by_path.items():
        route = Route(path, _endpoint(methods), methods=list(methods))
        route.methods = set(methods)  # without HEAD, which a stream could not answer
        yield route


def _endpoint(methods: dict[str, Operation]) -> Callable[[Request], object]:
    async def endpoint(request: Request) -> Response:
        operation = methods[request.method]
        return await operation.endpoint(request, await read(request, operation))

    return endpoint


class _Connection(H11Protocol):
    """A connection that is closed if no request comes in time, or if others need its place."""

    waiting: ClassVar[dict[_Connection, asyncio.TimerHandle]] = {}  # the longest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait; if there are too many connections, close the one that waits longest."""
        super().connection_made(transport)
        self._wait()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if 0 < limit // 2 < len(self.connections):  # jobs and files need the other descriptors
            next(iter(self.waiting))._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop waiting if a request has come."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next one, which may be there already."""
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        if not self.transport.is_closing():
            self.waiting[self] = self.loop.call_later(_PATIENCE, self._end)

    def _stop_waiting(self) -> None:
        if late := self.waiting.pop(self, None):
            late.cancel()

    def _end(self) -> None:
        self._stop_waiting()
        self.transport.abort()


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Connection,
                backlog=_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_FAREWELL,
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order, within seconds."""
        self.should_exit = self._service.protocol.closing = True


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family)
        # Connections have it, too; else each answer waits 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at --host {host} --port {port}: {error}") from error


def _url(address: tuple[str, int], from_elsewhere: bool) -> str:
    host, port = address[:2]
    if ipaddress.ip_address(host).is_unspecified:
        local = "::1" if ":" in host else "127.0.0.1"
        host = socket.gethostname() if from_elsewhere else local
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_url(file: Path, url: str) -> None:
    new = file.with_name(file.name + ".new")
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="ascii") as writing:
        writing.write(url + "\n")
    new.replace(file)
