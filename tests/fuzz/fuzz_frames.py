"""Frames of the bootstrap store: which ones open, and what the table answers."""

from __future__ import annotations

import socket
from collections import Counter

from fuzz_drive import Input

from pgasdl.runtime.bootstrap.channel import (
    Frame,
    FrameKind,
    Opener,
    ProtocolError,
    Sealer,
    pack_key,
)
from pgasdl.runtime.bootstrap.store import RankState
from pgasdl.runtime.bootstrap.table import GATHER_OPTIONS, GET_OPTIONS, NOBODY, Connection, Table

_KEY = bytes(32)
_KINDS = tuple(FrameKind)
_NAMES = (b"a", b"b", b"a/0", b"a/1")


def one(data: bytes) -> None:
    given = Input(data)
    (_noise, _changed, _requests)[given.byte() % 3](given)


def _noise(given: Input) -> None:
    """Without the key nothing opens."""
    opener = Opener(_KEY)
    try:
        while given:
            opener.feed(given.bytes(given.byte()))
            assert opener.next() is None
    except ProtocolError:
        pass


def _changed(given: Input) -> None:
    """In a stream with one byte changed, only frames that end before this byte open."""
    sealer, opener = Sealer(_KEY), Opener(_KEY)
    at, change, n_frames = given.byte(), given.byte(), given.byte() % 5
    sealed, stream = [], bytearray()
    for _ in range(n_frames):
        frame = Frame(_KINDS[given.byte() % len(_KINDS)], given.byte(), given.bytes(given.byte()))
        sealed.append(frame)
        stream += sealer.seal(frame.kind, frame.request, frame.body)
    if stream:
        stream[at % len(stream)] ^= change
    opened = []
    piece = given.byte() + 1
    try:
        for begin in range(0, len(stream), piece):
            opener.feed(bytes(stream[begin : begin + piece]))
            while (frame_ := opener.next()) is not None:
                opened.append(frame_)
    except ProtocolError:
        assert change
    assert opened == sealed[: len(opened)]
    assert change or len(opened) == len(sealed)


def _requests(given: Input) -> None:
    """Requests are answered once each, or wait; values are those that were put."""
    connections = [Connection(socket.socket.__new__(socket.socket), 0.0) for _ in range(2)]
    states, generations = [RankState.CONNECTED] * 2, [0, 0]
    replies: list[tuple[Connection, FrameKind, int, bytes]] = []
    table = Table(states, generations, lambda *reply: replies.append(reply))
    asked: Counter[tuple[int, int]] = Counter()
    stored: dict[bytes, bytes] = {}
    gathers: set[tuple[int, int]] = set()
    while given:
        rank = given.byte() % 2
        kind = _KINDS[given.byte() % len(_KINDS)]
        request, name, value = given.byte(), _NAMES[given.byte() % len(_NAMES)], given.bytes(2)
        body = pack_key(name.decode(), value)
        if kind is FrameKind.GET:
            owner = (0, 1, 2, NOBODY)[given.byte() % 4]
            body = GET_OPTIONS.pack(given.byte() % 2, owner) + pack_key(name.decode())
        if kind is FrameKind.GATHER:
            body = GATHER_OPTIONS.pack(given.byte() % 2, given.byte() % 3) + pack_key("a", value)
        if given.byte() % 8 == 0:
            body = given.bytes(given.byte())
            name = b""
        before = len(replies)
        connection = connections[rank]
        try:
            table.dispatch(connection, Frame(kind, request, body))
        except ProtocolError:
            table.forget_all(connection)  # the server drops this connection
            connections[rank] = Connection(connection.sock, 0.0)
            continue
        if kind is FrameKind.PUT and name:
            stored[name] = value
            # Requests that waited for this key get its value.
            assert all(
                value in reply[3] for reply in replies[before:] if reply[1] is FrameKind.VALUE
            )
        if kind is FrameKind.DELETE:
            stored.pop(name, None)
        if kind is FrameKind.GET and name and len(replies) == before + 1:
            _, answer, number, words = replies[-1]
            assert number == request
            assert answer is not FrameKind.VALUE or stored.get(name, words) == words
        if kind is FrameKind.GATHER:
            gathers.add((id(connection), request))
        if kind in (FrameKind.PUT, FrameKind.GET, FrameKind.DELETE, FrameKind.STATES):
            asked[id(connection), request] += 1
    answered = Counter((id(reply[0]), reply[2]) for reply in replies)
    # The request number of a gather may be used again once the gather is answered.
    assert all(answered[key] <= asked[key] for key in answered if key in asked.keys() - gathers)
    for connection in connections:
        table.forget_all(connection)
        assert not connection.waiting
    assert not table._waiters and not table._questions
