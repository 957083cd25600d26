"""The job server's client: Python's own HTTP, nothing else."""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from pgasdl.errors import ConfigError, JobError, PgasTimeoutError
from pgasdl.jobs.places import Places, default_file
from pgasdl.jobs.proof import Connection
from pgasdl.jobs.requests import LARGEST

_LOG = logging.getLogger("pgasdl.jobs")

_TIMEOUT = 30.0  # seconds for an answer; a stream is never silent for so long
_NO_SERVER = "no job server runs for {}: start `pgasdl serve`, or give --server"
_PAUSE = 0.5  # seconds until it looks again for a server that went away


class Client:
    """Talks to a job server.

    Parameters
    ----------
    url : str
        As ``pgasdl serve`` prints it: ``http://HOST:PORT``.
    token : str
        The content of the server's token file.
    patience : float
        Seconds for which :meth:`events`, :meth:`wait` and :meth:`follow` look again for a server
        that went away, as a server does when it is started again.

    Raises
    ------
    ConfigError
        The URL or the token cannot be one.

    Notes
    -----
    Jobs are documents as ``/openapi.json`` of the server says: ``id``, ``name``, ``state``
    (queued, staging, running, stopping, done, failed, stopped, lost), ``reason``, ``status``,
    ``submitted``, ``started`` and ``ended`` in seconds since 1970, ``restarts_left``, ``request``.
    Every method raises :class:`pgasdl.JobError` if the server refuses it or does not answer
    within 30 s.
    """

    def __init__(self, url: str, token: str, *, patience: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or 80
        except ValueError:
            parts, host, port = urlsplit(""), "", 0
        if parts.scheme != "http" or not host or parts.path.strip("/"):
            raise ConfigError(f"no URL of a job server: {url[:200]!r}; as in http://127.0.0.1:8000")
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError("no token: give the content of the server's file jobs.db.token")
        self._url = url.rstrip("/")
        self._place = (host, port)
        self._token = token
        self._patience = patience
        self._places: Places | None = None  # of the server's file, if it is on this machine

    @classmethod
    def find(cls, server: str = "", token_file: str = "") -> Client:
        """Find a server and its token.

        Parameters
        ----------
        server : str, optional
            A URL, or the path of the file of a server on this machine; default:
            ``PGASDL_JOB_SERVER``, or else the file in the user's state folder.
        token_file : str, optional
            Default: the one beside that file.

        Raises
        ------
        ConfigError
            No server runs for that file, or there is no token.
        """
        server = server or os.environ.get("PGASDL_JOB_SERVER", "")
        remote = "://" in server
        near = server if server and (token_file or not remote) else default_file()
        places = Places(Path(os.path.realpath(near)))
        if not remote:
            server = _url_of(places)
        try:
            file = Path(token_file) if token_file else places.token
            found = cls(server, file.read_text(encoding="ascii").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token of {server}: {error}") from error
        found._places = None if remote else places
        return found

    @property
    def page(self) -> str:
        """The page's address for a browser, with the token, which lets its owner start programs."""
        return f"{self._url}/#token={self._token}"

    def submit(self, program: Sequence[str | Path], **request: Any) -> dict[str, Any]:
        """Put a job into the queue, and return it.

        Parameters
        ----------
        program : Sequence[str | Path]
            ``PROGRAM.py`` or ``-m``, ``MODULE``, and the program's arguments.
        **request : Any
            ``ranks`` (1), ``name``, ``folder`` (the server's root), ``environment`` (none),
            ``restarts`` (0), ``grace`` (10 s), ``stage``: a dict of ``remote`` and ``local``,
            ``format``, ``limit``; ``resources``: a dict of sbatch's options, as ``partition``.
        """
        words = program if isinstance(program, str) else [os.fspath(word) for word in program]
        for word in words:
            if word != word.encode(errors="replace").decode():
                raise ConfigError(f"{word!r}: a program and its arguments have to be UTF-8")
        return self._document("POST", "/jobs", request | {"program": words})

    def jobs(self, limit: int = 100, before: int | None = None, state: str = "") -> dict[str, Any]:
        """Return a page of ``jobs``, the newest first, and ``before`` of the ``next`` page."""
        query: dict[str, Any] = {"limit": limit}
        query |= {} if before is None else {"before": before}
        query |= {"state": state} if state else {}
        return self._document("GET", f"/jobs?{urlencode(query)}")

    def show(self, job: int) -> dict[str, Any]:
        """Return a job."""
        return self._document("GET", f"/jobs/{job}")

    def stop(self, job: int) -> dict[str, Any]:
        """End a job: SIGTERM, after its grace SIGKILL. It returns at once."""
        return self._document("POST", f"/jobs/{job}/stop")

    def restart(self, job: int) -> dict[str, Any]:
        """Put a job that has ended into the queue again; its folder is as it was."""
        return self._document("POST", f"/jobs/{job}/restart")

    def send(self, job: int, name: str, value: Any = None) -> int:
        """Tell a job that runs a command, and return its number.

        ``events(job, after=number)`` has the outcome: the event with this ``command``.

        Parameters
        ----------
        job : int
            Its id.
        name : str
            start, pause, resume, set (``{"name": ..., "value": ...}``), evaluate, checkpoint, stop,
            or one for which its program has a function (:meth:`TrainingJob.on`).
        value : Any, optional
            At most 4 KiB of JSON.
        """
        command = {"name": name, "value": value}
        return int(self._document("POST", f"/jobs/{job}/messages", command)["id"])

    def ranks(self, job: int, first: int = 0) -> list[dict[str, Any]]:
        """Return the last counters of a job's ranks: 64 at most, from a rank on.

        Each is a dict as ``/openapi.json`` says: ``rank``, ``iteration``, ``time``, ``memory``
        (bytes), ``registrations``, ``losses``, ``peers``, ``waits`` and ``layers``, as
        :class:`pgasdl.Counters` has them. Ranks without ``pgasdl.jobs.connect`` have none.
        """
        found: list[dict[str, Any]] = self._document("GET", f"/jobs/{job}/ranks?first={first}")[
            "ranks"
        ]
        return found

    def records(self, job: int) -> list[dict[str, Any]]:
        """Return the flight records that ranks left: dicts of ``name``, ``time`` and ``text``."""
        found: list[dict[str, Any]] = self._document("GET", f"/jobs/{job}/records")["records"]
        return found

    def metrics(
        self,
        job: int,
        name: str = "",
        *,
        after: str = "",
        first: int = 0,
        points: int = 1000,
        thinned: bool = True,
    ) -> dict[str, list[list[Any]]]:
        """Return a job's metrics by name: lists of ``[iteration, value, time]``.

        Parameters
        ----------
        job : int
            Its id.
        name : str, optional
            The only metric to return; "": the first 100 in alphabetical order.
        after : str, optional
            Only metrics whose names come after this one.
        first : int, default 0
            The first iteration.
        points : int, default 1000
            At most so many for each name; not above 10,000.
        thinned : bool, default True
            They are evenly chosen, and the last one is always there; False: the first ones.
        """
        query: dict[str, Any] = {"name": name, "after": after, "first": first, "points": points}
        query["thinned"] = "yes" if thinned else "no"
        return self._document("GET", f"/jobs/{job}/metrics?{urlencode(query)}")

    def log(self, job: int, offset: int = 0) -> bytes:
        """Return what its programs have written, from a byte on; at most 1 MiB."""
        return self._content("GET", f"/jobs/{job}/log?offset={offset}")

    def follow(self, job: int) -> Iterator[bytes]:
        """Yield what its programs write, until it ends; from its begin if it was cut short."""
        offset = 0
        for event in self.events(job, after=LARGEST):
            if event["size"] < offset:
                _LOG.warning("job %d: its log is shorter than it was; it begins again", job)
                offset = 0
            while offset < event["size"]:
                try:
                    data = self.log(job, offset)
                except JobError as error:
                    if error.status:
                        raise
                    break  # the stream comes again, or raises that nobody answers
                if not data:
                    break  # it was cut short meanwhile
                offset += len(data)
                yield data

    def wait(self, job: int, timeout: float | None = None) -> dict[str, Any]:
        """Wait for a job's end, and return it; PgasTimeoutError after so many seconds."""
        for _ in self.events(job, timeout, after=LARGEST):
            pass
        return self.show(job)

    def events(
        self, job: int, timeout: float | None = None, *, after: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield what happened to a job after a command's number, then what happens, until it ends.

        Each is a dict with ``event``: "state" (``time``, ``state``, ``reason``, ``status``), "log"
        (``size``, the bytes that there are), "command" (``name``, ``value``) or "event"
        (``iteration``, ``name``, ``text``), which its program told: "obeyed", "refused" or
        "failed" with a ``command``'s number, and its own.

        Raises
        ------
        PgasTimeoutError
            After ``timeout`` seconds; None: as long as the server lives.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        missing_since = None
        while True:
            try:
                for number, event in self._stream(job, after, deadline):
                    after, missing_since = number or after, None
                    if event["event"] == "end":
                        return
                    yield event
            except JobError as error:
                if error.status:
                    raise
                now = time.monotonic()
                missing_since = missing_since or now
                late = deadline is not None and now >= deadline
                if not late and now > missing_since + self._patience:
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                raise PgasTimeoutError(f"job {job} has not ended after {timeout:g} s")
            time.sleep(_PAUSE)

    def _stream(
        self, job: int, after: int, deadline: float | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        connection = self._connection()
        try:
            connection.connect()
            link = connection.sock
            link.settimeout(_left(deadline))
            answer, _ = self._asked(connection, "GET", f"/jobs/{job}/events?after={after}")
            fields: dict[str, str] = {}
            while line := answer.readline().decode():
                link.settimeout(_left(deadline))
                name, _, text = line.rstrip("\n").partition(": ")
                if name:
                    fields[name] = text
                elif "event" in fields:
                    document = json.loads(fields["data"])
                    yield int(fields.get("id", 0)), {"event": fields["event"], **document}
                    fields = {}
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise self._silent(error) from error
        finally:
            connection.close()

    def _document(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            document = json.loads(self._content(method, path, body))
        except ValueError as error:
            raise self._silent(error) from error
        if not isinstance(document, dict):
            raise self._silent(TypeError("its answer is no object"))
        return document

    def _content(self, method: str, path: str, body: object = None) -> bytes:
        connection = self._connection()
        try:
            return self._asked(connection, method, path, body)[1]
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error
        finally:
            connection.close()

    def _connection(self) -> Connection:
        if self._places is not None:  # a server that was started again may have another port
            with suppress(ConfigError):
                now = Client(_url_of(self._places), self._token)
                self._url, self._place = now._url, now._place
        return Connection(*self._place, self._token, _TIMEOUT)

    def _asked(
        self, connection: Connection, method: str, path: str, body: object = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return an answer; JobError is a refusal, or says that no server answers."""
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.ask(method, "/api/v1" + path, content)
            answer, data = connection.hear()
            if answer.status < 400:
                return answer, data
            problem = json.loads(data)
            detail, field = str(problem["detail"]), str(problem["field"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise self._silent(error) from error
        raise JobError(detail, answer.status, field)

    def _silent(self, error: Exception) -> JobError:
        return JobError(f"no job server answers at {self._url}: {error or type(error).__name__}")


def _left(deadline: float | None) -> float:
    """Return how long to wait for the next line; TimeoutError once there is no time."""
    if deadline is None:
        return _TIMEOUT
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return min(left, _TIMEOUT)


def _url_of(places: Places) -> str:
    """Return the URL of the server that runs for a file: no other server may get the token."""
    try:
        lock = os.open(places.lock, os.O_RDWR)
        try:
            places.require_private()
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return places.url.read_text(encoding="ascii").strip()
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(_NO_SERVER.format(places.file)) from error
    raise ConfigError(_NO_SERVER.format(places.file))
