"""What strangers send to a rank's port changes nothing, and holds nobody up."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator

import pytest
from support.forking import Job
from support.leftovers import listening
from support.tcp_proxy import GREETING, REPLY

MAGIC = 0x31706374_6C646770


@pytest.fixture
def busy(job: Callable[..., Job]) -> Iterator[tuple[Job, list[int]]]:
    """Two ranks that create segments all the time, and their ports."""
    ranks = job("stranger_target.py", 2, PGASDL_TIMEOUT="20", PGASDL_STOPPED_AFTER="2.0")
    ranks.said("running")
    yield ranks, [listening(ranks[rank].pid)[0] for rank in (0, 1)]


def finish(ranks: Job) -> None:
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR2)
    assert ranks.ended() == [0, 0], ranks.transcript()
    for rank in (0, 1):
        complete = ranks.event(rank, "complete")
        assert complete["segments"] > 0
        assert complete["health"] == ["healthy", "healthy"], complete


def greeting(rank: int, /, **wrong: int) -> bytes:
    """What the other rank would say to this one."""
    words = {"magic": MAGIC, "size": 2, "source": 1 - rank, "to": rank, "queue": 0} | wrong
    return GREETING.pack(*words.values(), secrets.token_bytes(16))


def ended(stranger: socket.socket) -> bool:
    """Whether a rank closes the connection, within its patience."""
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        return stranger.recv(1000) == b""
    return True


def test_who_does_not_know_the_secret_is_turned_away(busy: tuple[Job, list[int]]) -> None:
    ranks, ports = busy
    wrong = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100),
        secrets.token_bytes(4096),
        *(greeting(0, **{what: value}) for what, value in
          [("magic", 1), ("size", 3), ("source", 0), ("source", -1), ("source", 2**31 - 1),
           ("to", 1), ("queue", 2**32 - 1)]),
    ]  # fmt: skip
    for words in wrong:
        with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
            stranger.sendall(words)
            assert ended(stranger), words[:40]
    # A good greeting gets a challenge, and a guess, or the challenge sent back, gets the end.
    for proof in (bytes(8), secrets.token_bytes(8), None):
        with socket.create_connection(("127.0.0.1", ports[0])) as stranger:
            stranger.sendall(greeting(0))
            reply = stranger.recv(REPLY.size, socket.MSG_WAITALL)
            stranger.sendall(reply[-8:] if proof is None else proof)
            assert ended(stranger)
    finish(ranks)


def test_half_a_greeting_ends_after_a_while(busy: tuple[Job, list[int]]) -> None:
    ranks, ports = busy
    with contextlib.ExitStack() as stack:
        address, half = ("127.0.0.1", ports[0]), greeting(0)[:-1]
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
        strangers[0].sendall(half)
        assert all(map(ended, strangers))
    finish(ranks)


@pytest.mark.full
def test_a_crowd_holds_nobody_up(busy: tuple[Job, list[int]]) -> None:
    """10,000 connections, some of which stay: descriptors are limited, and the job goes on."""
    ranks, ports = busy
    before = len(os.listdir(f"/proc/{ranks[0].pid}/fd"))
    with contextlib.ExitStack() as stack:
        for number in range(10_000):
            stranger = socket.create_connection(("127.0.0.1", ports[number % 2]), timeout=30)
            if number % 50 == 0:
                stack.enter_context(stranger)
                stranger.sendall(greeting(number % 2)[: number % 40])
            else:
                stranger.close()
        assert len(os.listdir(f"/proc/{ranks[0].pid}/fd")) < before + 300
        finish(ranks)
