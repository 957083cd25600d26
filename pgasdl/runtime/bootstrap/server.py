"""The server of the bootstrap store: one thread, one selector; strangers stay outside.

A connection that has not proved itself costs one small object for at most two seconds. At most
``MIN_PENDING`` of them exist, or twice the number of ranks until all have come, but no more than an
eighth of the descriptors allowed. A newer one then evicts another: one that has said nothing, else
any. Chance picks it. So a stranger that connects without end cannot shut out ranks, not even slow
ones, which try again. The server first reads the bytes that have arrived: it evicts no rank whose
proof is here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Self

from pgasdl.config import Address
from pgasdl.errors import BootstrapError
from pgasdl.runtime.bootstrap.channel import (
    CHALLENGE,
    HANDSHAKE_SECONDS,
    HELLO,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    SECRET_BYTES,
    WELCOME,
    FrameKind,
    Opener,
    ProtocolError,
    Sealer,
    Session,
    address_text,
    same,
)
from pgasdl.runtime.bootstrap.store import REASON, RankState
from pgasdl.runtime.bootstrap.table import NEVER, Connection, Table

BACKLOG = 4096  # a whole job may connect at once; the kernel may allow less
MIN_PENDING = 128
_FEWEST_PENDING = 16
MAX_UNSENT = 16 << 20
_WARNING_SECONDS = 10.0  # from one warning to the next

_LOG = logging.getLogger("pgasdl.runtime.bootstrap")


def listen(bind: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at ``bind``, for a later server; BootstrapError: it cannot."""
    if not bind:
        raise BootstrapError("the store binds to one address, give it")
    try:
        places = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)
        family, *_, place = min(places, key=lambda each: each[0])  # IPv4 if it has both
        return socket.create_server(place, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        is_foreign = getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        hint = "; `pgasdl topo` has this machine's" if is_foreign else ""
        raise BootstrapError(
            f"cannot serve the store on {bind} port {port}: {error}{hint}"
        ) from error


class StoreServer:
    """Serves the store to ``size`` ranks from a thread of its own until ``close``.

    It listens at one address; port 0 takes a free one: see ``address``. ``listener``, a socket of
    :func:`listen`, takes the place of ``bind`` and ``port``; this server closes it. ``beacon`` is a
    listening AF_UNIX socket: a process of this process's uid that connects to it gets secret and
    port. It is closed once every rank has connected.
    """

    def __init__(
        self,
        secret: bytes,
        size: int,
        bind: str = "127.0.0.1",
        port: int = 0,
        *,
        job_id: str = "",
        listener: socket.socket | None = None,
        beacon: socket.socket | None = None,
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise BootstrapError(f"the secret has {len(secret)} bytes, it must have {SECRET_BYTES}")
        self.size = size
        self.came = False  # some rank
        self._secret = secret
        self._job_id = job_id
        self._salt = secrets.token_bytes(32)  # no two servers' contexts have one token
        self._beacon = beacon
        self._listener = listen(bind, port) if listener is None else listener
        name = self._listener.getsockname()
        self.address: Address = (name[0], name[1])
        self._connections: set[Connection] = set()
        self._pending: dict[Connection, None] = {}  # in order of arrival, and so of deadline
        self._ranks: list[Connection | None] = [None] * size
        self._states = [RankState.ABSENT] * size
        self._generations = [-1] * size
        self._table = Table(self._states, self._generations, self._reply)
        self._changed = threading.Condition()
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        self._next_warning = 0.0
        self._ended: deque[int] = deque()  # ranks whose processes ended, not noted yet
        self._over: set[int] = set()  # those that were noted
        self._selector.register(self._wake, selectors.EVENT_READ, self._note_ends)
        if beacon is not None:
            self._watch(beacon, self._answer_beacon)
        _FORKED.add(self)
        self._thread = threading.Thread(target=self._serve, name="pgasdl-store", daemon=True)
        self._thread.start()

    @property
    def states(self) -> tuple[RankState, ...]:
        """Return the state of every rank's connection."""
        with self._changed:
            return tuple(self._states)

    def close(self, drain: float = 0.0) -> None:
        """Stop serving. First wait up to ``drain`` seconds for connected ranks to leave."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or RankState.CONNECTED not in self._states, drain
            )
            if self._stopping:
                return
            self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def reason(self, rank: int) -> str:
        """Return the error that ends ``rank``, as it has said, else "". Call it before `ended`."""
        key = self._generations[rank], f"{REASON}/{rank}".encode()
        return self._table.value(key).decode(errors="replace")

    def ended(self, rank: int) -> None:
        """Note that the process of ``rank`` has ended: no rank waits for it, in any generation."""
        self._ended.append(rank)
        os.eventfd_write(self._wake, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Everything below runs in the server's thread.

    def _watch(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, handler)

    def _serve(self) -> None:
        try:
            while not self._stopping:
                timeout = None
                if self._pending:
                    timeout = max(0.0, next(iter(self._pending)).deadline - time.monotonic())
                for key, events in self._selector.select(timeout):
                    key.data(events)
                now = time.monotonic()
                while self._pending and (oldest := next(iter(self._pending))).deadline <= now:
                    self._drop(oldest, "no proof in time")
        finally:
            for connection in list(self._connections):
                self._drop(connection, "the store closes")
            self._selector.close()
            for sock in (self._listener, self._beacon):
                if sock is not None:
                    sock.close()

    def _note_ends(self, _events: int) -> None:
        os.eventfd_read(self._wake)
        while self._ended:
            rank = self._ended.popleft()
            self._over.add(rank)
            if self._ranks[rank] is None:  # else once its last words have been read
                known = self._states[rank]
                self._leave(rank, RankState.CLOSED if known is RankState.ABSENT else known)

    def _accept(self, _events: int) -> None:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors or memory: make room, and do not spin on the listener.
                if time.monotonic() >= self._next_warning:
                    self._next_warning = time.monotonic() + _WARNING_SECONDS
                    _LOG.warning("store: accept failed: %s", error)
                self._make_room(len(self._pending))
                time.sleep(0.01)
                return
            self._make_room(self._most_pending())
            connection = Connection(sock, time.monotonic() + HANDSHAKE_SECONDS)
            self._connections.add(connection)
            self._pending[connection] = None
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._watch(sock, lambda events, c=connection: self._ready(c, events))  # type: ignore[misc]
            except OSError as error:
                self._drop(connection, str(error))

    def _most_pending(self) -> int:
        """Return how many strangers there may be: the job needs descriptors, too."""
        wanted = max(MIN_PENDING, 2 * self.size if RankState.ABSENT in self._states else 0)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(wanted, max(_FEWEST_PENDING, limit // 8))

    def _make_room(self, n_most: int) -> None:
        """Evict connections until fewer than ``n_most`` have not proved themselves."""
        while self._pending and len(self._pending) >= n_most:
            silent = [connection for connection in self._pending if connection.session is None]
            victim = secrets.choice(silent or list(self._pending))
            self._ready(victim, selectors.EVENT_READ)
            heard = bool(silent) and victim.session is not None
            if victim in self._pending and not heard:
                self._drop(victim, "too many connections")

    def _answer_beacon(self, _events: int) -> None:
        if self._beacon is None:
            return
        with contextlib.suppress(OSError):
            sock, _ = self._beacon.accept()
            with sock:
                credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack("iII", credentials)[1] == os.geteuid():
                    sock.send(self._beacon_message(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _beacon_message(self) -> bytes:
        """Return secret and port, for a rank of this user."""
        return self._secret + struct.pack("!H", self.address[1])

    def _ready(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return  # dropped earlier in this turn
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection in self._connections:
                self._read(connection)
        except BlockingIOError:
            pass  # it was read already in this turn, to make room
        except (OSError, ProtocolError) as error:
            self._drop(connection, str(error))
        except Exception as error:  # one connection must never end the thread
            _LOG.exception("store: unexpected error")
            self._drop(connection, repr(error))

    def _read(self, connection: Connection) -> None:
        if connection.opener is not None:
            data = connection.sock.recv(1 << 16)
            if data and not connection.closing:
                connection.opener.feed(data)
                while connection in self._connections:
                    frame = connection.opener.next()
                    if frame is None:
                        break
                    self._table.dispatch(connection, frame)
        else:
            wanted = HELLO.size if connection.session is None else MAC_BYTES
            data = connection.sock.recv(wanted - len(connection.inbox))
            connection.inbox += data
            hello = connection.session is None
            if hello and not MAGIC.startswith(connection.inbox[: len(MAGIC)]):
                raise ProtocolError("not a member of any job")
            if len(connection.inbox) == wanted:
                message = bytes(connection.inbox)
                connection.inbox.clear()
                step = self._challenge if connection.session is None else self._admit
                step(connection, message)
        if not data:
            self._drop(connection, "closed by the other side")

    def _challenge(self, connection: Connection, hello: bytes) -> None:
        _magic, rank, size, client_nonce = HELLO.unpack(hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        sock = connection.sock
        connection.claim = (rank, size)
        connection.session = Session.derive(
            self._secret,
            self._job_id,
            connection.claim,
            (client_nonce, nonce),
            (address_text(sock.getpeername()), address_text(sock.getsockname())),
        )
        self._send(connection, CHALLENGE.pack(nonce, connection.session.server_proof))

    def _admit(self, connection: Connection, proof: bytes) -> None:
        session = connection.session
        if session is None or not same(session.client_proof, proof):
            raise ProtocolError("wrong proof: another secret or job id")
        del self._pending[connection]
        connection.sealer, connection.opener = Sealer(session.to_client), Opener(session.to_server)
        rank, size = connection.claim
        if size != self.size or rank >= size:
            self._refuse(connection, f"it is rank {rank} of {size}, the store serves {self.size}")
            return
        if self._ranks[rank] is not None:
            self._refuse(connection, f"rank {rank} is already connected")
            return
        connection.rank = rank
        self.came = True
        with self._changed:
            self._ranks[rank] = connection
            self._states[rank] = RankState.CONNECTED
            self._generations[rank] += 1
            self._changed.notify_all()
        connection.generation = self._generations[rank]
        if RankState.ABSENT not in self._states and self._beacon is not None:
            self._selector.unregister(self._beacon)
            self._beacon.close()
            self._beacon = None
        self._reply(
            connection, FrameKind.WELCOME, 0, WELCOME.pack(self._salt, connection.generation)
        )

    def _refuse(self, connection: Connection, reason: str) -> None:
        connection.closing = True
        self._reply(connection, FrameKind.REFUSED, 0, reason.encode())

    def _reply(
        self, connection: Connection, kind: FrameKind, request: int, body: bytes = b""
    ) -> None:
        if connection.sealer is None or connection not in self._connections:
            return
        try:
            self._send(connection, connection.sealer.seal(kind, request, body))
        except OSError as error:
            self._drop(connection, str(error))

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.outbox += data
        if len(connection.outbox) > MAX_UNSENT:
            raise OSError(errno.ENOBUFS, "the rank does not read its replies")
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            while connection.outbox:
                del connection.outbox[: connection.sock.send(connection.outbox)]
        if not connection.outbox and connection.closing:
            self._drop(connection, "refused")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._pending.pop(connection, None)
        _LOG.debug("store: connection of rank %s ended: %s", connection.rank, reason)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        self._table.forget_all(connection)
        rank = connection.rank
        if rank is None:
            return
        self._leave(rank, RankState.CLOSED if connection.said_bye else RankState.LOST)

    def _leave(self, rank: int, state: RankState) -> None:
        with self._changed:
            self._ranks[rank] = None
            self._states[rank] = state
            if rank in self._over:
                self._generations[rank] = NEVER
            self._changed.notify_all()
        self._table.announce_end(rank)

    def _close_in_child(self) -> None:
        # A forked worker must not keep the ranks' connections open. No unregister: the selector
        # is shared with the parent, closing our copies of the descriptors is not.
        self._stopping = True
        self._changed = threading.Condition()
        for connection in list(self._connections):
            connection.sock.close()
        self._listener.close()
        if self._beacon is not None:
            self._beacon.close()


_FORKED: weakref.WeakSet[StoreServer] = weakref.WeakSet()


def _after_fork() -> None:
    for server in _FORKED:
        server._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
