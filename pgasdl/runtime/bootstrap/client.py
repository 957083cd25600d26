"""A rank's side of the bootstrap store."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from pgasdl.config import Address
from pgasdl.errors import BootstrapError, ClosedError, PeerLostError, PgasTimeoutError, RankError
from pgasdl.runtime.bootstrap.channel import (
    SECRET_BYTES,
    Frame,
    FrameKind,
    ProtocolError,
    pack_key,
)
from pgasdl.runtime.bootstrap.entry import admit
from pgasdl.runtime.bootstrap.store import LOOK_SECONDS, RankState, Store, bitmap, describe_missing
from pgasdl.runtime.bootstrap.table import AS_BEFORE, GATHER_OPTIONS, GET_OPTIONS, NOBODY, NUMBER

_STATUS_SECONDS = 0.5
_T = TypeVar("_T")


class StoreClient(Store):
    """Connects to a :class:`StoreServer`; each side proves itself to the other.

    It tries several addresses in turn until the right one answers. ``secret``, ``size`` and
    ``job_id`` equal the server's. ``host`` is the rank that serves, None: the launcher; errors name
    it when the store is lost. ``look`` is called ten times a second while nothing answers; its
    exception ends the wait. PgasTimeoutError: nothing answered. BootstrapError: another server did,
    or the store refused this rank.
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
        look: Callable[[], None] | None = None,
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
        self._broken: Callable[[], Exception] | None = (
            None  # makes the error that every later call raises
        )
        self._state = threading.Condition()
        self._next_request = 0
        self._replies: dict[int, Frame] = {}
        self._expected: set[int] = set()
        self._reading = False
        addresses = [address] if _is_address(address) else list(address)
        admission = admit(addresses, secret, rank, size, job_id, timeout, look)  # type: ignore[arg-type]
        self._sock, self._opener, self._sealer = admission.sock, admission.opener, admission.sealer
        self.token = admission.token
        _FORKED.add(self)

    @property
    def local_host(self) -> str:
        """Our own address on the way to the store."""
        return str(self._sock.getsockname()[0])

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Put a value; see :meth:`Store.put`."""
        self._request(FrameKind.PUT, _body(key, value), timeout, f"put {key!r}")

    def delete(self, key: str, timeout: float | None = None) -> None:
        """Delete a value; see :meth:`Store.delete`."""
        self._request(FrameKind.DELETE, _body(key), timeout, f"delete {key!r}")

    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        """Return every rank's state; see :meth:`Store.states`."""
        frame = self._request(FrameKind.STATES, b"", timeout, "states")
        return _understood(_states_in, frame)

    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        """Get a value; see :meth:`Store.get`."""
        if owner is not None and not 0 <= owner < self.size:
            raise RankError(f"rank {owner} is not one of {self.size}")
        limit = self.timeout if timeout is None else timeout
        options = GET_OPTIONS.pack(limit > 0, NOBODY if owner is None else owner)
        try:
            # One try still needs the answer to come back.
            frame = self._request(
                FrameKind.GET, options + _body(key), limit if limit > 0 else None, f"get {key!r}"
            )
        except PgasTimeoutError:
            frame = None
        if frame is not None and frame.kind is FrameKind.VALUE:
            return frame.body
        if frame is not None and frame.kind is FrameKind.GONE:
            rank = _understood(_rank_in, frame)
            raise PeerLostError(f"rank {rank} ended before it gave {key!r}", rank)
        raise self._not_there(key, limit)

    def _not_there(self, key: str, limit: float) -> PgasTimeoutError:
        missing = ""
        if limit > 0:
            with contextlib.suppress(PgasTimeoutError, BootstrapError, PeerLostError):
                missing = describe_missing(self.states(_STATUS_SECONDS))
        return PgasTimeoutError(
            f"rank {self.rank}: {key!r} was not there within {limit:g} s{missing}"
        )

    def gather(
        self,
        key: str,
        ranks: Sequence[int],
        timeout: float | None = None,
        *,
        look: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Get a value of each rank; see :meth:`Store.gather`."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        if not all(0 <= rank < self.size for rank in ranks):
            raise RankError(f"ranks are 0 to {self.size - 1}")
        body = _body(key, bitmap(ranks, self.size))
        values: list[bytes] = []
        while len(values) < len(ranks):
            # One try still needs the answer to come back.
            remaining = max(0.0, deadline - time.monotonic()) if limit > 0 else None
            options = GATHER_OPTIONS.pack(limit > 0, len(values))
            try:
                frame = self._request(
                    FrameKind.GATHER, options + body, remaining, f"get {key!r}", look
                )
            except PgasTimeoutError:
                options = GATHER_OPTIONS.pack(False, len(values))  # ask which rank owes its value
                frame = self._request(
                    FrameKind.GATHER, options + body, _STATUS_SECONDS, f"get {key!r}"
                )
            if frame.kind is FrameKind.VALUE:
                values += _understood(_values_in, frame)
                continue
            rank = _understood(_rank_in, frame)
            if frame.kind is FrameKind.GONE:
                raise PeerLostError(f"rank {rank} ended before it gave '{key}/{rank}'", rank)
            raise self._not_there(f"{key}/{rank}", limit)
        return values

    def close(self, *, drain: float = 5.0) -> None:
        """Leave the store; see :meth:`Store.close`."""
        with self._state:
            if self._closed:
                return
            if self._broken is None:
                with contextlib.suppress(OSError):
                    self._sock.send(self._sealer.seal(FrameKind.BYE, 0))
            self._closed = True
            self._broken = lambda: ClosedError(f"rank {self.rank}: the store is closed")
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._state.notify_all()

    def _request(
        self,
        kind: FrameKind,
        body: bytes,
        timeout: float | None,
        what: str,
        look: Callable[[], None] | None = None,
    ) -> Frame:
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        with self._state:
            request = self._next_request = (self._next_request + 1) & 0xFFFFFFFF
            self._send(self._sealer.seal(kind, request, body), deadline)
            self._expected.add(request)
        try:
            frame = self._await(request, deadline, what, look)
        except BaseException:
            with self._state:
                self._expected.discard(request)
                self._replies.pop(request, None)
                if kind in (FrameKind.GET, FrameKind.GATHER) and self._broken is None:
                    self._send(
                        self._sealer.seal(FrameKind.CANCEL, request),
                        time.monotonic() + _STATUS_SECONDS,
                    )
            raise
        if frame.kind is FrameKind.FAILED:
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

    def _await(
        self, request: int, deadline: float, what: str, look: Callable[[], None] | None
    ) -> Frame:
        """One thread at a time reads, for all; the others sleep until it has their reply."""
        while True:
            if look is not None:
                look()
            pause = deadline if look is None else min(deadline, time.monotonic() + LOOK_SECONDS)
            with self._state:
                if request in self._replies:
                    self._expected.discard(request)
                    return self._replies.pop(request)
                self._check()
                remaining = pause - time.monotonic()
                if remaining <= 0 and pause == deadline:
                    raise PgasTimeoutError(
                        f"rank {self.rank}: the store did not answer {what} in time"
                    )
                if self._reading:
                    self._state.wait(max(0.0, remaining))
                    continue
                self._reading = True
            try:
                self._pump(pause)
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
                self._broken = lambda: PeerLostError(lost, host)
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


def _is_address(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _body(key: str, value: bytes = b"") -> bytes:
    try:
        return pack_key(key, value)
    except ValueError as error:
        raise BootstrapError(str(error)) from None


def _understood(decode: Callable[[bytes], _T], frame: Frame) -> _T:
    """Return the value of an answer."""
    try:
        return decode(frame.body)
    except (ValueError, struct.error):
        raise BootstrapError(
            f"the store answers {frame.kind.name} {frame.body[:100]!r}, which is not known here: "
            "all ranks need the same version of pgasdl"
        ) from None


def _states_in(body: bytes) -> tuple[RankState, ...]:
    return tuple(RankState(value) for value in body)


def _rank_in(body: bytes) -> int:
    (rank,) = struct.unpack("!I", body)
    return int(rank)


def _values_in(body: bytes) -> list[bytes]:
    values: list[bytes] = []
    place = 0
    while place < len(body):
        (length,) = NUMBER.unpack_from(body, place)
        place += NUMBER.size
        if length == AS_BEFORE and values:
            values.append(values[-1])
            continue
        place += length
        if place > len(body):
            raise ValueError("a cut value")
        values.append(body[place - length : place])
    return values


def _poll(sock: socket.socket, events: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    # An hour at most: poll takes 32 bits of milliseconds, and the callers look again.
    remaining = min(max(0.0, deadline - time.monotonic()), 3600.0)
    return bool(poller.poll(remaining * 1000 + 0.5))


_FORKED: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _FORKED:
        client._close_in_child()


os.register_at_fork(after_in_child=_after_fork)
