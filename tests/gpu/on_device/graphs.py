"""CUDA graphs: a put is captured and replayed; what needs the host's part is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from cuda_arrays import Array, Stream, entry

import pgasdl
from on_device import driver, ranks
from on_device.findings import Tell


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    entry("cuStreamBeginCapture_v2")
    for program in ("replays", "refusals", "beside_progress"):
        with tell.step(program):
            ranks.run(2, f"on_device.graphs:{program}", tell, timeout=12)
            tell.check(program, True)


def replays(ctx: Any, tell: Tell) -> None:
    """A captured write_notify, and what comes after in the same queue."""
    stream, nbytes = Stream(), 4096
    segment = ctx.segment(nbytes, device="cuda:0")
    source = Array(nbytes, "u1", segment.address)
    graph = driver.Capture(stream)
    if ctx.rank == 0:
        with graph:
            ctx.write_notify_on(stream, segment[:], 1, segment[:], 0)
    for turn in range(4):
        if ctx.rank == 0:
            source.fill(np.full(nbytes, turn + 1, np.uint8), stream)
            graph.launch()
            stream.synchronize()
        else:
            ctx.notify_waitsome(segment, 0, 1)
            ctx.notify_reset(segment, 0)
            found = source.values(stream)
            assert (found == turn + 1).all(), f"turn {turn}: {found}"
        ctx.barrier()
    if ctx.rank == 0:
        ctx.wait()
        ctx.write_notify_on(stream, segment[:], 1, segment[:], 1)
        ctx.wait()
    else:
        ctx.notify_waitsome(segment, 1, 1)
    ctx.barrier()


def refusals(ctx: Any, tell: Tell) -> None:
    """Each says why, and the context stays of use."""
    stream, count = Stream(), 1000
    segment = ctx.segment(4 * count, device="cuda:0")
    array = Array(count, np.float32, segment.address)
    handle = ctx.allreduce_handle(array)
    handle(stream=stream)
    exchange = pgasdl.GradientExchange(ctx, [((count,), "f4")], device="cuda:0")
    for name, call in (
        ("an allreduce", lambda: ctx.allreduce(array, stream=stream)),
        ("a handle", lambda: handle(stream=stream)),
        ("ready", lambda: exchange.ready(0, stream=stream)),
        ("a notification", lambda: ctx.notify_wait_on(stream, segment, 0)),
    ):
        words = "no refusal"
        try:
            with driver.Capture(stream):
                call()
        except pgasdl.UnavailableError as refused:
            words = str(refused)
        except driver.DriverError as error:
            words = f"captured, then {error}"
        tell.check(f"{name} in a capture is refused", "graph" in words, error=words)
    handle(stream=stream)
    stream.synchronize()
    ctx.barrier()


def beside_progress(ctx: Any, tell: Tell) -> None:
    """A capture while the progress thread looks at events, as PyTorch captures: globally."""
    waiting, stream = Stream(), Stream()
    segment = ctx.segment(4096, device="cuda:0")
    handle = ctx.allreduce_handle(Array(1024, np.float32, segment.address))
    work = driver.Work()
    work.turns(stream, 0)
    for mode, name in (
        (driver.RELAXED, "relaxed"),
        (driver.THREAD_LOCAL, "of a thread"),
        (driver.GLOBAL, "global"),
    ):
        ctx.barrier()
        if ctx.rank == 0:
            work.seconds(waiting, 0.02)  # the handle's gate is an event after it
            handle.start(stream=waiting)
        words = ""
        try:
            with driver.Capture(stream, mode):
                work.turns(stream, 10)
                time.sleep(0.1)
        except driver.DriverError as error:
            words = str(error)
        ctx.barrier()
        if ctx.rank == 1:
            handle.start(stream=waiting)
        handle.wait()
        waiting.synchronize()
        tell.check(f"a capture that is {name}, beside a collective", not words, error=words)
        try:
            handle(stream=waiting)
            words = ""
        except pgasdl.PgasError as error:
            words = str(error)
        tell.check(f"the collective beside it ({name})", not words, error=words)
        waiting.synchronize()
    ctx.barrier()
