"""One of two processes is killed while the other's stream waits for it.

``lost.py killed PART`` : rank 1 kills itself; ``lost.py late PART``: it stays away for longer than
the deadline. Rank 0 prints how long it or its stream waited, and what the call or the next says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

import pgasdl
from pgasdl import GradientExchange

COUNT = 100_000


def notification(ctx: Any, stream: Stream) -> tuple[Callable[..., None], Callable[[], None]]:
    segment = ctx.segment(4096, device="cuda:0")

    def begin(timeout: float | None) -> None:
        ctx.notify_wait_on(stream, segment, 0, timeout=timeout)

    return begin, lambda: ctx.notify_reset_on(stream, segment, 0)


def handle(ctx: Any, stream: Stream) -> tuple[Callable[..., None], Callable[[], None]]:
    collective = ctx.allreduce_handle(Array(COUNT, np.float32))

    def begin(timeout: float | None) -> None:
        collective.run(stream=stream, timeout=timeout)

    return begin, lambda: collective.start(stream=stream)


def allreduce(ctx: Any, stream: Stream) -> tuple[Callable[..., None], Callable[[], None]]:
    array = Array(COUNT, np.float32)
    ctx.allreduce(array, stream=stream)

    def begin(timeout: float | None) -> None:
        ctx.allreduce(array, stream=stream, timeout=timeout)

    return begin, lambda: ctx.allreduce(array, stream=stream)


def exchange(ctx: Any, stream: Stream) -> tuple[Callable[..., None], Callable[[], None]]:
    gradients = GradientExchange(ctx, [((COUNT,), "f4"), ((7,), "f4")], device="cuda:0")

    def begin(timeout: float | None) -> None:
        for layer in (1, 0):
            gradients.ready(layer, stream=stream)
        for layer in (0, 1):
            gradients.wait(layer, timeout=timeout)

    return begin, lambda: gradients.ready(0, stream=stream)


PARTS = {part.__name__: part for part in (notification, handle, allreduce, exchange)}


def told(call: Callable[[], None]) -> str:
    try:
        call()
    except pgasdl.PgasError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    how, part = sys.argv[1:]
    with pgasdl.init(log="error", timeout=20) as ctx, Device():
        stream = Stream()
        begin, again = PARTS[part](ctx, stream)
        stream.synchronize()
        ctx.barrier()
        if ctx.rank == 1:
            time.sleep(0.1)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.passive_receive()  # until rank 0's deadline has passed
            return
        begun = time.monotonic()
        said = told(lambda: begin(0.5 if how == "late" else None))
        stream.synchronize()
        seconds = time.monotonic() - begun
        said = said or told(again)
        print(json.dumps({"seconds": seconds, "said": said}), flush=True)
        if how == "late":
            ctx.passive_send(b"", 1)
        else:
            os._exit(0)  # the job is lost


main()
