"""The best that the machine gives: copies, and how long a word, a launch and an event take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

from on_device import driver, ranks
from on_device.findings import Tell


def copy_rate(stream: Stream, nbytes: int, times: int) -> float:
    """Bytes that copies on the device read and write in a second, at best."""
    first, second = Array(nbytes, "u1"), Array(nbytes, "u1")
    assert first.address is not None and second.address is not None
    rate = 2 * rate_of(stream, second.address, first.address, nbytes, times)
    driver.free(first.address)
    driver.free(second.address)
    return rate


def rate_of(stream: Stream, to: int, source: int, nbytes: int, times: int) -> float:
    """Bytes in a second, the median; each time is of a few copies."""
    together = 4
    stream.copy(to, source, nbytes)
    stream.synchronize()

    def copies() -> None:
        for _ in range(together):
            stream.copy(to, source, nbytes)
        stream.synchronize()

    return together * nbytes / statistics.median(driver.timed(copies) for _ in range(times))


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    big, times, often = (1 << 16, 2, 5) if smoke else (1 << 30, 5, 300)
    with Device():
        stream = Stream()
        with tell.step("device to device"):
            rate = copy_rate(stream, big, times)
            tell("device to device, read and written", rate / 1e9, "GB/s")
            for n in (2, 4):
                tell(f"all-reduce of {n} ranks on it, at most", rate / (2 * n) / 1e9, "GB/s")
        with tell.step("host and device"):
            host_copies(tell, stream, big // 4, times)
        with tell.step("latencies"):
            latencies(tell, stream, often)
    with tell.step("to a peer's memory"):
        ranks.run(2, "on_device.ceilings:to_a_peer", tell, timeout=30, nbytes=big, times=times)


def host_copies(tell: Tell, stream: Stream, nbytes: int, times: int) -> None:
    """Between pinned and pageable memory of the host and the device."""
    array = Array(nbytes, "u1")
    assert array.address is not None
    pinned = driver.Pinned(nbytes)
    tell("registering memory of the host", nbytes / pinned.registered / 1e9, "GB/s")
    there, here = array.address, pinned.address
    tell("pinned host to device", rate_of(stream, there, here, nbytes, times) / 1e9, "GB/s")
    tell("device to pinned host", rate_of(stream, here, there, nbytes, times) / 1e9, "GB/s")
    pageable = np.zeros(nbytes, np.uint8)
    tell(
        "pageable host to device",
        rate_of(stream, there, pageable.ctypes.data, nbytes, times) / 1e9, "GB/s",
    )  # fmt: skip
    other, half = Stream(), nbytes // 2

    def both() -> None:
        stream.copy(there, here, half)
        other.copy(here + half, there + half, half)
        stream.synchronize()
        other.synchronize()

    taken = statistics.median(driver.timed(both) for _ in range(times))
    tell("both ways at once, together", nbytes / taken / 1e9, "GB/s")


def latencies(tell: Tell, stream: Stream, often: int) -> None:
    """The times of single operations, by the host's clock."""
    work, event = driver.Work(), driver.Event()
    pinned = driver.Pinned(4096)
    words, small = pinned.words, Array(16, "u1")
    assert small.address is not None
    to_device, to_host = 0, 16  # words in lines of their own

    def launched() -> None:
        work.turns(stream, 0, 1)

    def launched_and_seen() -> None:
        launched()
        event.record(stream)
        while not event.reached():
            pass

    def launched_and_awaited() -> None:
        launched()
        stream.synchronize()

    turn = 0

    def written() -> None:
        nonlocal turn
        turn += 1
        driver.write_value(stream, pinned.device + 4 * to_host, turn)
        while words[to_host] != turn:
            pass

    def prepared() -> None:
        nonlocal turn
        turn += 1
        driver.wait_value(stream, pinned.device + 4 * to_device, turn)
        driver.write_value(stream, pinned.device + 4 * to_host, turn)
        time.sleep(2e-4)  # the stream waits by now

    def released() -> None:
        words[to_device] = turn
        while words[to_host] != turn:
            pass

    def copied() -> None:
        stream.copy(pinned.address, small.address or 0, 16)
        stream.synchronize()

    def told(name: str, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> None:
        times = []
        for _ in range(often + 3):
            if before is not None:
                before()
            times.append(1e6 * driver.timed(call))
            if before is None and call is launched and len(times) % 50 == 0:
                stream.synchronize()
        stream.synchronize()
        kept = sorted(times[3:])
        tell(name, statistics.median(kept), "us", p99=kept[int(0.99 * len(kept))], least=kept[0])

    told("the call that launches a kernel", launched)
    told("kernel launched, its event seen by polling", launched_and_seen)
    told("kernel launched, stream synchronised", launched_and_awaited)
    told("a stream writes a word, the host sees it", written)
    told("the host stores a word, a waiting stream answers", released, prepared)
    told("16 bytes copied to the host, synchronised", copied)


def to_a_peer(ctx: Any, tell: Tell, *, nbytes: int, times: int) -> None:
    """Copies to and from a mapping of another process's memory."""
    stream = Stream()
    began = time.perf_counter()
    segment = ctx.segment(nbytes, device="cuda:0")
    tell("making a segment of two ranks", 1e3 * (time.perf_counter() - began), "ms", nbytes=nbytes)
    ctx.barrier()
    if ctx.rank == 0:
        mine, his = segment.address, segment.address_of(1)
        for name, to, source in (("to", his, mine), ("from", mine, his)):
            rate = 2 * rate_of(stream, to, source, nbytes, times)
            tell(f"{name} a peer's memory, read and written", rate / 1e9, "GB/s")
    ctx.barrier()
