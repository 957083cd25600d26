"""A child of a process that uses a GPU: its calls are refused, and the parent goes on.

Prints what the child was told, how it ended, and whether the parent's memory is whole.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

import pgasdl
from pgasdl import GradientExchange

COUNT = 1000


def main() -> None:
    Device().__enter__()  # for good: a child could not release it
    with pgasdl.init(log="error", timeout=20) as ctx:
        stream, array = Stream(), Array(COUNT, np.float32)
        segment = ctx.segment(4096, device="cuda:0")
        handle = ctx.allreduce_handle(array)
        exchange = GradientExchange(ctx, [((COUNT,), "f4")], device="cuda:0")
        there = bytearray(64)

        def work() -> None:
            array.fill(np.ones(COUNT, np.float32), stream)
            handle(stream=stream)
            ctx.allreduce(array, stream=stream)
            exchange.ready(0, stream=stream)
            exchange.wait(0)
            ctx.write_notify_on(stream, segment[0:64], 1 - ctx.rank, segment[64:128], 0)
            ctx.notify_wait_on(stream, segment, 0)
            ctx.notify_reset_on(stream, segment, 0)

        work()
        calls: dict[str, Any] = {
            "segment": lambda: ctx.segment(64, device="cuda:0"),
            "bind": lambda: ctx.bind(array),
            "copy_to": lambda: segment.copy_to(there),
            "copy_from": lambda: segment.copy_from(there),
            "write": lambda: ctx.write(segment[0:8], 0, segment[8:16]),
            "write_notify_on": lambda: ctx.write_notify_on(
                stream, segment[0:8], 0, segment[8:16], 0
            ),
            "notify_wait_on": lambda: ctx.notify_wait_on(stream, segment, 0),
            "notify_reset_on": lambda: ctx.notify_reset_on(stream, segment, 0),
            "handle": lambda: handle.start(stream=stream),
            "wait": handle.wait,
            "allreduce": lambda: ctx.allreduce(array, stream=stream),
            "ready": lambda: exchange.ready(0, stream=stream),
            "exchange": lambda: GradientExchange(ctx, [((8,), "f4")], device="cuda:0"),
        }
        sys.stdout.flush()
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            said = {}
            for name, call in calls.items():
                try:
                    call()
                    said[name] = "nothing"
                except Exception as error:
                    said[name] = f"{type(error).__name__}: {error}"
            os.write(into, json.dumps(said).encode())
            del handle, exchange, segment, calls, call
            gc.collect()
            sys.exit(0)  # runs the interpreter's whole exit
        os.close(into)
        with os.fdopen(out) as told:
            said = json.loads(told.read())
        status = os.waitpid(child, 0)[1]
        work()
        right = bool((array.values(stream) == ctx.size**2).all())
        ctx.barrier()
        # In one write, since the ranks share the output.
        sys.stdout.write(json.dumps({"said": said, "status": status, "right": right}) + "\n")


if __name__ == "__main__":
    main()
