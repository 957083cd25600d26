"""All-reduce by way of the host, beside what copies to and from pinned memory would take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_arrays import Array, Stream

from on_device import driver, ranks
from on_device.allreduce import repetitions, size
from on_device.findings import NotAvailable, Tell

SIZES = (1 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    sizes = (1 << 8,) if smoke else SIZES
    for n in (2,) if smoke else (2, 4):
        name = f"any bits by way of the host, {n} ranks"
        with tell.step(name):
            counts = (1000, 2_500_001) if smoke else (1000, 300_007, 5_000_003)
            ranks.run(
                n, "on_device.collectives:bits", tell, timeout=30,
                env={"PGASDL_GPU": "staged"}, counts=counts,
            )  # fmt: skip
            tell.check(name, True, counts=counts)
        with tell.step(f"PGASDL_GPU=staged, {n} ranks"):
            ranks.run(
                n, "on_device.staged:through_the_host", tell.under(f"staged, {n} ranks, "),
                timeout=25, env={"PGASDL_GPU": "staged"}, sizes=sizes,
            )  # fmt: skip
    with tell.step("by an MPI"):
        by_mpi(tell, sizes)


def by_mpi(tell: Tell, sizes: tuple[int, ...]) -> None:
    """Arrays on the device go through the host here."""
    try:
        ranks.run(
            2, "on_device.staged:through_the_host", tell.under("MPI, 2 ranks, "), timeout=30,
            flags=("--mpi", "--transport", "mpi"), sizes=sizes,
        )  # fmt: skip
    except RuntimeError as error:
        if "mpi" not in str(error).lower():
            raise
        raise NotAvailable(str(error)[-300:]) from None


def through_the_host(ctx: Any, tell: Tell, *, sizes: list[int]) -> None:
    """Beside two copies of the array between device and pinned memory."""
    stream = Stream()
    for nbytes in sizes:
        array = Array(nbytes // 4, np.float32)
        pinned = driver.Pinned(max(4096, nbytes))

        def copies(array: Array = array, pinned: driver.Pinned = pinned) -> None:
            stream.copy(pinned.address, array.address or 0, array.nbytes)
            stream.copy(array.address or 0, pinned.address, array.nbytes)

        def ours(array: Array = array) -> None:
            ctx.allreduce(array, stream=stream)

        calls = {"copies": copies, "ours": ours}
        medians = compared(ctx, calls, stream.synchronize, nbytes)
        tell(
            f"{size(nbytes)}: {1e6 * medians['ours']:.0f} us, as fast as copies alone",
            100 * medians["copies"] / medians["ours"], "%", medians=medians,
        )  # fmt: skip


def compared(
    ctx: Any, calls: dict[str, Callable[[], Any]], synchronize: Callable[[], Any], nbytes: int
) -> dict[str, float]:
    """The median of each, one after the other in each repetition."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repetitions(nbytes) // 2 + 1):
        for name, call in calls.items():
            synchronize()
            ctx.barrier()

            def once(call: Callable[[], Any] = call) -> None:
                call()
                synchronize()

            seconds = driver.timed(once)
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(times) for name, times in taken.items()}
