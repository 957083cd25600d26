"""The store: processes that do not belong to the job get nothing from it."""

from __future__ import annotations

import os
import random
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from raw_rank import JOB, SECRET, RawRank, client

from pgasdl.errors import BootstrapError, PgasTimeoutError
from pgasdl.runtime.bootstrap import RankState, StoreClient, StoreServer, channel
from pgasdl.runtime.bootstrap.channel import CHALLENGE, HELLO, MAGIC, FrameKind
from pgasdl.runtime.bootstrap.server import MIN_PENDING
from pgasdl.runtime.bootstrap.table import GATHER_OPTIONS, GET_OPTIONS


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(SECRET, 4, job_id=JOB) as running:
        yield running


def test_wrong_secret_is_refused_on_both_sides(server: StoreServer) -> None:
    wrong = bytes(32)
    with pytest.raises(BootstrapError, match="not the store of this job"):
        StoreClient(server.address, wrong, 0, 4, JOB, 5)
    with pytest.raises(BootstrapError, match="not the store of this job"):
        StoreClient(server.address, SECRET, 0, 4, "another job", 5)
    stranger = RawRank(server, 0, wrong)
    assert not stranger.genuine and stranger.is_dropped()
    assert server.states == (RankState.ABSENT,) * 4
    with pytest.raises(BootstrapError):
        StoreServer(b"short", 1)


def test_proof_does_not_pass_through_a_relay(server: StoreServer) -> None:
    """Both addresses are part of the proof: a relay between them cannot pass it on."""
    with socket.socket() as relay:
        relay.bind(("127.0.0.1", 0))
        relay.listen(8)

        def pass_on() -> None:
            inside, _ = relay.accept()
            with inside, socket.create_connection(server.address) as outside:
                outside.sendall(inside.recv(HELLO.size))
                inside.sendall(outside.recv(CHALLENGE.size))

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(BootstrapError, match=r"another secret.*relay or NAT"):
            StoreClient(relay.getsockname(), SECRET, 0, 4, JOB, 5)
        thread.join(5)


def test_duplicate_rank_and_wrong_size_are_refused(server: StoreServer) -> None:
    with client(server, 1) as store:
        with pytest.raises(BootstrapError, match="rank 1 is already connected"):
            client(server, 1)
        store.put("a", b"")
        with pytest.raises(BootstrapError, match=r"rank 7 of 8.*serves 4"):
            StoreClient(server.address, SECRET, 7, 8, JOB, 5)


def test_replayed_connection_and_replayed_frame(server: StoreServer) -> None:
    rank = RawRank(server, 0)
    assert rank.frame().kind is FrameKind.WELCOME
    put = rank.sealer.seal(FrameKind.PUT, 1, channel.pack_key("a", b"1"))
    rank.send(put)
    assert rank.frame().kind is FrameKind.DONE
    with socket.create_connection(server.address, 5) as replay:
        replay.sendall(rank.sent)
        replay.settimeout(5)
        received = b""
        try:
            while part := replay.recv(4096):
                received += part
        except ConnectionError:
            pass
        assert len(received) <= CHALLENGE.size  # a challenge, never a frame
    rank.send(put)
    assert rank.is_dropped()


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("!IQBI", 65537, 0, int(FrameKind.PUT), 1),
        struct.pack("!IQBI", 0xFFFFFFFF, 0, int(FrameKind.PUT), 1),
        struct.pack("!IQBI", 0, 1, int(FrameKind.PUT), 1),
        struct.pack("!IQBI", 0, 0, 99, 1),
        struct.pack("!IQBI", 0, 0, int(FrameKind.PUT), 1) + bytes(32),
    ],
    ids=["65537 bytes", "4 GiB", "counter", "kind", "mac"],
)
def test_malformed_frames_end_their_connection_only(server: StoreServer, body: bytes) -> None:
    with client(server, 1) as store:
        rank = RawRank(server, 0)
        assert rank.frame().kind is FrameKind.WELCOME
        rank.send(body)
        assert rank.is_dropped()
        store.put("a", b"")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.PUT, b""),
        (FrameKind.PUT, b"\xff\xffa"),
        (FrameKind.PUT, b"\0\0"),
        (FrameKind.GET, b"\0"),
        (FrameKind.GET, GET_OPTIONS.pack(1, 4) + channel.pack_key("a")),
        (FrameKind.GATHER, b"\0"),
        (FrameKind.GATHER, GATHER_OPTIONS.pack(1, 0)),
        (FrameKind.GATHER, GATHER_OPTIONS.pack(1, 0) + channel.pack_key("a")),
        (FrameKind.GATHER, GATHER_OPTIONS.pack(1, 0) + channel.pack_key("a", b"\x10")),
        (FrameKind.GATHER, GATHER_OPTIONS.pack(1, 2) + channel.pack_key("a", b"\x03")),
        (FrameKind.WELCOME, b""),
    ],
)
def test_senseless_requests_end_their_connection_only(
    server: StoreServer, kind: FrameKind, body: bytes
) -> None:
    with client(server, 1) as store:
        rank = RawRank(server, 0)
        assert rank.frame().kind is FrameKind.WELCOME
        rank.send(rank.sealer.seal(kind, 1, body))
        assert rank.is_dropped()
        store.put("a", b"")


def test_strangers_leave_descriptors_free(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = (
        "import resource, socket, sys\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "crowd = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(300)]\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = [sys.executable, "-c", crowd, *map(str, server.address)]
    limit = len(os.listdir("/proc/self/fd")) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit // 8)]
            with client(server, 1, timeout=60) as store:
                store.put("a", b"")
            for descriptor in spare:
                os.close(descriptor)
            process.communicate()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "accept failed" not in caplog.text


def test_half_open_and_slow_connections_block_nobody(server: StoreServer) -> None:
    crowd = [socket.create_connection(server.address) for _ in range(3 * MIN_PENDING)]
    slow = crowd[-1]
    for sock in crowd[-50:]:
        sock.send(MAGIC[:1])
    started = time.monotonic()
    stores = [client(server, rank) for rank in range(4)]
    assert time.monotonic() - started < 2.0
    stores[0].put("a", b"1")
    assert stores[3].get("a") == b"1"
    # A byte now and then does not extend the deadline.
    slow.settimeout(0.2)
    dropped = False
    for byte in (MAGIC + bytes(32))[1:]:
        try:
            slow.send(bytes([byte]))
            if slow.recv(1) == b"":
                dropped = True
                break
        except TimeoutError:
            continue
        except ConnectionError:
            dropped = True
            break
    assert dropped
    assert time.monotonic() - started < 2 * channel.HANDSHAKE_SECONDS + 2
    assert stores[1].get("a") == b"1"
    for sock in crowd:
        sock.close()


def _hostile(server: StoreServer, seed: int, n: int, rank: int) -> int:
    """Send ``n`` inputs that no rank of the job would send; return how many were accepted."""
    generator = random.Random(seed)
    recorded = RawRank(server, rank)
    recorded.frame()
    recorded.send(recorded.sealer.seal(FrameKind.PUT, 1, channel.pack_key("recorded", b"x")))
    recorded.frame()
    recorded.sock.close()
    accepted = 0
    for i in range(n):
        if i % 5 == 0:  # a genuine rank; one bit of its next frame is flipped on the way
            sender = RawRank(server, rank)
            if sender.frame().kind is not FrameKind.WELCOME:
                continue  # the store has not yet noticed that the last sender ended
            sealed = sender.sealer.seal(FrameKind.PUT, 1, channel.pack_key("hostile", b"x" * 8))
            data = bytearray(sealed)
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            sender.send(data)
            sender.sock.shutdown(socket.SHUT_WR)
            accepted += sender.sock.recv(4096) != b""
            sender.sock.close()
            continue
        data = bytearray(recorded.sent)
        match i % 5:
            case 1:
                data = bytearray(generator.randbytes(generator.randrange(1, 300)))
            case 2:
                data[generator.randrange(HELLO.size)] ^= 1 << generator.randrange(8)
            case 3:
                del data[generator.randrange(1, len(data)) :]
        with socket.create_connection(server.address, 5) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                received = b""
                while part := sock.recv(4096):
                    received += part
            except OSError:  # dropped at any point
                continue
            accepted += len(received) > CHALLENGE.size
    return accepted


def test_two_thousand_hostile_inputs_while_ranks_exchange(server: StoreServer) -> None:
    with ThreadPoolExecutor() as pool, client(server, 0) as one, client(server, 1) as two:
        hostile = [pool.submit(_hostile, server, seed, 1000, 2 + seed) for seed in range(2)]
        turns = 0
        while not all(h.done() for h in hostile) or turns < 20:
            key = f"turn{turns}"
            got = pool.submit(two.get, key, 10.0)
            one.put(key, key.encode())
            assert got.result(10) == key.encode()
            turns += 1
        assert [h.result() for h in hostile] == [0, 0]
        with pytest.raises(PgasTimeoutError):
            one.get("hostile", 0)
        assert server.states[:2] == (RankState.CONNECTED,) * 2


def test_secret_is_in_no_message(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = secrets.token_bytes(32)
    with StoreServer(secret, 1) as running:
        with pytest.raises(BootstrapError) as caught:
            StoreClient(running.address, SECRET, 0, 1, "", 2)
        with StoreClient(running.address, secret, 0, 1, "", 2) as store:
            text = caplog.text + str(caught.value) + repr(store) + repr(running)
    for hidden in (secret, SECRET):
        assert hidden.hex() not in text and repr(hidden) not in text
