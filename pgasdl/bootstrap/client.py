"""A rank's side of the bootstrap store."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from pgasdl.bootstrap.channel import (
    CHALLENGE,
    HANDSHAKE_SECONDS,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    SECRET_BYTES,
    Frame,
    Kind,
    Opener,
    ProtocolError,
    Sealer,
    Session,
    address_text,
    pack_key,
    same,
)
from pgasdl.bootstrap.store import RankState, Store, describe_missing
from pgasdl.bootstrap.table import GET_OPTIONS, NOBODY
from pgasdl.config import Address, format_value
from pgasdl.errors import BootstrapError, ClosedError, PeerLost, RankError, Timeout

_STATUS_SECONDS = 0.5


class _RefusedError(Exception):
    """The store said no, and proved that it is the store."""


class _StrangerError(Exception):
    """What answers there does not know this job's secret."""


class StoreClient(Store):
    """Connects to a :class:`StoreServer`, which it makes prove itself as it proves itself.

    Parameters
    ----------
    address : ``(host, port)``, or several to try in turn until the right one answers
    secret, size, job_id : the server's
    timeout : seconds for connecting, and default of the calls
    host : the rank that serves the store, None: the launcher; named when the store is lost

    Raises
    ------
    Timeout          nothing answered in time
    BootstrapError   what answered is not this job's store, or it refused this rank
    """

    def __init__(
        self,
        address: Address | Sequence[Address],
        secret: bytes,
        rank: int,
        size: int,
        job_id: str = "",
        timeout: float = 60.0,
        *,
        host: int | None = None,
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise BootstrapError(f"the secret has {len(secret)} bytes, it must have {SECRET_BYTES}")
        if not 0 <= rank < size:
            raise RankError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._host = host
        self._closed = False
        self._broken: Callable[[], Exception] | None = None  # makes the error of every later call
        self._state = threading.Condition()
        self._next_request = 0
        self._replies: dict[int, Frame] = {}
        self._expected: set[int] = set()
        self._reading = False
        addresses = [address] if _is_address(address) else list(address)
        self._connect(addresses, secret, job_id, time.monotonic() + timeout)  # type: ignore[arg-type]
        _FORKED.add(self)

    def _connect(
        self, addresses: list[Address], secret: bytes, job_id: str, deadline: float
    ) -> None:
        places = ", ".join(format_value(address) for address in addresses)
        pause = 0.01
        rejections = refusals = 0
        last: Exception | None = None
        while True:
            for address in addresses:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise Timeout(
                        f"rank {self.rank}: no store of job {job_id!r} at {places} within "
                        f"{self.timeout:g} s ({last or 'not tried'})"
                    )
                try:
                    self._handshake(address, secret, job_id, min(remaining, 5.0))
                    return
                except _RefusedError as error:
                    # A connection that just ended may not have been noticed yet: ask again.
                    refusals += 1
                    if refusals > 10 or "already" not in str(error):
                        raise BootstrapError(f"the store at {places} refused: {error}") from None
                    last = error
                except _StrangerError as error:
                    if len(addresses) == 1:
                        raise BootstrapError(
                            f"what answers at {places} is not the store of this job: {error}"
                        ) from None
                    last = error
                except _RejectedError as error:
                    rejections += 1
                    if rejections >= 4:
                        raise BootstrapError(
                            f"rank {self.rank}: the store at {places} does not accept this rank's "
                            "proof: another secret, job id or address translation between the two"
                        ) from None
                    last = error
                except socket.gaierror as error:
                    raise BootstrapError(f"cannot resolve {address[0]!r}: {error}") from error
                except (OSError, ProtocolError) as error:
                    last = error
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.2)

    def _handshake(self, address: Address, secret: bytes, job_id: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        sock = socket.create_connection(address, limit)
        try:
            mine, theirs = address_text(sock.getsockname()), address_text(sock.getpeername())
            if mine == theirs:
                raise ConnectionRefusedError("connected to itself")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(NONCE_BYTES)
            sock.sendall(HELLO.pack(MAGIC, self.rank, self.size, nonce))
            server_nonce, proof = CHALLENGE.unpack(_receive(sock, CHALLENGE.size, deadline))
            session = Session.derive(
                secret, job_id, (self.rank, self.size), (nonce, server_nonce), (mine, theirs)
            )
            if not same(session.server_proof, proof):
                raise _StrangerError("it has another secret or job id")
            sock.sendall(session.client_proof)
            opener = Opener(session.to_client)
            frame = self._first_frame(sock, opener, deadline)
            if frame.kind is Kind.REFUSED:
                raise _RefusedError(frame.body.decode(errors="replace"))
            if frame.kind is not Kind.WELCOME:
                raise ProtocolError("no welcome")
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._sock, self._opener, self._sealer = sock, opener, Sealer(session.to_server)

    @staticmethod
    def _first_frame(sock: socket.socket, opener: Opener, deadline: float) -> Frame:
        while (frame := opener.next()) is None:
            try:
                opener.feed(_receive(sock, 1, deadline))
            except ConnectionError as error:
                raise _RejectedError("it hung up on this rank's proof") from error
        return frame

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        self._request(Kind.PUT, _body(key, value), timeout, f"put {key!r}")

    def delete(self, key: str, timeout: float | None = None) -> None:
        self._request(Kind.DELETE, _body(key), timeout, f"delete {key!r}")

    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        frame = self._request(Kind.STATES, b"", timeout, "states")
        return tuple(RankState(value) for value in frame.body)

    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        if owner is not None and not 0 <= owner < self.size:
            raise RankError(f"rank {owner} is not one of {self.size}")
        limit = self.timeout if timeout is None else timeout
        options = GET_OPTIONS.pack(limit > 0, NOBODY if owner is None else owner)
        try:
            # One try still needs the answer to come back.
            frame = self._request(
                Kind.GET, options + _body(key), limit if limit > 0 else None, f"get {key!r}"
            )
        except Timeout:
            frame = None
        if frame is not None and frame.kind is Kind.VALUE:
            return frame.body
        if frame is not None and frame.kind is Kind.GONE:
            (rank,) = struct.unpack("!I", frame.body)
            raise PeerLost(f"rank {rank} ended before it gave {key!r}", rank)
        missing = ""
        if limit > 0:
            with contextlib.suppress(Timeout, BootstrapError, PeerLost):
                missing = describe_missing(self.states(_STATUS_SECONDS))
        raise Timeout(f"rank {self.rank}: {key!r} was not there within {limit:g} s{missing}")

    def close(self, *, drain: float = 5.0) -> None:
        with self._state:
            if self._closed:
                return
            if self._broken is None:
                with contextlib.suppress(OSError):
                    self._sock.send(self._sealer.seal(Kind.BYE, 0))
            self._closed = True
            self._broken = lambda: ClosedError(f"rank {self.rank}: the store is closed")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._state.notify_all()

    def _request(self, kind: Kind, body: bytes, timeout: float | None, what: str) -> Frame:
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        with self._state:
            request = self._next_request = (self._next_request + 1) & 0xFFFFFFFF
            self._send(self._sealer.seal(kind, request, body), deadline)
            self._expected.add(request)
        try:
            frame = self._await(request, deadline)
        except BaseException:
            with self._state:
                self._expected.discard(request)
                self._replies.pop(request, None)
                if kind is Kind.GET and self._broken is None:
                    self._send(
                        self._sealer.seal(Kind.CANCEL, request), time.monotonic() + _STATUS_SECONDS
                    )
            raise
        if frame is None:
            raise Timeout(f"rank {self.rank}: the store did not answer {what} within {limit:g} s")
        if frame.kind is Kind.FAILED:
            raise BootstrapError(f"{what}: {frame.body.decode(errors='replace')}")
        return frame

    def _send(self, data: bytes, deadline: float) -> None:
        self._check()
        sent = 0
        try:
            while sent < len(data):
                try:
                    sent += self._sock.send(memoryview(data)[sent:])
                except BlockingIOError:
                    if not _poll(self._sock, select.POLLOUT, deadline):
                        raise TimeoutError("the store does not read") from None
        except BaseException as error:
            self._fail(error)  # half a frame cannot be taken back
            if isinstance(error, OSError):
                self._check()
            raise

    def _await(self, request: int, deadline: float) -> Frame | None:
        """One thread at a time reads, for all; the others sleep until it has their reply."""
        while True:
            with self._state:
                while True:
                    if request in self._replies:
                        self._expected.discard(request)
                        return self._replies.pop(request)
                    self._check()
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise Timeout("no answer")
                    if not self._reading:
                        break
                    self._state.wait(remaining)
                self._reading = True
            try:
                self._pump(deadline)
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()

    def _pump(self, deadline: float) -> None:
        try:
            if not _poll(self._sock, select.POLLIN, deadline):
                return
            data = self._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("it closed the connection")
            with self._state:
                self._opener.feed(data)
                while (frame := self._opener.next()) is not None:
                    if frame.request in self._expected:
                        self._replies[frame.request] = frame
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError, ProtocolError) as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._broken is not None:
                return
            host = self._host
            if host is None:
                gone = f"the launcher, which serves the store, is gone: {error}"
                self._broken = lambda: BootstrapError(gone)
            else:
                lost = f"rank {host}, which serves the store, is gone: {error}"
                self._broken = lambda: PeerLost(lost, host)
            self._state.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken()

    def _close_in_child(self) -> None:
        # The parent's locks may be held for ever here, and its connection must not be kept open.
        self._state = threading.Condition()
        self._closed = True
        self._broken = lambda: ClosedError("this store belongs to the parent of this process")
        self._sock.close()

    def __repr__(self) -> str:
        return f"StoreClient(rank={self.rank}, size={self.size})"


class _RejectedError(Exception):
    """The store hung up instead of welcoming a proof."""


def _is_address(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _body(key: str, value: bytes = b"") -> bytes:
    try:
        return pack_key(key, value)
    except ValueError as error:
        raise BootstrapError(str(error)) from None


def _poll(sock: socket.socket, events: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    # An hour at most: poll takes 32 bits of milliseconds, and the callers look again.
    remaining = min(max(0.0, deadline - time.monotonic()), 3600.0)
    return bool(poller.poll(remaining * 1000 + 0.5))


def _receive(sock: socket.socket, n: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


assert HANDSHAKE_SECONDS < 5.0  # the client outlasts the server's patience

_FORKED: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _FORKED:
        client._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
