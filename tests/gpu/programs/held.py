"""Calls of the driver that hold up others, and captures, while a collective is not over.

A program frees memory, loads a module or copies to pageable memory behind a collective for which
another rank is late. On some of these the driver waits for the stream, and lets no other thread
enqueue anything meanwhile. The fake driver is told to do the same.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream, call, capturing

import pgasdl
from pgasdl import GradientExchange

COUNT = 50_000


def load_a_module() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    import ptx

    text = ptx.read().encode() + b"\0"
    call("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), text)


def held(ctx: Any) -> None:
    """The result is right, whatever a rank calls while another is late, and on which stream."""
    segment = ctx.segment(4 * COUNT, device="cuda:0")
    inside, outside = Array(COUNT, np.float32, segment.address), Array(COUNT, np.float32)
    handle = ctx.allreduce_handle(inside)
    here = np.empty(COUNT, np.float32)
    for stream in (Stream(), Stream(handle=0)):
        for array, reduce in (
            (inside, lambda stream=stream: ctx.allreduce(inside, stream=stream)),
            (outside, lambda stream=stream: ctx.allreduce(outside, stream=stream)),
            (inside, lambda stream=stream: handle(stream=stream)),
        ):
            unused = Array(64, np.uint8)
            acts: tuple[Callable[[], None], ...] = (
                lambda array=array, stream=stream: stream.copy(
                    here.ctypes.data, array.address, array.nbytes
                ),
                load_a_module,
                lambda unused=unused: call("cuMemFree_v2", unused.address),
            )
            for late, act in enumerate(acts):
                array.fill(np.full(COUNT, ctx.rank + 1, np.float32), stream)
                stream.synchronize()
                ctx.barrier()
                if ctx.rank == late % ctx.size:
                    time.sleep(0.05)
                reduce()
                act()
                assert (array.values(stream) == 3).all()
    ctx.barrier()


def captured(ctx: Any) -> None:
    """A capture is not spoilt by a thread that looks after an exchange."""
    stream, captures = Stream(), Stream()
    with GradientExchange(ctx, [((COUNT,), "f4")], device="cuda:0") as exchange:
        gradient = Array(COUNT, np.float32, exchange.gradients.address)
        for late in range(ctx.size):
            gradient.fill(np.full(COUNT, ctx.rank + 1, np.float32), stream)
            ctx.barrier()
            with capturing(captures):
                if ctx.rank == late:
                    time.sleep(0.05)
                exchange.ready(0, stream=stream)
                time.sleep(0.05)
            exchange.wait(0)
            assert (gradient.values(stream) == 1.5).all()
    ctx.barrier()


def main() -> None:
    with pgasdl.init(log="error", timeout=10) as ctx, Device():
        for part in (held, captured):
            part(ctx)
    sys.stdout.write("right\n")


if __name__ == "__main__":
    main()
