"""A bad network between ranks of transport tcp: a proxy that delays, splits, collects and cuts.

A rank that calls `through` tells its peers a port of the proxy in place of its own. ``python
tcp_proxy.py FOLDER DELAY RATE`` serves until it is killed: seconds, and bytes a second, one way;
the port on which ranks ask it is in FOLDER/proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
from support.leftovers import listening

# native/transport/tcp/wire.hpp
GREETING = struct.Struct("=QiiiI16s")
REPLY = struct.Struct("=16sQ")
PROOF = 8
_PORT = struct.Struct("=I")  # in an endpoint
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Cut:
    """Ends the first connection of one rank to another after so many bytes of one direction.

    Bytes of the handshake do not count. ``answers``: those that the peer sends back.
    """

    source: int
    peer: int
    after: int
    answers: bool = False
    queue: int = 0


@dataclass(frozen=True)
class Manner:
    """What the network does to each direction of each connection.

    Attributes
    ----------
    delay : seconds
    rate : bytes a second; 0: as fast as it goes
    pieces : bytes arrive in pieces of 1 to so many; 0: as they come
    collects : seconds; what comes within them arrives together
    """

    delay: float = 0.0
    rate: float = 0.0
    pieces: int = 0
    collects: float = 0.0
    seed: int = 0
    cut: Cut | None = None


class Proxy:
    """Serves in a thread of this process while its ``with`` block lasts."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self.has_cut = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        asking = self._loop.run_until_complete(asyncio.start_server(self._ask, "127.0.0.1", 0))
        self.port: int = asking.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.sleep(0))

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A rank tells its port, and gets one here that leads to it until the rank ends."""
        port = int(await reader.readline())
        server = await asyncio.start_server(lambda r, w: self._relay(port, r, w), "0.0.0.0", 0)
        writer.write(b"%d\n" % server.sockets[0].getsockname()[1])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        server.close()
        writer.close()

    async def _relay(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            greeting = await reader.readexactly(GREETING.size)
            _, _, source, peer, queue, _ = GREETING.unpack(greeting)
            there, back = await asyncio.open_connection("127.0.0.1", port)
            back.write(greeting)
            limits: list[int | None] = [None, None]
            cut = self.manner.cut
            if cut and (cut.source, cut.peer, cut.queue) == (source, peer, queue):
                limits[cut.answers] = cut.after + (REPLY.size if cut.answers else PROOF)
            ways = [
                asyncio.ensure_future(self._carry(*way, limit))
                for way, limit in zip(((reader, back), (there, writer)), limits, strict=True)
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if not self.has_cut.is_set():
                await asyncio.wait(ways, timeout=1)  # the other way's last words
            for end in (back, writer):
                end.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        """Carry one direction to its end."""
        manner = self.manner
        chance = random.Random(manner.seed)
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=4096)

        async def arrive() -> None:
            while (given := await under_way.get())[1]:
                if (wait := given[0] - loop.time()) > 0:
                    await asyncio.sleep(wait)
                writer.write(given[1])
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        arriving = asyncio.ensure_future(arrive())
        free_at = 0.0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_AT_ONCE):
                if limit is not None:
                    data, limit = data[:limit], limit - len(data)
                while data:
                    piece = data[: chance.randint(1, manner.pieces)] if manner.pieces else data
                    data = data[len(piece) :]
                    free_at = max(free_at, loop.time())
                    if manner.rate:
                        free_at += len(piece) / manner.rate
                    due = free_at + manner.delay
                    if manner.collects:
                        due += manner.collects - due % manner.collects
                    await under_way.put((due, piece))
                if limit is not None and limit <= 0:
                    self.has_cut.set()
                    break
        await under_way.put((0.0, b""))
        with contextlib.suppress(OSError):
            await arriving


@contextlib.contextmanager
def through(port: int) -> Iterator[None]:
    """Let contexts that this process makes be reached through the proxy that is asked there."""
    from pgasdl.context import Context

    before = Context._endpoint
    asked: list[socket.socket] = []

    def moved(self: Any) -> bytes:
        endpoint: bytes = before(self)
        asked.append(socket.create_connection(("127.0.0.1", port)))
        own = max(listening(os.getpid()), key=lambda port: endpoint.count(_PORT.pack(port)))
        asked[-1].sendall(b"%d\n" % own)
        with asked[-1].makefile() as answer:
            theirs = int(answer.readline())
        return endpoint.replace(_PORT.pack(own), _PORT.pack(theirs))

    Context._endpoint = moved
    try:
        yield
    finally:
        Context._endpoint = before
        for each in asked:
            each.close()


def main() -> None:
    folder, delay, rate = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    with Proxy(Manner(delay=delay, rate=rate)) as proxy:
        (folder / "proxy.new").write_text(str(proxy.port))
        (folder / "proxy.new").rename(folder / "proxy")
        threading.Event().wait()


if __name__ == "__main__":
    main()
