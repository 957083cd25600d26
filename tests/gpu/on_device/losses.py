"""A peer is killed while streams wait for it: they go on, and the next call tells why."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
from cuda_arrays import Array, Stream

import pgasdl
from on_device import driver, findings, ranks
from on_device.findings import Tell

WAITS = ("a handle", "an allreduce", "a notification")


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    for what in WAITS[:1] if smoke else WAITS:
        name = f"a stream waits for {what} of a rank that is killed"
        with tell.step(name):
            ranks.run(
                2, "on_device.losses:rank", tell, timeout=15, loses=True,
                flags=("--keep-going",), what=what, name=name,
            )  # fmt: skip
            if not any(found["name"] == name for found in findings.read(tell.path)):
                tell.check(name, False, error="the survivor told nothing")


def rank(ctx: Any, tell: Tell, *, what: str, name: str) -> None:
    """Rank 1 dies, rank 0 looks at its stream."""
    stream, count = Stream(), 1000
    segment = ctx.segment(4 * count, device="cuda:0")
    array = Array(count, np.float32, segment.address)
    handle = ctx.allreduce_handle(array)

    def begin() -> None:
        if what == "a handle":
            handle.run(stream=stream, timeout=8)
        elif what == "an allreduce":
            ctx.allreduce(array, stream=stream, timeout=8)
        else:
            ctx.notify_wait_on(stream, segment, 0, timeout=8)

    if what != "a notification":  # the first call costs more
        begin()
        stream.synchronize()
    ctx.barrier()
    if ctx.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begin()
    assert not driver.passed(stream), "the stream does not wait"
    began = time.monotonic()
    while not driver.passed(stream):
        assert time.monotonic() < began + 12, "the stream still waits"
        time.sleep(1e-3)
    went_on = time.monotonic() - began - 0.5
    try:
        begin()
        error = "no error"
    except pgasdl.PgasError as lost:
        error = type(lost).__name__
    tell(name, went_on, "s from the kill to the stream's going on", error=error)
    tell.check(
        f"{name}: the next call raises", error in ("PeerLostError", "PgasTimeoutError"), error=error
    )
    # The device still works.
    found = Array(count, np.float32).values(Stream())
    assert len(found) == count
    os._exit(0)  # skips closing the context, which another test covers
