"""A rank's way into the store: connect, check the store's proof, send our own, get the welcome."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pgasdl.config import Address, format_value
from pgasdl.errors import BootstrapError, PgasTimeoutError
from pgasdl.runtime.bootstrap.channel import (
    CHALLENGE,
    HANDSHAKE_SECONDS,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    WELCOME,
    Frame,
    FrameKind,
    Opener,
    ProtocolError,
    Sealer,
    Session,
    address_text,
    derive_token,
    same,
)
from pgasdl.runtime.bootstrap.detect import is_loopback
from pgasdl.runtime.bootstrap.store import LOOK_SECONDS

CHALLENGE_SECONDS = 5.0  # for a server to prove that it is the store
assert HANDSHAKE_SECONDS < CHALLENGE_SECONDS  # the client outlasts the server's patience


class _RefusedError(Exception):
    """The store proved itself and refused this rank."""


class _StrangerError(Exception):
    """The server at this address does not know the secret of this job."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A connection on which both ends have proved themselves."""

    sock: socket.socket
    opener: Opener
    sealer: Sealer
    token: bytes


def admit(
    addresses: list[Address],
    secret: bytes,
    rank: int,
    size: int,
    job_id: str,
    timeout: float,
    look: Callable[[], None] | None = None,
) -> Admission:
    """Try ``addresses`` in turn, again and again, until the store welcomes this rank.

    ``look`` is called ten times a second until the store has proved itself. PgasTimeoutError:
    nothing answered. BootstrapError: another server did, or the store refused this rank.
    """
    deadline = time.monotonic() + timeout
    places = ", ".join(format_value(address) for address in addresses)
    pause = 0.01
    refusals = 0
    last: Exception | None = None
    while True:
        for address in addresses:
            if time.monotonic() >= deadline:
                raise PgasTimeoutError(
                    f"rank {rank}: no store of job {job_id!r} at {places} within "
                    f"{timeout:g} s ({last or 'not tried'})"
                )
            try:
                return _handshake(address, secret, (rank, size), job_id, deadline, look)
            except _RefusedError as error:
                # The store may not have noticed yet that an earlier connection ended: try again.
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
            except UnicodeError as error:
                raise BootstrapError(f"{address[0]!r} is no name of a machine: {error}") from error
            except (OSError, ProtocolError) as error:
                if getattr(error, "errno", None) == errno.ENETUNREACH and is_loopback(address[0]):
                    raise BootstrapError(
                        f"{places} cannot be reached: the loopback interface is down; "
                        "ip link set lo up"
                    ) from error
                last = error
        if look is not None:
            look()
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(pause * 1.5, 0.2)


def _handshake(
    address: Address,
    secret: bytes,
    place: tuple[int, int],
    job_id: str,
    deadline: float,
    look: Callable[[], None] | None,
) -> Admission:
    patience = min(deadline, time.monotonic() + CHALLENGE_SECONDS)
    sock = socket.create_connection(address, max(0.001, patience - time.monotonic()))
    try:
        mine, theirs = address_text(sock.getsockname()), address_text(sock.getpeername())
        if mine == theirs:
            raise ConnectionRefusedError("connected to itself")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(HELLO.pack(MAGIC, *place, nonce))
        server_nonce, proof = CHALLENGE.unpack(_receive(sock, CHALLENGE.size, patience, look))
        session = Session.derive(secret, job_id, place, (nonce, server_nonce), (mine, theirs))
        if not same(session.server_proof, proof):
            raise _StrangerError(
                "it has another secret or job id, or a relay or NAT is between (docker -p, ssh -L)"
            )
        # This is the store. Once it has our proof, hanging up would make this rank lost to the
        # others: wait for the welcome, however busy the store is.
        sock.sendall(session.client_proof)
        opener = Opener(session.to_client)
        frame = _first_frame(sock, opener, deadline)
        if frame.kind is FrameKind.REFUSED:
            raise _RefusedError(frame.body.decode(errors="replace"))
        if frame.kind is not FrameKind.WELCOME or len(frame.body) != WELCOME.size:
            raise ProtocolError("no welcome")
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    token = derive_token(secret, job_id, frame.body)
    return Admission(sock, opener, Sealer(session.to_server), token)


def _first_frame(sock: socket.socket, opener: Opener, deadline: float) -> Frame:
    while (frame := opener.next()) is None:
        opener.feed(_receive(sock, 1, deadline))
    return frame


def _receive(
    sock: socket.socket, n: int, deadline: float, look: Callable[[], None] | None = None
) -> bytes:
    data = b""
    while len(data) < n:
        remaining = deadline - time.monotonic()
        sock.settimeout(max(0.001, remaining if look is None else min(remaining, LOOK_SECONDS)))
        try:
            part = sock.recv(n - len(data))
        except TimeoutError:
            if look is None or time.monotonic() >= deadline:
                raise
            look()
            continue
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data
