"""Helpers of the store's tests: a server's parameters, a client, and a rank that speaks by hand."""

from __future__ import annotations

import secrets
import socket

from pgasdl.runtime.bootstrap import StoreClient, StoreServer, channel
from pgasdl.runtime.bootstrap.channel import CHALLENGE, HELLO, MAGIC, Opener, Sealer, Session

SECRET = bytes(range(32))
JOB = "test"


def client(server: StoreServer, rank: int, timeout: float = 10.0) -> StoreClient:
    return StoreClient(server.address, SECRET, rank, server.size, JOB, timeout)


class RawRank:
    """A rank that speaks the protocol by hand, so that a test can send what a client would not."""

    def __init__(self, server: StoreServer, rank: int, secret: bytes = SECRET) -> None:
        self.sock = socket.create_connection(server.address, 5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = 0  # bytes
        nonce = secrets.token_bytes(32)
        self.sent = HELLO.pack(MAGIC, rank, server.size, nonce)
        self.sock.sendall(self.sent)
        challenge = self.receive(CHALLENGE.size)
        addresses = tuple(
            channel.address_text(a) for a in (self.sock.getsockname(), self.sock.getpeername())
        )
        place, nonces = (rank, server.size), (nonce, challenge[:32])
        session = Session.derive(secret, JOB, place, nonces, addresses)  # type: ignore[arg-type]
        self.genuine = session.server_proof == challenge[32:]
        self.sealer, self.opener = Sealer(session.to_server), Opener(session.to_client)
        self.send(session.client_proof)

    def send(self, data: bytes) -> None:
        self.sent += data
        self.sock.sendall(data)

    def receive(self, n: int) -> bytes:
        data = b""
        while len(data) < n and (part := self.sock.recv(n - len(data))):
            data += part
        self.received += len(data)
        return data

    def frame(self) -> channel.Frame:
        while (frame := self.opener.next()) is None:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionResetError
            self.received += len(data)
            self.opener.feed(data)
        return frame

    def is_dropped(self) -> bool:
        self.sock.settimeout(5)
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True
