"""How a rank takes the store's answers: all are sealed with its key, but none is trusted."""

from __future__ import annotations

import contextlib
import socket
from unittest import mock

from fuzz_drive import Input

from pgasdl.errors import PgasError
from pgasdl.runtime.bootstrap.channel import SECRET_BYTES, FrameKind, Opener, Sealer
from pgasdl.runtime.bootstrap.client import StoreClient
from pgasdl.runtime.bootstrap.entry import Admission
from pgasdl.runtime.bootstrap.store import RankState

_KEY = bytes(32)
_KINDS = tuple(FrameKind)


def _connected(sock: socket.socket) -> StoreClient:
    """A client that has already shaken hands."""
    sock.setblocking(False)
    admission = Admission(sock, Opener(_KEY), Sealer(_KEY), b"")
    with mock.patch("pgasdl.runtime.bootstrap.client.admit", lambda *_: admission):
        return StoreClient(("127.0.0.1", 1), bytes(SECRET_BYTES), 0, 2, timeout=10.0)


def one(data: bytes) -> None:
    """A call ends at once, with a result or an error of pgasdl."""
    given = Input(data)
    sealer = Sealer(_KEY)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        number = given.byte()
        while given:
            kind = _KINDS[given.byte() % len(_KINDS)]
            theirs.send(sealer.seal(kind, 1, given.bytes(given.byte() % 16)))
        theirs.shutdown(socket.SHUT_WR)
        client = _connected(mine)
        calls = (
            lambda: [RankState(state) for state in client.states()],
            lambda: client.get("key"),
            lambda: client.put("key", b"1"),
            lambda: client.gather("key", [0, 1]),
        )
        with contextlib.suppress(PgasError):
            calls[number % len(calls)]()
        client.close()
