"""The store: many ranks that come at once, also while strangers connect all the time."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_rank import JOB, SECRET, RawRank
from tiers import full

from pgasdl.runtime.bootstrap import RankState, StoreClient, StoreServer
from pgasdl.runtime.bootstrap.channel import HELLO, MAGIC, FrameKind, pack_key
from pgasdl.runtime.bootstrap.client import _values_in
from pgasdl.runtime.bootstrap.store import bitmap
from pgasdl.runtime.bootstrap.table import GATHER_OPTIONS
from pgasdl.simulate.library import StartupTraffic, Value, startup

N_PROCESSES = 4
# The values that each rank says at start-up: in the first, all on a machine say the same.
VALUES = [Value("rank", 200, same=True), Value("endpoint", 184), Value("world", 251)]


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip(f"this machine allows {limits[1]} descriptors, the test needs 4096")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def exchange_all(server: StoreServer, ranks: list[int], clients: list[RawRank]) -> None:
    """Let light clients, which one process holds, take part in three exchanges."""
    everybody = bitmap(range(server.size), server.size)

    def ask(client: RawRank, key: str, n_known: int) -> bytes:
        body = GATHER_OPTIONS.pack(1, n_known) + pack_key(key, everybody)
        return client.sealer.seal(FrameKind.GATHER, 2, body)

    for value in VALUES:
        key = value.key
        values = [
            (0 if value.same else rank).to_bytes(value.nbytes, "big") for rank in range(server.size)
        ]
        for rank, client in zip(ranks, clients, strict=True):
            put = client.sealer.seal(FrameKind.PUT, 1, pack_key(f"{key}/{rank}", values[rank]))
            client.send(put + ask(client, key, 0))
        for client in clients:
            assert client.frame().kind is FrameKind.DONE
            got: list[bytes] = []
            while len(got) < server.size:
                if got:
                    client.send(ask(client, key, len(got)))
                frame = client.frame()
                assert frame.kind is FrameKind.VALUE
                got += _values_in(frame.body)
            assert got == values


@pytest.mark.parametrize("n", full([64, 1024], quick=1))
def test_many_ranks_exchange(n: int) -> None:
    with StoreServer(SECRET, n, job_id=JOB) as server:

        def work(first: int) -> None:
            signal.alarm(100)
            ranks = list(range(first, n, N_PROCESSES))
            clients = [RawRank(server, rank) for rank in ranks]
            assert all(client.frame().kind is FrameKind.WELCOME for client in clients)
            exchange_all(server, ranks, clients)
            for rank, client in zip(ranks, clients, strict=True):
                # Two messages each way before the numbered ones, of which the server sends one.
                sent, received = 2 + client.sealer._counter, 1 + client.opener._counter
                told = StartupTraffic(sent, len(client.sent), received, client.received)
                assert told == startup(rank, n, VALUES), rank

        pids = [forked(lambda first=first: work(first)) for first in range(N_PROCESSES)]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * N_PROCESSES


def strangers(server: StoreServer) -> None:
    """Connect without end; some stay silent, some say what a rank says first."""
    signal.alarm(250)
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            sock = socket.socket()
            sock.setblocking(False)
            held.append(sock)
            with contextlib.suppress(BlockingIOError):
                sock.connect(server.address)
            if len(held) % 2:
                sock.send(HELLO.pack(MAGIC, 1, server.size, secrets.token_bytes(32)))
        if len(held) > 1500:
            held.pop(0).close()


@pytest.mark.parametrize("n", full([40, 400], quick=1))
def test_crowd_gets_in_while_strangers_connect(n: int) -> None:
    with StoreServer(SECRET, n, job_id=JOB) as server:

        def come(rank: int) -> StoreClient:
            return StoreClient(server.address, SECRET, rank, n, JOB, 100)

        def work(first: int) -> None:
            signal.alarm(200)
            ranks = range(first, n, N_PROCESSES)
            with ThreadPoolExecutor(len(ranks)) as pool:  # they come at once
                stores = list(pool.map(come, ranks))
            for store in stores:
                store.put(f"in/{store.rank}", b"1", 100)
            assert stores[0].gather("in", range(n), 100) == [b"1"] * n
            # Nobody who had come in was put out again.
            assert set(stores[0].states(100)) == {RankState.CONNECTED}
            for store in stores:
                store.put(f"out/{store.rank}", b"1", 100)
            assert stores[0].gather("out", range(n), 100) == [b"1"] * n

        stranger = forked(lambda: strangers(server))
        try:
            pids = [forked(lambda first=first: work(first)) for first in range(N_PROCESSES)]
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * N_PROCESSES
        finally:
            os.kill(stranger, signal.SIGKILL)
            os.waitpid(stranger, 0)
