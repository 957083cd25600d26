"""The client before servers that are none, or that fail it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_harness import Server
from support.patience import until

from pgasdl import ConfigError, JobError, PgasTimeoutError
from pgasdl.jobs import Client, proof
from pgasdl.jobs.link import Link
from pgasdl.jobs.messages import Metrics

Answer = Callable[[socket.socket], None]
TOKEN = "t" * 32
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_STATE_HOME", "PGASDL_JOB_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(ConfigError, match="no home folder: set HOME or XDG_STATE_HOME"):
        Client.find()


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of one that does with each connection what a test says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def says(
    answer: bytes,
    *,
    rest: bytes = b"",
    for_ever: bytes = b"",
    token: str = TOKEN,
    heard: list[bytes] | None = None,
) -> Answer:
    """A server that proves that it knows a token, then gives a signed answer."""

    def sent(connection: socket.socket, answer: bytes, challenge: str) -> None:
        data = connection.recv(65536)
        if not data:
            raise ConnectionError  # the client hung up
        if heard is not None:
            heard.append(data)
        asked = data.decode()
        request = proof.Signed.read(re.findall("Authorization: (.*)\r", asked)[0])
        assert request is not None and request.challenge == challenge
        head, _, body = answer.partition(b"\r\n\r\n")
        what = proof.STREAM if b"event-stream" in head else proof.digest(body)
        told = request.answer(token, "now", int(head[9:12]), what)
        connection.sendall(head + f"\r\nPgasdl-Proof: {told}\r\n\r\n".encode() + body)

    def answers(connection: socket.socket) -> None:
        sent(connection, b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "-")
        sent(connection, answer, "now")
        connection.sendall(rest)
        while for_ever:
            connection.sendall(for_ever)

    return answers


def test_heartbeats_do_not_outlast_a_deadline() -> None:
    beats = says(STREAM, for_ever=b":\n\n")
    with answering(beats) as url, pytest.raises(PgasTimeoutError, match=r"after 0\.2 s"):
        Client(url, TOKEN).wait(1, 0.2)


def test_a_server_that_says_nothing_does_not_outlast_a_deadline() -> None:
    hung_up = threading.Semaphore(0)

    def keep_silent(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass
        hung_up.release()

    with answering(keep_silent) as url, pytest.raises(PgasTimeoutError, match=r"after 0\.2 s"):
        Client(url, TOKEN).wait(1, 0.2)
    assert hung_up.acquire(timeout=30)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ok>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_what_is_no_job_server(answer: bytes) -> None:
    with answering(says(answer)) as url:
        with pytest.raises(JobError, match=f"no job server answers at {url}") as refused:
            Client(url, TOKEN).show(1)
        assert refused.value.status == 0


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_what_speaks_no_http(answer: bytes) -> None:
    says_so = answering(lambda connection: connection.sendall(answer))
    with says_so as url, pytest.raises(JobError, match=f"no job server answers at {url}"):
        Client(url, TOKEN).show(1)


EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("stranger", [EMPTY, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 22)])
def test_a_stranger_is_told_nothing(stranger: bytes) -> None:
    """Neither the token, nor what is asked; whether or not it knows another token."""
    heard: list[bytes] = []

    def listens(connection: socket.socket) -> None:
        heard.append(connection.recv(65536))
        connection.sendall(stranger)

    with answering(listens) as url:
        client = Client(url, TOKEN)
        for ask in (
            lambda: client.submit(["secret.py"]),
            lambda: client.wait(1),
            lambda: list(client.follow(1)),
        ):
            with pytest.raises(JobError, match="does not know this token") as refused:
                ask()
            assert refused.value.status == 401
    assert len(heard) == 3
    for each in heard:
        assert each.startswith(b"GET ") and TOKEN.encode() not in each and b"secret" not in each
    other = answering(says(EMPTY, token="u" * 32))
    with other as url, pytest.raises(JobError, match="does not know this token"):
        Client(url, TOKEN).show(1)


def test_who_relays_learns_no_token_and_changes_nothing(shared: Server) -> None:
    heard: list[bytes] = []
    lies: list[bytes] = []
    host, port = shared.url.removeprefix("http://").rsplit(":", 1)

    def relays(connection: socket.socket) -> None:
        with socket.create_connection((host, int(port)), timeout=30) as server:

            def back() -> None:
                with contextlib.suppress(OSError):
                    while data := server.recv(65536):
                        connection.sendall(data.replace(b'"running"', *lies or [b'"running"']))

            thread = threading.Thread(target=back)
            thread.start()
            while data := connection.recv(65536):
                heard.append(data)
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
            thread.join()

    job = shared.submit()
    shared.ranks(job)
    with answering(relays) as url:
        client = Client(url, shared.token)
        assert client.show(job)["state"] == "running"
        lies.append(b'"stopped"')
        with pytest.raises(JobError, match="does not know this token"):
            client.show(job)
    assert heard and shared.token.encode() not in b"".join(heard)


def test_rank_0_obeys_no_stranger(tmp_path: Path) -> None:
    """Nor does it tell it anything; the server that comes after it gets all."""
    heard: list[bytes] = []
    twice = threading.Semaphore(0)

    def commands(connection: socket.socket) -> None:
        heard.append(connection.recv(65536))
        order = b'{"commands": [{"id": 1, "command": {"name": "learning-rate", "value": 666}}]}'
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(order) + order)
        twice.release()

    file, url_file = tmp_path / "link.json", tmp_path / "url"
    file.write_text(json.dumps({"job": 1, "token": TOKEN, "url": str(url_file)}))
    with answering(commands) as url:
        url_file.write_text(url)
        link = Link(file, lambda: None)
        link.tell(Metrics(1, 1.0, {"loss": 1.0}))
        assert twice.acquire(timeout=30) and twice.acquire(timeout=30)
    posts: list[bytes] = []
    with answering(says(EMPTY, heard=posts)) as url:
        url_file.write_text(url)
        assert until(lambda: any(b"POST /api/v1/jobs/1/reports" in each for each in posts))
        link.close()
    assert not link.commands
    assert all(each.startswith(b"GET ") and TOKEN.encode() not in each for each in heard)


def test_rank_0_says_why_a_report_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"detail": "time: no number", "field": "time"}'
    answer = b"HTTP/1.1 422 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    file, url_file = tmp_path / "link.json", tmp_path / "url"
    file.write_text(json.dumps({"job": 1, "token": TOKEN, "url": str(url_file)}))
    with answering(says(answer)) as url:
        url_file.write_text(url)
        link = Link(file, lambda: None)
        link.tell(Metrics(1, 1.0, {"loss": 1.0}))
        link.close()
    assert link.dropped == 1
    assert "refuses a report, which loses 1 messages: time: no number" in caplog.text


@pytest.mark.parametrize("line", [b"data: {\n", b"id: x\ndata: {}\n", b"", b"data: \xff\n"])
def test_a_stream_of_something_else(line: bytes) -> None:
    answer = answering(says(STREAM, rest=b"event: state\n" + line + b"\n"))
    with answer as url, pytest.raises(PgasTimeoutError):
        list(Client(url, TOKEN).events(1, 0.2))


def test_a_stream_that_breaks_off_again_and_again() -> None:
    """It is looked for again, for as long as the client has patience."""
    state = b'id: 7\nevent: state\ndata: {"state": "queued"}\n\n'
    broken = says(STREAM, rest=state + b'event: state\ndata: {"sta')
    with answering(broken) as url:
        events = Client(url, TOKEN, patience=0).events(1, 1)
        assert next(events) == {"event": "state", "state": "queued"}
        with pytest.raises(PgasTimeoutError):
            list(events)
    with pytest.raises(JobError, match="no job server answers"):
        list(Client(url, TOKEN, patience=0).events(1))


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("https://127.0.0.1:1", TOKEN),
        ("127.0.0.1:1", TOKEN),
        ("http://", TOKEN),
        ("http://127.0.0.1:1/api", TOKEN),
        ("http://127.0.0.1:x", TOKEN),
        ("http://127.0.0.1:1", ""),
        ("http://127.0.0.1:1", "a\r\nHost: b"),
        ("http://127.0.0.1:1", "\u20ac" * 32),
    ],
)
def test_what_is_no_url_or_no_token(url: str, token: str) -> None:
    with pytest.raises(ConfigError):
        Client(url, token)
