"""The wire protocol of the bootstrap store: a mutual handshake, then numbered frames with a MAC.

::

    client                                   server
    HELLO      magic, rank, size, nonce  ->
                                         <-  CHALLENGE  nonce, HMAC(secret, "server", all below)
    PROOF      HMAC(secret, "client", ..)->
                                         <-  WELCOME or REFUSED, the first frame

Both proofs cover job id, rank, size, both nonces and both addresses as each side sees them, so a
proof is worthless on any other connection. A frame is ``length counter kind request``, body, MAC;
each direction has its own key. ``counter`` must rise by one, so a frame that was replayed, dropped,
reordered or changed ends the connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

MAGIC = b"PGASDL\x00\x02"
HELLO = struct.Struct("!8sII32s")
CHALLENGE = struct.Struct("!32s32s")
NONCE_BYTES = 32
MAC_BYTES = 32
WELCOME = struct.Struct("!32sI")  # the server's salt, generation of this rank's context
TOKEN_BYTES = 16
SECRET_BYTES = 32
MAX_BODY = 65536
HANDSHAKE_SECONDS = 2.0

_HEADER = struct.Struct("!IQBI")
FRAME_BYTES = _HEADER.size + MAC_BYTES  # beside the body
_KEY_LENGTH = struct.Struct("!H")


class ProtocolError(Exception):
    """The other side sent something that no member of this job sends."""


class FrameKind(enum.IntEnum):
    """The request or answer in a frame."""

    WELCOME = 1
    REFUSED = 2
    BYE = 3
    PUT = 16
    GET = 17
    CANCEL = 18
    DELETE = 19
    STATES = 20
    GATHER = 21
    DONE = 32
    VALUE = 33
    MISSING = 34
    GONE = 35
    FAILED = 36


_KINDS = frozenset(int(kind) for kind in FrameKind)


@dataclass(frozen=True, slots=True)
class Session:
    """Both proofs and both keys of one connection, derived from its transcript."""

    server_proof: bytes
    client_proof: bytes
    to_server: bytes
    to_client: bytes

    @classmethod
    def derive(
        cls,
        secret: bytes,
        job_id: str,
        place: tuple[int, int],
        nonces: tuple[bytes, bytes],
        addresses: tuple[str, str],
    ) -> Session:
        """``place`` is (rank, size); ``nonces`` and ``addresses`` are (client's, server's)."""
        parts = (
            MAGIC,
            job_id.encode(),
            struct.pack("!II", *place),
            *nonces,
            *(address.encode() for address in addresses),
        )
        # Lengths first: no two different transcripts have the same bytes.
        transcript = b"".join(len(part).to_bytes(4, "big") + part for part in parts)

        def tag(label: bytes) -> bytes:
            return hmac.digest(secret, label + b"\0" + transcript, "sha256")

        return cls(tag(b"server"), tag(b"client"), tag(b"to server"), tag(b"to client"))


def derive_token(secret: bytes, job_id: str, welcome: bytes) -> bytes:
    """Derive the token that the ranks of one context show each other; it takes the secret.

    HKDF (RFC 5869) with SHA-256: the salt travels in the open, the token never.
    """
    salt, generation = WELCOME.unpack(welcome)
    extracted = hmac.digest(salt, secret, "sha256")
    about = b"token of the ranks\0" + generation.to_bytes(4, "big") + job_id.encode()
    return hmac.digest(extracted, about + b"\x01", "sha256")[:TOKEN_BYTES]


def same(left: bytes, right: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(left, right)


def address_text(address: tuple[object, ...]) -> str:
    """Spell a socket address for the proofs, without IPv6 flow and scope, which differ by side."""
    return f"{address[0]} {address[1]}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: its kind, the request it belongs to, and its bytes."""

    kind: FrameKind
    request: int
    body: bytes


class Sealer:
    """Numbers and signs the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, kind: FrameKind, request: int, body: bytes = b"") -> bytes:
        """Sign one frame with the next number."""
        if len(body) > MAX_BODY:
            raise ProtocolError(f"{len(body)} bytes in a frame, at most {MAX_BODY} fit")
        data = _HEADER.pack(len(body), self._counter, kind, request) + body
        self._counter += 1
        return data + hmac.digest(self._key, data, "sha256")


class Opener:
    """Collects the bytes of one direction and returns the authentic frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived."""
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next whole frame; None while bytes are missing. ProtocolError is final."""
        if len(self._buffer) < _HEADER.size:
            return None
        length, counter, kind, request = _HEADER.unpack_from(self._buffer)
        if length > MAX_BODY or counter != self._counter or kind not in _KINDS:
            raise ProtocolError("malformed, oversize or replayed frame")
        end = _HEADER.size + length
        if len(self._buffer) < end + MAC_BYTES:
            return None
        with memoryview(self._buffer) as view:
            signed, mac = bytes(view[:end]), bytes(view[end : end + MAC_BYTES])
        if not same(hmac.digest(self._key, signed, "sha256"), mac):
            raise ProtocolError("frame with a wrong MAC")
        del self._buffer[: end + MAC_BYTES]
        self._counter += 1
        return Frame(FrameKind(kind), request, signed[_HEADER.size :])


def pack_key(key: str, value: bytes = b"") -> bytes:
    """Pack a request about ``key``; ValueError when key and value do not fit into a frame."""
    encoded = key.encode()
    if not encoded or len(encoded) > 1024:
        raise ValueError(f"a key has 1 to 1024 bytes, this one {len(encoded)}")
    if len(encoded) + len(value) > MAX_BODY - 64:
        raise ValueError(f"key {key!r}: {len(value)} bytes do not fit into one 64 KiB frame")
    return _KEY_LENGTH.pack(len(encoded)) + encoded + value


def unpack_key(body: bytes) -> tuple[bytes, bytes]:
    """Return key and value of a body that :func:`pack_key` made."""
    if len(body) < _KEY_LENGTH.size:
        raise ProtocolError("request without a key")
    (length,) = _KEY_LENGTH.unpack_from(body)
    end = _KEY_LENGTH.size + length
    if not length or end > len(body):
        raise ProtocolError("request with a cut key")
    return body[_KEY_LENGTH.size : end], body[end:]


def normalise_secret(content: bytes) -> bytes:
    """Return 32 bytes as they are, and hash more (a text of random characters) with SHA-256."""
    return content if len(content) == SECRET_BYTES else hashlib.sha256(content).digest()
