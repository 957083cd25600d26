"""How fast an all-reduce is, beside what copies on this device would take for it.

With n ranks on one GPU every rank's array is read once and written once: 2 n bytes for each byte of
the array, so a copy's rate C (read and written) admits C / 2n at most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_arrays import Array, Stream

from on_device import driver, ranks
from on_device.ceilings import copy_rate
from on_device.findings import Tell
from on_device.kernels import Sum
from pgasdl import loopback

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 64 << 20, 256 << 20, 1 << 30)
SMOKE = (1 << 8, 1 << 12)
GOAL, FROM = 0.8, 64 << 20
TOGETHER = 4


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    measure(tell, smoke)
    with tell.step("ranks that are threads"):
        threads(tell, smoke)


def measure(
    tell: Tell,
    smoke: bool,
    *,
    env: dict[str, str] | None = None,
    sizes: tuple[int, ...] = SIZES,
) -> None:
    """With 2 and 4 processes."""
    for n in (2,) if smoke else (2, 4):
        with tell.step(f"{n} ranks"):
            ranks.run(
                n, "on_device.allreduce:rank", tell.under(f"{n} ranks, "), timeout=60, env=env,
                sizes=SMOKE if smoke else sizes,
            )  # fmt: skip


def threads(tell: Tell, smoke: bool) -> None:
    """Time one process, in one context: without the cost of sharing the device."""

    def program(ctx: Any) -> None:
        from cuda_arrays import Device

        with Device():
            of = Tell(tell.path, ctx.rank, "2 threads, ")
            rank(ctx, of, sizes=SMOKE if smoke else (1 << 16, 64 << 20))

    loopback.run(2, program, timeout=20)


def repetitions(nbytes: int) -> int:
    """The number of turns of a measurement: equal on all ranks."""
    if nbytes in SMOKE:
        return 3
    return 30 if nbytes <= 1 << 20 else 10 if nbytes <= 64 << 20 else 5


def rank(ctx: Any, tell: Tell, *, sizes: list[int] | tuple[int, ...]) -> None:
    """One rank's part: the ways in turn, each timed alone and as several in a row."""
    stream = Stream()
    ceiling = 0.0
    if ctx.rank == 0:
        ceiling = copy_rate(stream, min(max(sizes), 1 << 30), 5)
    ctx.barrier()
    for nbytes in sizes:
        count = nbytes // 4
        segment = ctx.segment(nbytes, device="cuda:0")
        inside, elsewhere = Array(count, np.float32, segment.address), Array(count, np.float32)
        handle = ctx.allreduce_handle(inside)
        ways: dict[str, Callable[[], Any]] = {
            "in a segment": lambda handle=handle: handle(stream=stream),  # type: ignore[misc]
            "elsewhere": lambda array=elsewhere: ctx.allreduce(array, stream=stream),  # type: ignore[misc]
        }
        if nbytes <= 64 << 20:
            ways["by the host"] = by_the_host(ctx, stream, elsewhere)
        alone: dict[str, list[float]] = {name: [] for name in ways}
        row: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(repetitions(nbytes) + 1):
            for name, call in ways.items():
                for times, together in ((alone, 1), (row, TOGETHER)):
                    taken = timed(ctx, stream, call, together)
                    if turn:
                        times[name].append(taken)
        for name in ways:
            told(tell, f"{name}, {size(nbytes)}", nbytes, ctx.size, ceiling, alone[name], row[name])
        if nbytes in (FROM, 4 * FROM) or nbytes == SMOKE[1]:
            parts(ctx, tell, stream, segment, nbytes)
        ctx.barrier()
        handle.close()
        segment.delete()
        driver.free(elsewhere.address)
        ctx.barrier()


def timed(ctx: Any, stream: Stream, call: Callable[[], Any], together: int) -> float:
    """Seconds of one, of some in a row."""
    stream.synchronize()
    ctx.barrier()

    def calls() -> None:
        for _ in range(together):
            call()
        stream.synchronize()

    return driver.timed(calls) / together


def by_the_host(ctx: Any, stream: Stream, array: Array) -> Callable[[], None]:
    """Do as a program would without all this: copy, reduce there, copy back; memory pinned."""
    pinned = driver.Pinned(array.nbytes)
    there = np.ctypeslib.as_array(pinned.words).view(np.float32)

    def call() -> None:
        stream.copy(pinned.address, array.address or 0, array.nbytes)
        stream.synchronize()
        ctx.allreduce(there)
        stream.copy(array.address or 0, pinned.address, array.nbytes)

    return call


def told(
    tell: Tell,
    name: str,
    nbytes: int,
    n: int,
    ceiling: float,
    alone: list[float],
    row: list[float],
) -> None:
    """Tell a time, a rate and the share of what copies admit."""
    best, each = statistics.median(alone), statistics.median(row)
    detail: dict[str, Any] = {"alone_us": 1e6 * best, "in_a_row_us": 1e6 * each}
    detail |= {"alone": alone, "in_a_row": row, "ranks": n, "nbytes": nbytes}
    if nbytes < 1 << 20 or not ceiling:
        tell(f"{name}: alone {1e6 * best:.0f} us, in a row", 1e6 * each, "us", **detail)
        return
    share = 2 * n * nbytes / each / ceiling
    detail |= {"share_alone": 2 * n * nbytes / best / ceiling, "share": share}
    detail["ceiling"] = ceiling
    rate = f"{nbytes / each / 1e9:.1f} GB/s"
    goal = ""
    if nbytes >= FROM and name.startswith("in a segment"):
        goal = "(goal met)" if share >= GOAL else f"(below the goal of {100 * GOAL:.0f})"
    tell(f"{name}: alone {1e6 * best:.0f} us, in a row {rate}", 100 * share, f"% {goal}", **detail)


def size(nbytes: int) -> str:
    """As people write it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes / 1024:g} KiB"


def parts(ctx: Any, tell: Tell, stream: Stream, segment: Any, nbytes: int) -> None:
    """Time the parts of a large one: the kernel of each rank, alone and beside the others'."""
    share = nbytes // ctx.size // 16 * 16
    begin = share * ctx.rank
    places = [
        (segment.address if rank == ctx.rank else segment.address_of(rank)) + begin
        for rank in range(ctx.size)
    ]
    kernel = Sum("f32", places, places, share)
    blocks = 2 * driver.multiprocessors()
    alone = None
    if ctx.rank == 0:
        alone = kernel.moves / kernel.rate(stream, blocks, 5)
    taken = [
        timed(ctx, stream, lambda: kernel.launch(stream, blocks), together)
        for together in (1, TOGETHER)
        for _ in range(5)
    ]
    ctx.barrier()
    tell(
        f"of {size(nbytes)}: a rank's kernel while the others do nothing",
        1e6 * (alone or 0.0), "us",
    )  # fmt: skip
    one, several = statistics.median(taken[:5]), statistics.median(taken[5:])
    tell(
        f"of {size(nbytes)}: all ranks' kernels at once {1e6 * one:.0f} us, in a row",
        1e6 * several, "us", best=1e6 * ctx.size * (alone or 0.0),
    )  # fmt: skip
