"""The table of the store, and the answers to requests. The server's thread calls it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence

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
NEVER = 1 << 62  # the generation of a rank whose process has ended
GET_OPTIONS = struct.Struct("!BI")  # wait?, owner
GATHER_OPTIONS = struct.Struct("!BI")  # wait?, how many of the values are known already
NUMBER = struct.Struct("!I")  # a rank, or the length of a value
AS_BEFORE = 0xFFFFFFFF  # in place of a length: the value is that of the rank before

Key = tuple[int, bytes]  # generation of the context, name
Identity = tuple[int, FrameKind, bytes]  # generation, kind, body without its first byte


class Question:
    """The values of some keys, for which one or more requests wait.

    All ranks that gather ask the same, so they wait as one, and one answer is made for all. Several
    keys are a gather. Each key has an owner, the rank that puts it, or NOBODY. The first
    ``n_there`` values are there. ``askers`` are connections and numbers of the requests, in order
    of arrival.
    """

    __slots__ = ("askers", "identity", "keys", "n_there", "owners")

    def __init__(self, identity: Identity, keys: tuple[Key, ...], owners: tuple[int, ...]) -> None:
        self.identity = identity
        self.keys = keys
        self.owners = owners
        self.n_there = 0
        self.askers: dict[tuple[Connection, int], None] = {}

    @property
    def owner(self) -> int:
        """The rank that owes the first missing value."""
        return self.owners[self.n_there]

    def missing(self, values: Mapping[Key, bytes]) -> Key | None:
        """Return the first key that has no value yet."""
        for index in range(self.n_there, len(self.keys)):
            if self.keys[index] not in values:
                self.n_there = index
                return self.keys[index]
        return None


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
        self.waiting: dict[int, Question] = {}  # by number of the request


class Table:
    """Keys and values, and the requests that wait for them.

    The server keeps the ranks' ``states`` and ``generations``. ``reply`` sends one frame; it may
    drop the connection and so call ``forget_all``.
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
        self._questions: dict[Identity, Question] = {}
        self._waiters: dict[Key, list[Question]] = {}  # by the first key that they miss
        self._answered: tuple[Identity, bytes] | None = None  # the gather answered last

    def value(self, key: Key) -> bytes:
        """Return the value of a key, or b"". Any thread may call it."""
        return self._values.get(key, b"")

    def dispatch(self, connection: Connection, frame: Frame) -> None:
        """Answer one request, now or when its key comes; ProtocolError if it is malformed."""
        request = frame.request
        if frame.kind is FrameKind.PUT:
            name, value = unpack_key(frame.body)
            self._put(connection, request, (connection.generation, name), value)
        elif frame.kind in (FrameKind.GET, FrameKind.GATHER):
            self._ask(connection, frame)
        elif frame.kind is FrameKind.DELETE:
            self._delete(connection, request, (connection.generation, unpack_key(frame.body)[0]))
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

    def announce_end(self, rank: int) -> None:
        """End every request that waits for a key of ``rank``, which ended."""
        hopeless = [
            question
            for question in self._questions.values()
            if question.owner == rank and self._is_hopeless(question)
        ]
        for question in hopeless:
            self._withdraw(question)
        for question in hopeless:
            self._answer_all(question, FrameKind.GONE, NUMBER.pack(rank))

    def _put(self, connection: Connection, request: int, key: Key, value: bytes) -> None:
        added = len(key[1]) + len(value) - self._size_of(key)
        if self._stored + added > MAX_STORED:
            self._reply(connection, FrameKind.FAILED, request, b"the store is full")
            return
        self._stored += added
        if key in self._values:
            self._answered = None
        self._values[key] = value
        ended = []
        for question in self._waiters.pop(key, []):
            missing = question.missing(self._values)
            if missing is None or self._is_hopeless(question):
                del self._questions[question.identity]
                ended.append((question, missing is None))
            else:
                self._waiters.setdefault(missing, []).append(question)
        # A reply may drop a connection: from here on everything is in its place.
        self._reply(connection, FrameKind.DONE, request, b"")
        for question, complete in ended:
            if complete:
                self._answer_all(question, FrameKind.VALUE, self._answer(question))
            else:
                self._answer_all(question, FrameKind.GONE, NUMBER.pack(question.owner))

    def _delete(self, connection: Connection, request: int, key: Key) -> None:
        self._stored -= self._size_of(key)
        self._values.pop(key, None)
        self._answered = None
        self._reply(connection, FrameKind.DONE, request, b"")

    def _ask(self, connection: Connection, frame: Frame) -> None:
        """Answer if all values are there, else let the request wait."""
        wait, identity = frame.body[:1] > b"\0", (connection.generation, frame.kind, frame.body[1:])
        if frame.request in connection.waiting:
            raise ProtocolError("the number of a request that is not answered yet")
        if self._answered is not None and self._answered[0] == identity:
            self._reply(connection, FrameKind.VALUE, frame.request, self._answered[1])
            return
        question = self._questions.get(identity) or self._understood(identity)
        missing = question.missing(self._values)
        owner = NUMBER.pack(question.owner)
        if missing is None:
            self._reply(connection, FrameKind.VALUE, frame.request, self._answer(question))
        elif self._is_hopeless(question):
            self._reply(connection, FrameKind.GONE, frame.request, owner)
        elif not wait:
            self._reply(connection, FrameKind.MISSING, frame.request, owner)
        elif len(connection.waiting) >= MAX_WAITING:
            self._reply(connection, FrameKind.FAILED, frame.request, b"too many gets at once")
        else:
            connection.waiting[frame.request] = question
            question.askers[connection, frame.request] = None
            if identity not in self._questions:
                self._questions[identity] = question
                self._waiters.setdefault(missing, []).append(question)

    def _understood(self, identity: Identity) -> Question:
        """Return the question in the body of a request; ProtocolError if there is none."""
        generation, kind, body = identity
        if len(body) < NUMBER.size:
            raise ProtocolError("cut request")
        (number,) = NUMBER.unpack_from(body)  # the second of the options
        name, bits = unpack_key(body[NUMBER.size :])
        if kind is FrameKind.GET:
            if number != NOBODY and number >= len(self._states):
                raise ProtocolError("no such rank")
            return Question(identity, ((generation, name),), (number,))
        ranks = tuple(r for r in range(8 * len(bits)) if bits[r >> 3] >> (r & 7) & 1)
        if number >= len(ranks) or ranks[-1] >= len(self._states):
            raise ProtocolError("no such ranks")
        ranks = ranks[number:]
        keys = tuple((generation, b"%s/%d" % (name, rank)) for rank in ranks)
        return Question(identity, keys, ranks)

    def _answer(self, question: Question) -> bytes:
        if question.identity[1] is FrameKind.GET:
            return self._values[question.keys[0]]
        answer = bytearray()
        last: bytes | None = None
        for key in question.keys:
            value = self._values.get(key)
            added = b"" if value is None else _entry(value, last)
            # The client asks for the rest: what does not fit, or was deleted meanwhile.
            if value is None or len(answer) + len(added) > MAX_BODY:
                break
            answer += added
            last = value
        self._answered = question.identity, bytes(answer)
        return self._answered[1]

    def _answer_all(self, question: Question, kind: FrameKind, body: bytes) -> None:
        """Answer all requests that ask a question."""
        for connection, request in list(question.askers):
            if connection.waiting.pop(request, None) is not None:  # else dropped in this loop
                self._reply(connection, kind, request, body)

    def _is_hopeless(self, question: Question) -> bool:
        """Whether the rank that owes the first missing value ended before it put that."""
        owner, generation = question.owner, question.identity[0]
        if owner == NOBODY:
            return False
        ended = self._states[owner] in (RankState.CLOSED, RankState.LOST)
        now = self._generations[owner]
        return now > generation or (ended and now == generation)

    def _forget(self, connection: Connection, request: int) -> None:
        question = connection.waiting.pop(request, None)
        if question is None:
            return
        del question.askers[connection, request]
        if not question.askers and self._questions.get(question.identity) is question:
            self._withdraw(question)

    def _withdraw(self, question: Question) -> None:
        del self._questions[question.identity]
        key = question.keys[question.n_there]
        waiters = self._waiters[key]
        waiters.remove(question)
        if not waiters:
            del self._waiters[key]

    def _size_of(self, key: Key) -> int:
        return len(key[1]) + len(self._values[key]) if key in self._values else 0


def _entry(value: bytes, last: bytes | None) -> bytes:
    """Return a value's bytes in the answer to a gather, where many ranks give the same value."""
    return NUMBER.pack(AS_BEFORE) if value == last else NUMBER.pack(len(value)) + value
