"""Work that streams wait for is finished before a handle or a context is closed."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

from pgasdl import loopback

COUNT = 50_000
SIZE = 2


def handle(ctx: Any, array: Array, stream: Stream) -> None:
    with ctx.allreduce_handle(array) as collective:
        collective.run(stream=stream)


def dropped_handle(ctx: Any, array: Array, stream: Stream) -> None:
    collective = ctx.allreduce_handle(array)
    collective.run(stream=stream)


def context(ctx: Any, array: Array, stream: Stream) -> None:
    ctx.allreduce(array, stream=stream)


def main() -> None:
    with Device():
        streams = [Stream() for _ in range(SIZE)]
        arrays = [Array(COUNT, np.float32) for _ in range(SIZE)]
        for part in (handle, dropped_handle, context):

            def program(ctx: Any, part: Any = part) -> None:
                array, stream = arrays[ctx.rank], streams[ctx.rank]
                with Device():
                    array.fill(np.full(COUNT, ctx.rank + 1, np.float32), stream)
                    part(ctx, array, stream)

            for _ in range(10):
                loopback.run(SIZE, program, timeout=20)
                for array, stream in zip(arrays, streams, strict=True):
                    assert (array.values(stream) == 3).all(), part.__name__
    print("ok")


main()
