"""The table of the store, and the answers to requests. Only the server's thread calls it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pgasdl.runtime.bootstrap.channel import (
    MAX_BODY,
    Frame,
    FrameKind,
    Opener,
    ProtocolError,
    Sealer,
    Session,
    unpack_key,
)
from pgasdl.runtime.bootstrap.store import RankState

MAX_WAITING = 256  # requests of one connection that wait for their keys
MAX_STORED = 256 << 20
NOBODY = 0xFFFFFFFF
GET_OPTIONS = struct.Struct("!BI")  # wait?, owner
GATHER_OPTIONS = struct.Struct("!BI")  # wait?, how many of the values are known already
LENGTH = struct.Struct("!I")

Key = tuple[int, bytes]  # generation of the context, name


@dataclass(frozen=True, slots=True)
class Gathering:
    """A request for the values of several ranks; one answer has them all."""

    ranks: tuple[int, ...]
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for ``key``.

    Attributes
    ----------
    owner : int
        The rank that puts it, or NOBODY.
    index : int
        Place of ``owner`` among the ranks of ``gathering``; the values before it are there.
    """

    key: Key
    owner: int
    gathering: Gathering | None = None
    index: int = 0


class Connection:
    """One accepted socket: a stranger until its proof is right, then a rank."""

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
        self.waiting: dict[int, Waiting] = {}  # by number of the request


class Table:
    """Keys and values, and the requests that wait for them.

    Parameters
    ----------
    states, generations
        Of every rank; the server keeps them.
    reply : Callable[[Connection, Kind, int, bytes], None]
        Sends one frame; it may drop the connection and so call ``forget_all``.
    """

    def __init__(
        self,
        states: Sequence[RankState],
        generations: Sequence[int],
        reply: Callable[[Connection, FrameKind, int, bytes], None],
    ) -> None:
        self._states = states
        self._generations = generations
        self._reply = reply
        self._values: dict[Key, bytes] = {}
        self._stored = 0
        self._waiters: dict[Key, list[tuple[Connection, int]]] = {}

    def dispatch(self, connection: Connection, frame: Frame) -> None:
        """Answer one request, now or when its key comes; ProtocolError if it is malformed."""
        request = frame.request
        if frame.kind is FrameKind.PUT:
            name, value = unpack_key(frame.body)
            self._put(connection, request, (connection.generation, name), value)
        elif frame.kind is FrameKind.GET:
            self._get(connection, request, frame.body)
        elif frame.kind is FrameKind.GATHER:
            self._gather(connection, request, frame.body)
        elif frame.kind is FrameKind.DELETE:
            key = (connection.generation, unpack_key(frame.body)[0])
            self._stored -= self._size_of(key)
            self._values.pop(key, None)
            self._reply(connection, FrameKind.DONE, request, b"")
        elif frame.kind is FrameKind.STATES:
            self._reply(connection, FrameKind.VALUE, request, bytes(self._states[: 1 << 16]))
        elif frame.kind is FrameKind.CANCEL:
            self._forget(connection, request)
        elif frame.kind is FrameKind.BYE:
            connection.said_bye = True
        else:
            raise ProtocolError(f"{frame.kind.name} is not a request")

    def forget_all(self, connection: Connection) -> None:
        """Forget all waiting requests of a connection that ended."""
        for request in list(connection.waiting):
            self._forget(connection, request)

    def announce_end(self, rank: int, connections: Iterable[Connection]) -> None:
        """End every request that waits for a key of ``rank``, which ended."""
        for connection in connections:
            for request, waiting in list(connection.waiting.items()):
                if waiting.owner == rank and self._gone(rank, waiting.key[0]):
                    self._forget(connection, request)
                    self._reply(connection, FrameKind.GONE, request, struct.pack("!I", rank))

    def _put(self, connection: Connection, request: int, key: Key, value: bytes) -> None:
        added = len(key[1]) + len(value) - self._size_of(key)
        if self._stored + added > MAX_STORED:
            self._reply(connection, FrameKind.FAILED, request, b"the store is full")
            return
        self._stored += added
        self._values[key] = value
        self._reply(connection, FrameKind.DONE, request, b"")
        for other, number in self._waiters.pop(key, []):
            waiting = other.waiting.pop(number, None)
            if waiting is None:
                continue  # dropped earlier in this loop
            if waiting.gathering is None:
                self._reply(other, FrameKind.VALUE, number, value)
            else:
                self._collect(other, number, waiting.gathering, waiting.index + 1)

    def _get(self, connection: Connection, request: int, body: bytes) -> None:
        if len(body) < GET_OPTIONS.size:
            raise ProtocolError("cut request")
        wait, owner = GET_OPTIONS.unpack_from(body)
        if owner != NOBODY and owner >= len(self._states):
            raise ProtocolError("no such rank")
        key = (connection.generation, unpack_key(body[GET_OPTIONS.size :])[0])
        if key in self._values:
            self._reply(connection, FrameKind.VALUE, request, self._values[key])
        else:
            self._await(connection, request, Waiting(key, owner), bool(wait))

    def _gather(self, connection: Connection, request: int, body: bytes) -> None:
        if len(body) < GATHER_OPTIONS.size:
            raise ProtocolError("cut request")
        wait, n_known = GATHER_OPTIONS.unpack_from(body)
        name, bits = unpack_key(body[GATHER_OPTIONS.size :])
        ranks = tuple(r for r in range(8 * len(bits)) if bits[r >> 3] >> (r & 7) & 1)
        if n_known >= len(ranks) or ranks[-1] >= len(self._states):
            raise ProtocolError("no such ranks")
        ranks = ranks[n_known:]
        keys = tuple((connection.generation, b"%s/%d" % (name, rank)) for rank in ranks)
        self._collect(connection, request, Gathering(ranks, keys), 0, bool(wait))

    def _collect(
        self,
        connection: Connection,
        request: int,
        gathering: Gathering,
        begin: int,
        wait: bool = True,
    ) -> None:
        """Answer if all values are there, else wait for the first missing one from ``begin``."""
        for index in range(begin, len(gathering.keys)):
            key = gathering.keys[index]
            if key not in self._values:
                waiting = Waiting(key, gathering.ranks[index], gathering, index)
                self._await(connection, request, waiting, wait)
                return
        answer = bytearray()
        for key in gathering.keys:
            value = self._values.get(key)
            # The client asks for the rest: what does not fit, or was deleted meanwhile.
            if value is None or len(answer) + LENGTH.size + len(value) > MAX_BODY:
                break
            answer += LENGTH.pack(len(value)) + value
        self._reply(connection, FrameKind.VALUE, request, bytes(answer))

    def _await(self, connection: Connection, request: int, waiting: Waiting, wait: bool) -> None:
        key, owner = waiting.key, waiting.owner
        if request in connection.waiting:
            raise ProtocolError("the number of a request that is not answered yet")
        if owner != NOBODY and self._gone(owner, key[0]):
            self._reply(connection, FrameKind.GONE, request, struct.pack("!I", owner))
        elif not wait:
            self._reply(connection, FrameKind.MISSING, request, struct.pack("!I", owner))
        elif len(connection.waiting) >= MAX_WAITING:
            self._reply(connection, FrameKind.FAILED, request, b"too many gets at once")
        else:
            connection.waiting[request] = waiting
            self._waiters.setdefault(key, []).append((connection, request))

    def _gone(self, owner: int, generation: int) -> bool:
        ended = self._states[owner] in (RankState.CLOSED, RankState.LOST)
        now = self._generations[owner]
        return now > generation or (ended and now == generation)

    def _forget(self, connection: Connection, request: int) -> None:
        waiting = connection.waiting.pop(request, None)
        if waiting is None:
            return
        waiters = self._waiters.get(waiting.key, [])
        if (connection, request) in waiters:
            waiters.remove((connection, request))
            if not waiters:
                del self._waiters[waiting.key]

    def _size_of(self, key: Key) -> int:
        return len(key[1]) + len(self._values[key]) if key in self._values else 0
