"""An HTTP server of a folder, which can misbehave."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

ALWAYS = 1 << 30


@dataclass
class Faults:
    """The faults of a server for a path; "the first requests" are those after it was set."""

    errors: int = 0  # the first requests that are answered with `status`
    status: int = 500
    stalls: int = 0  # the first GETs that wait until `release`
    breaks: int = 0  # the first GETs whose connection ends after `break_after` bytes
    break_after: int = 0
    ignore_range: bool = False  # the whole file is the answer
    shift: int = 0  # a range of so many bytes further on is the answer
    head_adds: int = 0  # to the size in the answer to HEAD
    no_size: bool = False  # neither HEAD nor GET has the size
    version: tuple[str, str] | None = None  # a header with the version


class StorageServer(ThreadingHTTPServer):
    """Serve a folder on a free port, in threads that all end with the `with` statement.

    `faults["/a.tar"] = Faults(errors=2)` makes a path fail; `requests` and `nbytes` count the GETs
    and the bytes of their bodies for each path, `heads` the HEADs.
    """

    def __init__(self, folder: Path) -> None:
        self.faults: defaultdict[str, Faults] = defaultdict(Faults)
        self.requests: Counter[str] = Counter()
        self.heads: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.stalled = threading.Semaphore(0)  # released when a request begins to stall
        self.hung_up = threading.Semaphore(0)  # ... when the client of one ends the connection
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        self._released, self._release = socket.socketpair()
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.daemon_threads = False  # server_close waits for them
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def release(self) -> None:
        """Let stalled requests go on, those to come included."""
        self._release.close()

    def takes(self, path: str, kind: str) -> bool:
        """Whether one of a path's faults is due; then count it as used."""
        with self.lock:
            left = getattr(self.faults[path], kind)
            setattr(self.faults[path], kind, max(left - 1, 0))
            return left > 0

    def stall(self, connection: socket.socket) -> bool:
        """Wait until the release; False: the client hung up."""
        self.stalled.release()
        ready, _, _ = select.select([connection, self._released], [], [])
        if self._released in ready:
            return True
        self.hung_up.release()
        return False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.release()
        with self.lock:
            for connection in self.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        self._released.close()

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no error of the server."""


class _Handler(SimpleHTTPRequestHandler):
    server: StorageServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        with self.server.lock:
            self.server.heads[self.path] += 1
        self.answer(with_body=False)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests[self.path] += 1
        if self.server.takes(self.path, "stalls") and not self.server.stall(self.connection):
            self.close_connection = True
            return
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        faults = self.server.faults[self.path]
        if self.server.takes(self.path, "errors"):
            self.send_error(faults.status)
            return
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            super().do_GET() if with_body else super().do_HEAD()
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        total = len(data)
        status = 200
        if wanted and not faults.ignore_range:
            first, last = int(wanted[1]) + faults.shift, int(wanted[2]) + faults.shift
            if first >= total:
                self.send_error(416)
                return
            data, status = data[first : last + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
        if faults.version:
            self.send_header(*faults.version)
        if faults.no_size:
            self.send_header("Connection", "close")
        else:
            adds = 0 if with_body else faults.head_adds
            self.send_header("Content-Length", str(len(data) + adds))
        self.end_headers()
        if not with_body:
            return
        if self.server.takes(self.path, "breaks"):
            data = data[: faults.break_after]
            self.close_connection = True
        with self.server.lock:
            self.server.nbytes[self.path] += len(data)
        self.wfile.write(data)
