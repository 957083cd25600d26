"""What the store keeps, and how it answers a rank's requests. Only the server's thread calls."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Sequence

from pgasdl.bootstrap.channel import Frame, Kind, Opener, ProtocolError, Sealer, Session, unpack_key
from pgasdl.bootstrap.store import RankState

MAX_WAITING = 256  # gets of one connection that wait for their keys
MAX_STORED = 256 << 20
NOBODY = 0xFFFFFFFF
GET_OPTIONS = struct.Struct("!BI")  # wait?, owner

Key = tuple[int, bytes]  # generation of the context, name


class Connection:
    """One accepted socket: a stranger until its proof was right, then a rank."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.session: Session | None = None
        self.claim = (0, 0)  # rank and size as the stranger says
        self.rank: int | None = None
        self.generation = 0
        self.said_bye = False
        self.closing = False
        self.opener: Opener | None = None
        self.sealer: Sealer | None = None
        self.waiting: dict[int, tuple[Key, int]] = {}  # request -> key, owner


class Table:
    """Keys and values, and the gets that wait for them.

    Parameters
    ----------
    states, generations : of every rank, kept by the server
    reply : sends one frame; may drop its connection, and so call ``forget_all``
    """

    def __init__(
        self,
        states: Sequence[RankState],
        generations: Sequence[int],
        reply: Callable[[Connection, Kind, int, bytes], None],
    ) -> None:
        self._states = states
        self._generations = generations
        self._reply = reply
        self._values: dict[Key, bytes] = {}
        self._stored = 0
        self._waiters: dict[Key, list[tuple[Connection, int]]] = {}

    def dispatch(self, connection: Connection, frame: Frame) -> None:
        """Answer one request, now or when its key comes; ProtocolError when it is none."""
        request = frame.request
        if frame.kind is Kind.PUT:
            name, value = unpack_key(frame.body)
            self._put(connection, request, (connection.generation, name), value)
        elif frame.kind is Kind.GET:
            self._get(connection, request, frame.body)
        elif frame.kind is Kind.DELETE:
            key = (connection.generation, unpack_key(frame.body)[0])
            self._stored -= self._size_of(key)
            self._values.pop(key, None)
            self._reply(connection, Kind.DONE, request, b"")
        elif frame.kind is Kind.STATES:
            self._reply(connection, Kind.VALUE, request, bytes(self._states[: 1 << 16]))
        elif frame.kind is Kind.CANCEL:
            self._forget(connection, request)
        elif frame.kind is Kind.BYE:
            connection.said_bye = True
        else:
            raise ProtocolError(f"{frame.kind.name} is not a request")

    def forget_all(self, connection: Connection) -> None:
        """The connection ended: nothing waits for it any more."""
        for request in list(connection.waiting):
            self._forget(connection, request)

    def announce_end(self, rank: int, connections: Iterable[Connection]) -> None:
        """``rank`` ended: end every get that waits for a key of its."""
        for connection in connections:
            for request, (key, owner) in list(connection.waiting.items()):
                if owner == rank and self._gone(rank, key[0]):
                    self._forget(connection, request)
                    self._reply(connection, Kind.GONE, request, struct.pack("!I", rank))

    def _put(self, connection: Connection, request: int, key: Key, value: bytes) -> None:
        added = len(key[1]) + len(value) - self._size_of(key)
        if self._stored + added > MAX_STORED:
            self._reply(connection, Kind.FAILED, request, b"the store is full")
            return
        self._stored += added
        self._values[key] = value
        self._reply(connection, Kind.DONE, request, b"")
        for other, waiting in self._waiters.pop(key, []):
            other.waiting.pop(waiting, None)
            self._reply(other, Kind.VALUE, waiting, value)

    def _get(self, connection: Connection, request: int, body: bytes) -> None:
        if len(body) < GET_OPTIONS.size:
            raise ProtocolError("cut request")
        wait, owner = GET_OPTIONS.unpack_from(body)
        if owner != NOBODY and owner >= len(self._states):
            raise ProtocolError("no such rank")
        key = (connection.generation, unpack_key(body[GET_OPTIONS.size :])[0])
        if key in self._values:
            self._reply(connection, Kind.VALUE, request, self._values[key])
        elif owner != NOBODY and self._gone(owner, key[0]):
            self._reply(connection, Kind.GONE, request, struct.pack("!I", owner))
        elif not wait:
            self._reply(connection, Kind.MISSING, request, b"")
        elif len(connection.waiting) >= MAX_WAITING:
            self._reply(connection, Kind.FAILED, request, b"too many gets at once")
        else:
            connection.waiting[request] = (key, owner)
            self._waiters.setdefault(key, []).append((connection, request))

    def _gone(self, owner: int, generation: int) -> bool:
        ended = self._states[owner] in (RankState.CLOSED, RankState.LOST)
        now = self._generations[owner]
        return now > generation or (ended and now == generation)

    def _forget(self, connection: Connection, request: int) -> None:
        entry = connection.waiting.pop(request, None)
        if entry is None:
            return
        key = entry[0]
        waiters = self._waiters.get(key, [])
        if (connection, request) in waiters:
            waiters.remove((connection, request))
            if not waiters:
                del self._waiters[key]

    def _size_of(self, key: Key) -> int:
        return len(key[1]) + len(self._values[key]) if key in self._values else 0
