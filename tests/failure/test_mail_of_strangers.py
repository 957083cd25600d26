"""A rank's mailbox for descriptors: what strangers send there changes and exhausts nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forking import Job
from support.leftovers import sockets_of

OFFER = struct.Struct("16siII")


def mailbox(pid: int) -> str:
    """The address of a rank's mailbox, as anybody on the machine can find it."""
    inodes = sockets_of(pid)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[6] in inodes and words[7].startswith("@pgasdl-"):
            return words[7][1:]
    raise AssertionError(f"process {pid} has no mailbox")


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def busy(job: Callable[..., Job]) -> Iterator[tuple[Job, list[str]]]:
    """Two ranks that create segments all the time, and the addresses of their mailboxes."""
    ranks = job("stranger_target.py", 2, PGASDL_TIMEOUT="20", PGASDL_STOPPED_AFTER="1.0")
    ranks.said("running")
    yield ranks, [mailbox(ranks[rank].pid) for rank in (0, 1)]


def finish(ranks: Job) -> None:
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR2)
    assert ranks.ended() == [0, 0], ranks.transcript()
    for rank in (0, 1):
        complete = ranks.event(rank, "complete")
        assert complete["segments"] > 0
        assert complete["descriptors_after"] <= complete["descriptors_before"], complete


def messages() -> list[tuple[bytes, int]]:
    """The datagrams that a stranger might send, and with how many descriptors."""
    wrong = OFFER.pack(secrets.token_bytes(16), 1, 1, 0)
    return [
        (b"", 0),
        (b"x", 1),
        (wrong, 0),
        (wrong, 1),
        (wrong, 2),
        (wrong, 7),
        (wrong[:-1], 1),
        (wrong + b"x", 1),
        (bytes(OFFER.size), 3),
        (secrets.token_bytes(4096), 1),
        (OFFER.pack(bytes(16), -1, 0xFFFFFFFF, 1), 2),
    ]


@pytest.mark.full
def test_what_strangers_send_is_dropped_with_its_descriptors(busy: tuple[Job, list[str]]) -> None:
    ranks, addresses = busy
    started = [open_descriptors(ranks[rank].pid) for rank in (0, 1)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(5)
        for _ in range(100):
            for address in addresses:
                for content, n in messages():
                    fds = struct.pack(f"{n}i", *[0] * n)
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if n else []
                    stranger.sendmsg([content], rights, 0, f"\0{address}")
    # Some that are on their way may still be open; hundreds of them would be a leak.
    for rank in (0, 1):
        assert open_descriptors(ranks[rank].pid) < started[rank] + 30
    finish(ranks)


@pytest.mark.full
def test_flood_does_not_silence_a_rank(busy: tuple[Job, list[str]]) -> None:
    """It lasts longer than the limit after which a rank without a heartbeat counts as stopped."""
    ranks, addresses = busy
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as stranger:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for address in addresses:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(1000):  # sending never blocks where the kernel drops them
                        stranger.sendto(b"x", f"\0{address}")
    finish(ranks)


@pytest.mark.full
def test_what_a_stranger_leaves_lingering_holds_nobody_up(busy: tuple[Job, list[str]]) -> None:
    """A rank never gets a stranger's descriptor, so it need not close one whose close blocks."""
    ranks, addresses = busy
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as stuck,
        server.accept()[0] as reader,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
    ):
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stuck.send(bytes(1 << 20))
        # Its last close blocks while nobody reads what was sent.
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        last = threading.Thread(target=stuck.close)
        ranks.signal(0, signal.SIGSTOP)
        try:
            while Path(f"/proc/{ranks[0].pid}/stat").read_text().rsplit(") ")[-1][0] != "T":
                time.sleep(0.01)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", stuck.fileno()))]
            stranger.sendmsg([messages()[3][0]], rights, 0, f"\0{addresses[0]}")
            last.start()
            last.join(0.3)  # returns at once if the queued datagram holds it
        finally:
            ranks.signal(0, signal.SIGCONT)
        time.sleep(2.0)  # longer than a rank may be without a heartbeat
        finish(ranks)
        reader.close()  # with unread bytes: a reset, which ends the lingering
        last.join(10)
        assert not last.is_alive()


@pytest.mark.full
def test_segments_are_made_during_a_flood(busy: tuple[Job, list[str]]) -> None:
    ranks, addresses = busy
    made = len(ranks[0].said("made"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as stranger:
        deadline = time.monotonic() + 10.0
        while len(ranks[0].said("made")) < made + 3 and time.monotonic() < deadline:
            for address in addresses:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(1000):
                        stranger.sendto(b"x", f"\0{address}")
            ranks.pump()
    assert len(ranks[0].said("made")) >= made + 3
    finish(ranks)


def test_descriptor_that_is_not_sealed_is_refused(job: Callable[..., Job]) -> None:
    """Memory that a member of the job could still shrink is refused."""
    ranks = job("unsealed.py", 2, PGASDL_TIMEOUT="10")
    refused = ranks.event(0, "refused")
    assert refused["kind"] == "SegmentError" and "sealed" in refused["text"], ranks.transcript()
    ranks.ended()
