"""The client before servers that are none, or that fail it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pgasdl import ConfigError, JobError, Timeout
from pgasdl.jobs import Client

Answer = Callable[[socket.socket], None]
TOKEN = "t" * 32
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of a server that does with each connection what a test says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def beat(connection: socket.socket) -> None:
    """Heartbeats without end."""
    connection.sendall(STREAM)
    while True:
        connection.sendall(b":\n\n")


def test_heartbeats_do_not_outlast_a_deadline() -> None:
    with answering(beat) as url, pytest.raises(Timeout, match=r"after 0\.2 s"):
        Client(url, TOKEN).wait(1, 0.2)


def test_a_server_that_says_nothing_does_not_outlast_a_deadline() -> None:
    hung_up = threading.Semaphore(0)

    def keep_silent(connection: socket.socket) -> None:
        assert connection.recv(1) == b""
        hung_up.release()

    with answering(keep_silent) as url, pytest.raises(Timeout, match=r"after 0\.2 s"):
        Client(url, TOKEN).wait(1, 0.2)
    assert hung_up.acquire(timeout=30)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ok>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_what_is_no_job_server(answer: bytes) -> None:
    with answering(lambda connection: connection.sendall(answer)) as url:
        with pytest.raises(JobError, match=f"no job server answers at {url}") as refused:
            Client(url, TOKEN).show(1)
        assert refused.value.status == 0


@pytest.mark.parametrize("line", [b"data: {\n", b"id: x\ndata: {}\n", b"", b"data: \xff\n"])
def test_a_stream_of_something_else(line: bytes) -> None:
    stream = STREAM + b"event: state\n" + line + b"\n"
    answer = answering(lambda connection: connection.sendall(stream))
    with answer as url, pytest.raises(Timeout):
        list(Client(url, TOKEN).events(1, 0.2))


def test_a_stream_that_breaks_off_again_and_again() -> None:
    """It is looked for again, for as long as the client has patience."""
    state = b'id: 7\nevent: state\ndata: {"state": "queued"}\n\n'
    broken = STREAM + state + b'event: state\ndata: {"sta'
    with answering(lambda connection: connection.sendall(broken)) as url:
        events = Client(url, TOKEN, patience=0).events(1, 1)
        assert next(events) == {"event": "state", "state": "queued"}
        with pytest.raises(Timeout):
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
