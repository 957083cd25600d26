"""Rank 0's connection to the job server: one thread, which never stops the training.

The thread looks again for a server that is away, with growing pauses. Messages then wait while
there is room; after that the oldest one is dropped, and counted.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pgasdl.errors import JobError
from pgasdl.jobs.messages import (
    MOST_COUNTED,
    MOST_EVENTS,
    MOST_METRICS,
    VERSION,
    Command,
    Event,
    Metrics,
)
from pgasdl.jobs.proof import Connection

log = logging.getLogger("pgasdl")

_EVERY = 0.5  # seconds from one report to the next
_SILENCE = 30.0  # seconds; the server answers a question for commands earlier
_PAUSES = (0.1, 5.0)  # seconds, the first and the longest, before it looks for the server again
_FAREWELL = 5.0  # seconds at the end for messages that are left
_MOST_KEPT = {"metrics": 20_000, "events": 1_000}
_MOST_SENT = {"metrics": MOST_METRICS, "events": MOST_EVENTS}
_MOST_BYTES = 1 << 17  # of a report, about
_MOST_COMMANDS = 1000  # that wait for the training; then it asks for no more
_FAULTS = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, JobError)


class Link:
    """The connection of a job; ``file`` has its ``job``, ``token`` and ``url`` (a file).

    ``commands`` are those that came, in their order; ``bell`` is called when there are some.
    ``dropped`` counts messages without room that the server does not know of yet.
    """

    def __init__(self, file: Path, bell: Callable[[], None], after: int = 0) -> None:
        self.commands: deque[Command] = deque()
        self.dropped = 0
        self._file, self._bell = file, bell
        self._kept: dict[str, deque[dict[str, Any]]] = {"metrics": deque(), "events": deque()}
        self._counters: dict[int, dict[str, Any]] = {}  # by rank, the last ones not sent yet
        self._unsure: dict[str, Any] | None = None  # the report that has no answer yet
        self._after = after  # the number of a command
        self._next_report = 0.0
        self._lock = threading.Lock()
        self._wake, self._waking = socket.socketpair()
        for end in (self._wake, self._waking):
            end.setblocking(False)
        self._close_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="pgasdl-job", daemon=True)
        self._thread.start()

    def tell(self, message: Metrics | Event) -> None:
        """Send a message with the next report."""
        kind = "metrics" if isinstance(message, Metrics) else "events"
        document = message.as_json()
        with self._lock:
            idle = not self._any()
            kept = self._kept[kind]
            kept.append(document)
            if len(kept) > _MOST_KEPT[kind]:
                kept.popleft()
                self.dropped += 1
        if idle:  # else the thread wakes anyway for its next report
            self._touch()

    def tell_counters(self, record: dict[str, Any]) -> None:
        """Send the counters of a rank with a next report; later ones replace earlier ones."""
        with self._lock:
            idle = not self._any()
            self._counters[record["rank"]] = record
        if idle:
            self._touch()

    def close(self) -> None:
        """Send the messages that are left, if there is a server, and end. Idempotent."""
        if self._close_at is None:
            self._close_at = time.monotonic() + _FAREWELL
            self._touch()
            self._thread.join(2 * _FAREWELL)  # the program ends even if the server never answers
            if not self._thread.is_alive():
                self._wake.close()
                self._waking.close()

    def _touch(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._waking.send(b"\0")

    # --- the thread

    def _run(self) -> None:
        pause, told = _PAUSES[0], False
        while not self._over():
            began = self._after, self._next_report
            try:
                self._talk()
                return
            except _FAULTS as error:
                if not told:
                    log.warning("the job server does not answer: %s; training goes on", error)
                told = True
            if (self._after, self._next_report) != began:  # the server had answered
                pause, told = _PAUSES[0], False
            limit = time.monotonic() + pause
            while (left := limit - time.monotonic()) > 0 and not self._over():
                if self._close_at is not None:
                    left = min(left, 0.1)
                select.select([self._wake], [], [], left)
                self._drain()
            pause = min(2 * pause, _PAUSES[1])

    def _over(self) -> bool:
        if self._close_at is None:
            return False
        return not self._any() or time.monotonic() > self._close_at

    def _any(self) -> bool:
        return self._unsure is not None or any(self._kept.values()) or bool(self._counters)

    def _talk(self) -> None:
        """Ask for commands all the time, and report meanwhile, until it is over."""
        known = json.loads(self._file.read_bytes())
        url = urlsplit(Path(known["url"]).read_text(encoding="ascii").strip())
        path = f"/api/v1/jobs/{known['job']}"
        place = url.hostname or "", url.port or 80
        asking = Connection(*place, known["token"], _FAREWELL)
        telling = Connection(*place, known["token"], _FAREWELL)
        try:
            asked: float | None = None
            while not self._over():
                now = time.monotonic()
                if asked is None and len(self.commands) < _MOST_COMMANDS:
                    asking.ask("GET", f"{path}/commands?after={self._after}")
                    asked = now
                if self._any() and (now >= self._next_report or self._close_at is not None):
                    self._report(telling, f"{path}/reports")
                # It hears commands between reports, however many there are.
                limit = self._next_report - now if self._any() else 1.0
                if self._close_at is not None:
                    limit = 0.0
                inputs: list[Any] = [self._wake]
                if asked is not None:
                    inputs.append(asking.sock)
                ready, _, _ = select.select(inputs, [], [], max(0.0, limit))
                if self._wake in ready:
                    self._drain()
                if len(inputs) > 1 and inputs[1] in ready:
                    self._hear(asking)
                    asked = None
                elif asked is not None and now > asked + _SILENCE:
                    raise OSError(f"no word for {_SILENCE:g} s")
        finally:
            asking.close()
            telling.close()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _hear(self, connection: Connection) -> None:
        for each in _answer(connection)["commands"]:
            self.commands.append(Command.from_json(each["command"], each["id"]))
            self._after = each["id"]
        if self.commands:
            self._bell()

    def _report(self, connection: Connection, path: str) -> None:
        if self._unsure is None:
            self._unsure = self._taken()
        connection.ask("POST", path, json.dumps(self._unsure).encode())
        try:
            _answer(connection)
        except JobError as error:
            if error.status not in (400, 409, 413, 422):
                raise
            lost = len(self._unsure["metrics"]) + len(self._unsure["events"])
            log.warning("the job server refuses a report, which loses %d messages: %s", lost, error)
            with self._lock:  # it will never take this report
                self.dropped += lost + self._unsure["dropped"]
        self._unsure = None
        self._next_report = time.monotonic() + (0 if self._full() else _EVERY)

    def _full(self) -> bool:
        lengths = {kind: len(kept) for kind, kept in self._kept.items()}
        return any(lengths[kind] >= most for kind, most in _MOST_SENT.items()) or (
            len(self._counters) > MOST_COUNTED
        )

    def _taken(self) -> dict[str, Any]:
        """Make a report of the messages that are kept."""
        taken: dict[str, Any] = {"version": VERSION, "metrics": [], "events": [], "ranks": []}
        size = 0
        with self._lock:
            for kind, kept in self._kept.items():
                while kept and len(taken[kind]) < _MOST_SENT[kind] and size < _MOST_BYTES:
                    size += len(json.dumps(kept[0]))
                    taken[kind].append(kept.popleft())
            while self._counters and len(taken["ranks"]) < MOST_COUNTED and size < _MOST_BYTES:
                record = self._counters.pop(next(iter(self._counters)))
                size += len(json.dumps(record))
                taken["ranks"].append(record)
            taken["dropped"], self.dropped = self.dropped, 0
        return taken


def _answer(connection: Connection) -> dict[str, Any]:
    answer, data = connection.hear()
    document = json.loads(data)
    if answer.status >= 400:
        raise JobError(str(document["detail"]), answer.status, str(document["field"]))
    assert isinstance(document, dict)
    return document
