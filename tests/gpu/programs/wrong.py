"""Wrong input on a GPU, by two ranks that are threads: what is refused, and in which words.

Prints what each part was told; the text is the test's to judge.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cuda_arrays import Array, Device, Stream

from pgasdl import GradientExchange, loopback
from pgasdl.errors import PgasError

COUNT = 300
Said = dict[str, str]


def told(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except (PgasError, BufferError) as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def streams(ctx: Any) -> Said:
    """Streams that are none, and memory that no stream orders."""
    on_gpu, on_host = ctx.segment(4096, device="cuda:0"), ctx.segment(4096)
    host, array = np.zeros(COUNT, np.float32), Array(COUNT, np.float32)
    peer, stream = 1 - ctx.rank, Stream()
    handle = ctx.allreduce_handle(host)
    here, there = on_gpu[0:64], on_gpu[64:128]
    said = {
        "host segment": told(lambda: ctx.notify_wait_on(stream, on_host, 0)),
        "host slices": told(
            lambda: ctx.write_notify_on(stream, on_host[0:8], peer, on_host[8:16], 0)
        ),
        "host reset": told(lambda: ctx.notify_reset_on(stream, on_host, 0)),
        "host allreduce": told(lambda: ctx.allreduce(host, stream=stream)),
        "host handle": told(lambda: handle.start(stream=stream)),
        "word": told(lambda: ctx.write_notify_on("no stream", here, peer, there, 0)),
        "negative": told(lambda: ctx.allreduce(array, stream=-1)),
        "handle": told(lambda: ctx.write_notify_on(0x1234560, here, peer, there, 0)),
        "handle, waiting": told(lambda: ctx.notify_wait_on(0x1234560, on_gpu, 0)),
        "notification": told(lambda: ctx.notify_wait_on(stream, on_gpu, 1 << 30)),
        "value 0": told(lambda: ctx.write_notify_on(stream, here, peer, there, 0, 0)),
        "beyond": told(lambda: ctx.write_notify_on(stream, here, peer, on_gpu[4090:4154], 0)),
    }
    handle.close()
    ctx.barrier()
    return said


def memory(ctx: Any) -> Said:
    """Devices that are not there, and what the host cannot do."""
    segment, peer = ctx.segment(4096, device="cuda:0"), 1 - ctx.rank
    array, other = Array(COUNT, np.float32), np.zeros(COUNT, np.float32)
    layers = [((COUNT,), "f4")]
    said = {
        "cuda:9": told(lambda: ctx.segment(64, device="cuda:9")),
        "tpu": told(lambda: ctx.segment(64, device="tpu")),
        "exchange on cuda:9": told(lambda: GradientExchange(ctx, layers, device="cuda:9")),
        "numpy": told(segment.numpy),
        "memoryview": told(lambda: memoryview(segment)),
        "atomic": told(lambda: ctx.atomic_fetch_add(segment[0:8], peer, 1)),
        "swap": told(lambda: ctx.atomic_compare_swap(segment[0:8], peer, 0, 1)),
        "out": told(lambda: ctx.allreduce_handle(array, out=other)),
        "small allreduce": told(lambda: ctx.world.combine(array)),
        "mean of integers": told(lambda: ctx.allreduce(Array(8, np.int32), "mean")),
        "complex": told(lambda: ctx.allreduce(Array(8, np.complex64))),
    }
    ctx.barrier()
    return said


def small(ctx: Any) -> Said:
    """No elements, and dtypes without a name."""
    stream, said = Stream(), {}
    for dtype in (np.float16, ml_dtypes.bfloat16):
        array = Array(COUNT, dtype)
        array.fill(np.ones(COUNT, dtype), stream)
        ctx.allreduce(array, stream=stream)
        assert (array.values(stream) == ctx.size).all()
    empty = Array(0, np.float32)
    said["no elements"] = told(lambda: ctx.allreduce(empty, stream=stream))
    with ctx.allreduce_handle(empty) as handle:
        said["a handle of none"] = told(lambda: handle(stream=stream))
    segment = ctx.segment(0, device="cuda:0")
    there = segment[0:0]
    said["no bytes"] = told(lambda: ctx.write_notify_on(stream, there, 1 - ctx.rank, there, 3))
    ctx.notify_wait_on(stream, segment, 3)
    stream.synchronize()
    ctx.barrier()
    return said


def mixed(ctx: Any, kind: str) -> Said:
    """Rank 0's array on the host, and rank 1's on a GPU."""
    stream = Stream()
    host, array = np.zeros(COUNT, np.float32), Array(COUNT, np.float32)
    layers = [((COUNT,), "f4")]
    mine: Any = host if ctx.rank == 0 else array
    device = "cpu" if ctx.rank == 0 else "cuda:0"
    on = None if ctx.rank == 0 else stream

    def allreduce() -> None:
        ctx.allreduce(mine, stream=on)
        if on is not None:  # its wait was enqueued: the next call raises the error
            stream.synchronize()
            ctx.allreduce(mine, stream=on)

    def held() -> None:
        """Rank 1 hears of rank 0's call before its own stream has come to it."""
        segment = ctx.segment(8, device="cuda:0")
        ctx.allreduce(host)
        ctx.allreduce(array, stream=stream)
        if on is None:
            return ctx.allreduce(mine)
        ctx.notify_wait_on(stream, segment, 0)
        ctx.allreduce(mine, stream=on)
        time.sleep(0.2)
        ctx.notify(ctx.rank, segment, 0)
        stream.synchronize()
        ctx.allreduce(mine, stream=on)

    def warmed() -> None:
        ctx.allreduce(host)
        ctx.allreduce(array, stream=stream)
        stream.synchronize()
        allreduce()

    calls: dict[str, Callable[[], object]] = {
        "handle": lambda: ctx.allreduce_handle(mine),
        "exchange": lambda: GradientExchange(ctx, layers, device=device),
        "first allreduce": allreduce,
        "held allreduce": held,
        "allreduce": warmed,
    }
    said = {kind: told(calls[kind])}
    ctx.barrier()
    return said


def run(program: Callable[..., Said], *arguments: Any) -> list[Said]:
    def on_gpu(ctx: Any) -> Said:
        with Device():
            return program(ctx, *arguments)

    return loopback.run(2, on_gpu, timeout=4)


def main() -> None:
    told_all = {part.__name__: run(part) for part in (streams, memory, small)}
    for kind in ("handle", "exchange", "first allreduce", "held allreduce", "allreduce"):
        told_all[f"mixed {kind}"] = run(mixed, kind)
    json.dump(told_all, sys.stdout)


main()
