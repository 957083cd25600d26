"""Client and server prove to each other that they know a secret, which itself is never sent.

A client lets the server prove itself first, and signs each request; the server signs each answer.
So a program that took the port of a server that ended, or that listens or relays, does not learn
the secret, and cannot make, change or repeat a request. It can drop requests, and add to a stream
of events.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
import secrets
from dataclasses import dataclass

from pgasdl.errors import JobError

HEADER = "Pgasdl-Proof"  # of an answer: the server's challenge now, and the signature
STREAM = "stream"  # in the place of the digest of a body that has no end
_MOST_PROOF = 1 << 16  # bytes that are read from a server that has not proved itself
_MOST_NONCES = 10_000  # to one challenge
_SIGNED = re.compile(r"Pgasdl ([\w-]{1,64}) ([\w-]{22,64}) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)


def digest(body: bytes) -> str:
    """Return the part of a signature that stands for a body."""
    return hashlib.sha256(body).hexdigest()


def signature(secret: str, *parts: str) -> str:
    """Sign parts of which none has a line break."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Signed:
    """The ``Authorization`` of a signed request."""

    challenge: str
    nonce: str
    digest: str
    signature: str

    @classmethod
    def read(cls, header: str) -> Signed | None:
        """Read a header; None: it is of another kind."""
        found = _SIGNED.fullmatch(header)
        return cls(*found.groups()) if found else None

    def is_by(self, secret: str, method: str, target: str) -> bool:
        """Whether the sender of this request knows the secret."""
        parts = "request", self.challenge, self.nonce, method, target, self.digest
        return hmac.compare_digest(self.signature, signature(secret, *parts))

    def answer(self, secret: str, challenge: str, status: int, body: str) -> str:
        """Return the header of its answer."""
        return (
            f"{challenge} {signature(secret, 'answer', challenge, self.nonce, str(status), body)}"
        )


class Challenges:
    """Challenges that requests have to sign: nobody can guess one, and a request counts once."""

    def __init__(self) -> None:
        self.now = secrets.token_urlsafe(16)
        self._seen: dict[str, set[str]] = {self.now: set()}

    def meets(self, request: Signed) -> bool:
        """Whether a correctly signed request comes for the first time."""
        seen = self._seen.get(request.challenge)
        if seen is None or request.nonce in seen:
            return False
        seen.add(request.nonce)
        if len(self._seen[self.now]) >= _MOST_NONCES:
            last, self.now = self.now, secrets.token_urlsafe(16)
            self._seen = {last: self._seen[last], self.now: set()}
        return True


class Connection(http.client.HTTPConnection):
    """A connection to a server that has to prove itself before anything is sent to it."""

    def __init__(self, host: str, port: int, secret: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._secret = secret
        self._challenge = self._nonce = ""
        self._request: tuple[str, str, bytes | None] = ("", "", None)

    def connect(self) -> None:
        """Connect; the server has not proved anything yet."""
        super().connect()
        self._challenge = ""

    def ask(self, method: str, target: str, body: bytes | None = None) -> None:
        """Send a request; JobError with status 401: the server does not know the secret."""
        if self.sock is None:
            self.connect()
        if not self._challenge:
            self._send("GET", target, None)
            self._heard(_MOST_PROOF)
        self._request = method, target, body
        self._send(*self._request)

    def hear(self) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer, and its body but for a stream's."""
        answer, data = self._heard()
        if answer.status == 401:  # the server has a new challenge by now
            self._send(*self._request)
            answer, data = self._heard()
        return answer, data

    def _send(self, method: str, target: str, body: bytes | None) -> None:
        self._nonce, content = secrets.token_urlsafe(16), digest(body or b"")
        parts = self._challenge or "-", self._nonce
        signed = signature(self._secret, "request", *parts, method, target, content)
        headers = {"Authorization": f"Pgasdl {' '.join(parts)} {content} {signed}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        self.request(method, target, body, headers)

    def _heard(self, most: int | None = None) -> tuple[http.client.HTTPResponse, bytes]:
        answer = self.getresponse()
        streams = answer.headers.get_content_type() == "text/event-stream"
        data = b"" if streams else answer.read(most)
        challenge, _, given = answer.headers.get(HEADER, "").partition(" ")
        content = STREAM if streams else digest(data)
        parts = "answer", challenge, self._nonce, str(answer.status), content
        if not hmac.compare_digest(given.encode(), signature(self._secret, *parts).encode()):
            answer.close()
            raise JobError(f"who answers at {self.host}:{self.port} does not know this token", 401)
        self._challenge = challenge
        return answer, data
