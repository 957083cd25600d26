"""ResNet-50's gradients exchanged behind kernels that compute: how much of the exchange is hidden.

A step launches a kernel for each layer of the backward pass and calls ``ready`` behind it, then a
kernel for each layer of the forward pass behind ``wait``. All ranks share the device, so kernels of
an exchange also take time from those that compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from cuda_arrays import Stream

from on_device import driver, ranks
from on_device.findings import Tell
from pgasdl import GradientExchange, models


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    measure(tell, smoke, {})


def measure(tell: Tell, smoke: bool, env: dict[str, str]) -> None:
    """With 2 and 4 processes; ``env`` is theirs."""
    layers = [1000, 2048, 30, 7] if smoke else list(models.layers("resnet50"))
    for n in (2,) if smoke else (2, 4):
        for bucket_bytes in (0,) if smoke else (0, 8 << 20):
            name = f"{n} ranks, buckets of {bucket_bytes >> 20} MiB, "
            with tell.step(name):
                ranks.run(
                    n, "on_device.training:rank", tell.under(name), timeout=30, env=env,
                    layers=layers,
                    bucket_bytes=bucket_bytes, seconds=1e-3 if smoke else 20e-3,
                    times=2 if smoke else 12,
                )  # fmt: skip


def rank(
    ctx: Any, tell: Tell, *, layers: list[int], bucket_bytes: int, seconds: float, times: int
) -> None:
    """Time steps with computing, with the exchange, and with both, in turn."""
    stream, work = Stream(), driver.Work()
    for of in range(ctx.size):  # each rank while the others are idle
        if of == ctx.rank:
            work.calibrate(stream)
        ctx.barrier()
    # All ranks' kernels together take `seconds`, if the device is shared fairly.
    each = seconds / ctx.size / len(layers)
    shapes = [((count,), "f4") for count in layers]
    calling: list[float] = []  # seconds of each ready()
    with GradientExchange(ctx, shapes, device="cuda:0", bucket_bytes=bucket_bytes) as exchange:

        def step(computes: bool, exchanges: bool) -> None:
            for layer in range(len(layers)):
                if computes:
                    work.seconds(stream, 2 / 3 * each)
                if exchanges:
                    began = time.perf_counter()
                    exchange.ready(layer, stream=stream)
                    calling.append(time.perf_counter() - began)
            for layer in reversed(range(len(layers))):
                if exchanges:
                    exchange.wait(layer)
                if computes:
                    work.seconds(stream, 1 / 3 * each)
            stream.synchronize()

        kinds: dict[str, Callable[[], None]] = {
            "computing": lambda: step(True, False),
            "exchange": lambda: step(False, True),
            "both": lambda: step(True, True),
        }
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        trace: list[tuple[float, float, float]] = []
        for turn in range(times + 2):
            for name, call in kinds.items():
                ctx.barrier()
                origin = time.monotonic()
                time_of_it = driver.timed(call)
                if turn > 1:
                    taken[name].append(time_of_it)
            trace = [
                (each.ready - origin, each.began - origin, each.ended - origin)
                for each in exchange.timings
            ]
        exchange.finish()
    ctx.barrier()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in medians.items():
        tell(f"a step, {name}", 1e3 * value, "ms", all=taken[name])
    hidden = (medians["computing"] + medians["exchange"] - medians["both"]) / medians["exchange"]
    tell("hidden of the exchange", 100 * hidden, "%", trace=trace, layers=layers)
    tell("the call of ready()", 1e6 * statistics.median(calling), "us")
    gradient_bytes = 4 * sum(layers)
    tell("gradients exchanged", gradient_bytes / medians["exchange"] / 1e9, "GB/s")
