"""How long a notified put takes, by who waits: the host, or the peer's stream."""

from __future__ import annotations

import statistics
import time
from typing import Any

from cuda_arrays import Stream

from on_device import ranks
from on_device.findings import Tell

TO, BACK = 0, 1  # notifications


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    sizes, times = ((8,), 5) if smoke else ((8, 4096, 1 << 16, 1 << 20, 16 << 20), 60)
    for device in ("cpu", "cuda:0"):
        with tell.step(f"puts on {device}"):
            ranks.run(
                2, "on_device.puts:host_waits", tell, timeout=20, sizes=sizes, times=times,
                device=device,
            )  # fmt: skip
    with tell.step("puts between streams"):
        ranks.run(2, "on_device.puts:stream_waits", tell, timeout=20, sizes=sizes, times=times)


def told(tell: Tell, name: str, nbytes: int, trips: list[float]) -> None:
    half = sorted(1e6 * trip / 2 for trip in trips[2:])
    median = statistics.median(half)
    tell(
        f"{name}, {nbytes} bytes", median, "us",
        p90=half[int(0.9 * len(half))], least=half[0], rate=nbytes / median / 1e3,
    )  # fmt: skip


def host_waits(ctx: Any, tell: Tell, *, sizes: list[int], times: int, device: str) -> None:
    """Half of a round trip; both hosts wait."""
    there, back = (TO, BACK) if ctx.rank == 0 else (BACK, TO)
    stream = None if device == "cpu" else Stream()
    for nbytes in sizes:
        segment = ctx.segment(nbytes, device=device)
        ctx.barrier()
        trips = []
        for _ in range(times + 2):
            began = time.perf_counter()
            for turn in (0, 1):
                if turn == ctx.rank:
                    put(ctx, segment, there, stream)
                else:
                    ctx.notify_waitsome(segment, back, 1)
                    ctx.notify_reset(segment, back)
            trips.append(time.perf_counter() - began)
        told(tell, f"put on {device}, hosts wait", nbytes, trips)
        ctx.barrier()
        segment.delete()


def put(ctx: Any, segment: Any, notification: int, stream: Stream | None) -> None:
    peer = 1 - ctx.rank
    if stream is None:
        ctx.write_notify(segment[:], peer, segment[:], notification)
    else:
        ctx.write_notify_on(stream, segment[:], peer, segment[:], notification)


def stream_waits(ctx: Any, tell: Tell, *, sizes: list[int], times: int) -> None:
    """The same, but rank 1's answer is enqueued before rank 0 puts."""
    stream = Stream()
    for nbytes in sizes:
        segment = ctx.segment(nbytes, device="cuda:0")
        trips = []
        for _ in range(times + 2):
            if ctx.rank == 1:
                ctx.notify_wait_on(stream, segment, TO)
                ctx.notify_reset_on(stream, segment, TO)
                put(ctx, segment, BACK, stream)
            ctx.barrier()
            if ctx.rank == 0:
                began = time.perf_counter()
                put(ctx, segment, TO, stream)
                ctx.notify_waitsome(segment, BACK, 1)
                ctx.notify_reset(segment, BACK)
                trips.append(time.perf_counter() - began)
        if ctx.rank == 0:
            told(tell, "put on cuda:0, the peer's stream answers", nbytes, trips)
        ctx.barrier()
        segment.delete()
