"""The bootstrap store as strangers and an authenticated rank reach it."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import socket
from collections.abc import Iterator

from fuzz_drive import Input

from pgasdl.runtime.bootstrap import StoreClient, StoreServer
from pgasdl.runtime.bootstrap.channel import (
    CHALLENGE,
    HELLO,
    MAGIC,
    SECRET_BYTES,
    FrameKind,
    Sealer,
    Session,
    address_text,
)

_SECRET = bytes(SECRET_BYTES)
_KINDS = tuple(FrameKind)
_RANKS = 2
_count = itertools.count(1)


@functools.cache
def _server() -> StoreServer:
    return StoreServer(_SECRET, _RANKS)


def one(data: bytes) -> None:
    """Whatever comes, the store closes the connection once its peer has, and goes on serving."""
    given = Input(data)
    server = _server()
    with socket.create_connection(server.address, 10.0) as sock:
        # Closed by a reset, which frees the port at once: a million executions need ports.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with _hung_up():
            match given.byte() % 3:
                case 1:
                    sock.sendall(HELLO.pack(MAGIC, given.byte(), given.byte(), bytes(32)))
                case 2:
                    _prove_and_ask(sock, given)
            sock.sendall(given.rest())
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    if next(_count) % 64 == 1:
        with StoreClient(server.address, _SECRET, 1, _RANKS) as client:
            client.put("key", data[:64])
            assert client.get("key") == data[:64]


def _prove_and_ask(sock: socket.socket, given: Input) -> None:
    sock.sendall(HELLO.pack(MAGIC, 0, _RANKS, bytes(32)))
    answer = b""
    while len(answer) < CHALLENGE.size:
        answer += sock.recv(CHALLENGE.size - len(answer)) or _refuse()
    nonce, _ = CHALLENGE.unpack(answer)
    addresses = address_text(sock.getsockname()), address_text(sock.getpeername())
    session = Session.derive(_SECRET, "", (0, _RANKS), (bytes(32), nonce), addresses)
    sealer = Sealer(session.to_server)
    words = session.client_proof
    for _ in range(given.byte() % 8):
        kind = _KINDS[given.byte() % len(_KINDS)]
        words += sealer.seal(kind, given.byte(), given.bytes(given.byte()))
    sock.sendall(words)


def _refuse() -> bytes:
    raise ConnectionError("the store hung up")


@contextlib.contextmanager
def _hung_up() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise
