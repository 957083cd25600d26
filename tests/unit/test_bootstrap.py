"""The store: what the ranks of the job get from it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from raw_rank import JOB, SECRET, RawRank, client
from support.patience import until

from pgasdl.errors import BootstrapError, ClosedError, PeerLostError, PgasTimeoutError, RankError
from pgasdl.runtime.bootstrap import (
    LocalStore,
    RankState,
    Store,
    StoreClient,
    StoreServer,
    channel,
    entry,
)
from pgasdl.runtime.bootstrap.channel import FrameKind


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(SECRET, 4, job_id=JOB) as running:
        yield running


# Both kinds of store keep the same promises.


@pytest.fixture(params=["tcp", "local"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Store]]:
    if request.param == "local":
        yield list(LocalStore.world(4, timeout=10.0))
    else:
        with StoreServer(SECRET, 4, job_id=JOB) as running:
            stores: list[Store] = [client(running, rank) for rank in range(4)]
            yield stores
            for store in stores:
                store.close()


def test_put_then_get(world: list[Store]) -> None:
    world[0].put("a", b"1")
    assert world[3].get("a") == b"1"
    world[1].put("a", b"")
    assert world[0].get("a", 0) == b""
    world[2].delete("a")
    world[2].delete("a")
    with pytest.raises(PgasTimeoutError):
        world[1].get("a", 0)


def test_get_waits_for_put(world: list[Store]) -> None:
    with ThreadPoolExecutor() as pool:
        got = pool.submit(world[1].get, "later")
        time.sleep(0.05)
        assert not got.done()
        world[0].put("later", b"x" * 60000)
        assert got.result(5) == b"x" * 60000


def test_exchange(world: list[Store]) -> None:
    with ThreadPoolExecutor() as pool:
        for turn in range(20):
            values = [
                pool.submit(store.exchange, f"turn{turn}", bytes([store.rank])) for store in world
            ]
            assert all(v.result(10) == [b"\0", b"\1", b"\2", b"\3"] for v in values)


def test_exchange_of_more_than_a_frame_holds(world: list[Store]) -> None:
    with ThreadPoolExecutor() as pool:
        sizes = [60000, 0, 50000, 65000]
        values = [bytes([rank]) * size for rank, size in enumerate(sizes)]
        turns = [pool.submit(store.exchange, "big", values[store.rank]) for store in world]
        assert all(turn.result(10) == values for turn in turns)


def test_gather_answers_once_all_are_there(world: list[Store]) -> None:
    for rank in (3, 0):
        world[rank].put(f"some/{rank}", bytes([rank]))
    assert world[1].gather("some", [0, 3], 0) == [b"\0", b"\3"]
    with pytest.raises(PgasTimeoutError, match=r"rank 1: 'some/2' was not there within 0 s"):
        world[1].gather("some", [0, 2, 3], 0)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(world[1].gather, "some", [0, 2, 3], 10.0)
        with pytest.raises(PgasTimeoutError, match=r"rank 0: 'some/2' was not there within 0\.1 s"):
            world[0].gather("some", [0, 2, 3], 0.1)
        assert not got.done()
        world[2].put("some/2", b"")
        assert got.result(10) == [b"\0", b"", b"\3"]
        # A rank that ends without having put its value ends the others' wait.
        got = pool.submit(world[1].gather, "some", [0, 1, 3], 10.0)
        world[1].put("some/1", b"")
        assert got.result(10)[1] == b""
        got = pool.submit(world[1].gather, "more", [2, 3], 10.0)
        world[2].put("more/2", b"")
        world[3].close()
        with pytest.raises(PeerLostError, match=r"rank 3 ended before it gave 'more/3'") as caught:
            got.result(10)
        assert caught.value.rank == 3


def test_whoever_gathers_may_look_around(world: list[Store]) -> None:
    looks = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise KeyError("seen")

    with pytest.raises(KeyError, match="seen"):
        world[0].gather("never", [1], 60.0, look=look)
    world[1].put("never/1", b"late")
    assert world[0].gather("never", [1], 10.0, look=lambda: None) == [b"late"]


def test_one_token_for_the_ranks_of_a_context(world: list[Store]) -> None:
    tokens = {store.token for store in world}
    assert len(tokens) == 1 and len(tokens.pop()) == 16


def test_timeout_names_the_key_and_who_is_gone(world: list[Store]) -> None:
    world[2].close()
    assert until(lambda: world[0].states()[2] is RankState.CLOSED)
    started = time.monotonic()
    with pytest.raises(PgasTimeoutError, match=r"rank 1.*'nobody/puts'.*0\.1 s.*closed: rank 2"):
        world[1].get("nobody/puts", 0.1)
    assert 0.1 <= time.monotonic() - started < 2
    assert isinstance(PgasTimeoutError(), TimeoutError)


def test_owner_that_ended_ends_the_wait(world: list[Store]) -> None:
    world[3].put("before", b"1")
    with ThreadPoolExecutor() as pool:
        got = pool.submit(world[0].get, "never", 10.0, owner=3)
        other = pool.submit(world[0].get, "else", 10.0, owner=2)
        time.sleep(0.05)
        world[3].close()
        with pytest.raises(PeerLostError, match=r"rank 3.*'never'") as caught:
            got.result(5)
        assert caught.value.rank == 3
        assert not other.done()
        world[2].put("else", b"")
        other.result(5)
    assert world[0].get("before", owner=3) == b"1"
    with pytest.raises(PeerLostError):
        world[1].get("never", owner=3)


def test_closed_store_refuses_and_closes_twice(world: list[Store]) -> None:
    world[0].close()
    world[0].close()
    for call in (lambda: world[0].put("a", b""), lambda: world[0].get("a")):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("key", ["", "k" * 1025])
def test_refused_keys_and_values(world: list[Store], key: str) -> None:
    with pytest.raises(BootstrapError):
        world[0].put(key, b"")
    with pytest.raises(BootstrapError):
        world[0].get(key)
    with pytest.raises(BootstrapError, match="64 KiB"):
        world[0].put("big", bytes(65536))
    world[0].put("still", b"works")


def test_local_store_loses_a_rank() -> None:
    stores = LocalStore.world(2)
    stores[1].lose()
    assert stores[0].states() == (RankState.CONNECTED, RankState.LOST)
    with pytest.raises(RankError):
        LocalStore(2, 2)


# The connection itself.


def test_states_follow_the_connections(server: StoreServer) -> None:
    assert server.states == (RankState.ABSENT,) * 4
    first, second = client(server, 0), RawRank(server, 1)
    assert second.genuine and second.frame().kind is FrameKind.WELCOME
    assert server.states[:2] == (RankState.CONNECTED,) * 2
    first.close()
    second.sock.close()
    assert until(lambda: server.states[0] is RankState.CLOSED)
    assert until(lambda: server.states[1] is RankState.LOST)


def test_killed_process_is_lost_at_once(server: StoreServer) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with client(server, 2):
                time.sleep(60)
        finally:
            os._exit(1)
    assert until(lambda: server.states[2] is RankState.CONNECTED)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert until(lambda: server.states[2] is RankState.LOST)
    assert time.monotonic() - killed < 1.0
    os.waitpid(pid, 0)


@pytest.mark.parametrize("joined", [False, True])
def test_nobody_waits_for_a_rank_whose_process_ended(server: StoreServer, joined: bool) -> None:
    if joined:
        client(server, 1).close()
    server.ended(1)
    for _ in range(2):  # in whatever generation
        with client(server, 0, timeout=1000) as store, pytest.raises(PeerLostError, match="rank 1"):
            store.get("never", owner=1)


def test_last_words_of_a_process_that_ended_are_heard(server: StoreServer) -> None:
    with client(server, 1) as last:
        last.put("word", b"w")
        server.ended(1)
        with client(server, 0) as store:
            assert store.get("word", owner=1) == b"w"


def test_second_context_does_not_see_the_first_one_s_keys(server: StoreServer) -> None:
    for turn in range(3):
        one, two = client(server, 0), client(server, 1)
        with pytest.raises(PgasTimeoutError):
            two.get("key", 0)
        one.put("key", bytes([turn]))
        assert two.get("key") == bytes([turn])
        one.close()
        two.close()


def test_no_two_contexts_have_one_token(server: StoreServer) -> None:
    tokens = set()
    for _ in range(2):
        with client(server, 0) as one, client(server, 3) as other:
            assert one.token == other.token
            tokens.add(one.token)
        assert until(lambda: RankState.CONNECTED not in server.states)
    with StoreServer(SECRET, 4, job_id=JOB) as again, client(again, 0) as one:
        tokens.add(one.token)
    with (
        StoreServer(bytes(32), 4, job_id=JOB) as another,
        StoreClient(another.address, bytes(32), 0, 4, JOB) as one,
    ):
        tokens.add(one.token)
    assert len(tokens) == 4


def test_token_never_travels(server: StoreServer) -> None:
    """It is derived from the secret: reading all frames of a rank does not reveal it."""
    with client(server, 0) as store:
        rank = RawRank(server, 1)
        welcome = rank.frame()
        salt = channel.WELCOME.unpack(welcome.body)[0]
        token = channel.derive_token(SECRET, JOB, welcome.body)
        assert token == store.token
        assert token not in welcome.body and salt not in token
        assert channel.derive_token(bytes(32), JOB, welcome.body) != token
        assert channel.derive_token(SECRET, "another", welcome.body) != token


def test_busy_store_that_welcomes_late_loses_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose proof the store has must not give up: the others would see it as lost."""
    monkeypatch.setattr(entry, "CHALLENGE_SECONDS", 0.3)
    reading, writing = os.pipe()
    timers: list[threading.Timer] = []
    pid = os.fork()
    if pid == 0:
        try:
            with StoreServer(SECRET, 4, job_id=JOB) as running:
                os.write(writing, str(running.address[1]).encode())
                time.sleep(60)
        finally:
            os._exit(1)
    try:
        address = "127.0.0.1", int(os.read(reading, 16))
        genuine = entry.same

        def after_the_challenge(left: bytes, right: bytes) -> bool:
            os.kill(pid, signal.SIGSTOP)
            timers.append(threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)))
            timers[-1].start()
            return genuine(left, right)

        with (
            ThreadPoolExecutor() as pool,
            StoreClient(address, SECRET, 1, 4, JOB, 10) as waiting,
        ):
            got = pool.submit(waiting.get, "a", 10.0, owner=0)
            monkeypatch.setattr(entry, "same", after_the_challenge)
            with StoreClient(address, SECRET, 0, 4, JOB, 10) as late:
                late.put("a", b"1")
                assert got.result(10) == b"1"
    finally:
        for timer in timers:
            timer.cancel()
        for descriptor in (reading, writing):
            os.close(descriptor)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_threads_share_a_client(server: StoreServer) -> None:
    with client(server, 0) as store, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(store.get, f"k{i}") for i in range(8)]
        time.sleep(0.02)
        for i in range(8):
            store.put(f"k{i}", bytes([i]))
        assert [w.result(5) for w in waiting] == [bytes([i]) for i in range(8)]


def test_abandoned_get_does_not_disturb_the_next(server: StoreServer) -> None:
    with client(server, 0) as store, client(server, 1) as other:
        for i in range(300):  # more gets than may wait at once: each is cancelled
            with pytest.raises(PgasTimeoutError):
                store.get("late", 0.0005 if i % 8 else 0)
        other.put("late", b"1")
        assert store.get("late") == b"1"


def test_child_of_fork_is_refused_and_keeps_nothing_open(server: StoreServer) -> None:
    store = client(server, 0)
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store.put("a", b"")
        except ClosedError:
            status = 0
            os.close(go)
            os.read(wait, 1)
        finally:
            os._exit(status)
    store.put("a", b"1")
    store._sock.close()  # as if this process were killed while the child still runs
    noticed = until(lambda: server.states[0] is RankState.LOST)
    os.close(wait)
    os.close(go)
    assert os.waitpid(pid, 0)[1] == 0
    assert noticed


def test_server_that_ends_ends_the_waits() -> None:
    running = StoreServer(SECRET, 2, job_id=JOB)
    hosted = StoreClient(running.address, SECRET, 1, 2, JOB, 10, host=0)
    launched = StoreClient(running.address, SECRET, 0, 2, JOB, 10)
    with ThreadPoolExecutor() as pool:
        one, two = pool.submit(hosted.get, "a"), pool.submit(launched.get, "a")
        time.sleep(0.05)
        running.close()
        with pytest.raises(PeerLostError, match="rank 0") as caught:
            one.result(5)
        assert caught.value.rank == 0
        with pytest.raises(BootstrapError, match="launcher"):
            two.result(5)
    with pytest.raises(PeerLostError):
        hosted.put("b", b"")


def test_close_can_wait_for_the_others() -> None:
    running = StoreServer(SECRET, 1, job_id=JOB)
    store = StoreClient(running.address, SECRET, 0, 1, JOB, 10)
    closing = threading.Event()

    def close() -> None:
        closing.set()
        store.close()

    threading.Timer(0.2, close).start()
    running.close(drain=10)
    assert closing.is_set()


def test_nobody_there_is_a_timeout_that_names_the_place() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
        with pytest.raises(PgasTimeoutError, match=rf"rank 1.*127\.0\.0\.1:{address[1]}"):
            StoreClient(address, SECRET, 1, 2, JOB, 0.3)


def test_server_may_come_later() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    with ThreadPoolExecutor() as pool:
        late = pool.submit(StoreClient, address, SECRET, 0, 1, JOB, 10)
        time.sleep(0.1)
        with StoreServer(SECRET, 1, *address, job_id=JOB), late.result(10) as store:
            store.put("a", b"")


def test_name_of_the_server_may_be_known_later(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a pod, which has none before it has an address."""
    real, asked = socket.getaddrinfo, []

    def late(host: str, *rest: Any, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    with StoreClient(("rank0.train", server.address[1]), SECRET, 0, 4, JOB, 10) as store:
        store.put("a", b"")
    assert asked == ["rank0.train"] * 4
    asked[:] = []
    with pytest.raises(PgasTimeoutError, match=r"rank0\.train.*Name or service not known"):
        StoreClient(("rank0.train", 1), SECRET, 1, 4, JOB, 0.01)


def test_server_at_a_name_that_has_no_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: real("::1", *rest, **more))
    with StoreServer(SECRET, 1, "rank0.train", job_id=JOB) as running:
        assert running.address[0] == "::1"
        with StoreClient(("rank0.train", running.address[1]), SECRET, 0, 1, JOB, 10) as store:
            store.put("a", b"")


def test_server_at_an_address_of_another_machine() -> None:
    with pytest.raises(BootstrapError, match=r"192\.0\.2\.77 port 0.*pgasdl topo"):
        StoreServer(SECRET, 1, "192.0.2.77")


def test_no_descriptor_is_left() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # frees what earlier tests left
    before = count()
    for _ in range(5):
        with StoreServer(SECRET, 1) as running, StoreClient(running.address, SECRET, 0, 1) as store:
            store.put("a", b"")
            with pytest.raises(BootstrapError):
                StoreClient(running.address, bytes(32), 0, 1, "", 1)
    assert count() == before
