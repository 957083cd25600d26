"""A short program that uses a GPU in every way, by two ranks that are threads; and what it leaves.

``short.py lacking`` runs it once, on a fake driver that lacks something, and then uses memory of
the host; ``spread`` behind it: each rank has a GPU of its own. ``short.py failing FIRST STEP`` runs
it with one failing call after the other. ``short.py repeating N`` makes and closes everything N
times in one context.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np
from cuda_arrays import Array, Device, Stream

from pgasdl import GradientExchange, loopback
from pgasdl.errors import PgasError

SECONDS = 5.0
COUNT = 1000
# Calls that release something, or tell when that is possible: if one fails, something stays.
RELEASES = (
    "cuEventRecord",
    "cuMemRelease",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuMemHostUnregister",
    "cuEventDestroy_v2",
    "cuIpcCloseMemHandle",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)
# Their number of calls is random.
POLLED = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventQuery")

_driver = ctypes.CDLL("libcuda.so.1")
_driver.fakeLive.restype = ctypes.c_char_p
_driver.fakeFailed.restype = ctypes.c_char_p
_driver.fakeFail.restype = ctypes.c_uint64
_driver.fakeFail.argtypes = [ctypes.c_char_p, ctypes.c_uint64]


def fail(name: str, n: int) -> int:
    """Let the driver's ``n``-th call of a name from now on fail; return the calls so far."""
    calls: int = _driver.fakeFail(name.encode(), n)
    return calls


def live() -> dict[str, int]:
    """The things that the process has not given back to the driver."""
    told: dict[str, int] = json.loads(_driver.fakeLive())
    return told


class Place(NamedTuple):
    """A rank's stream, an array outside of segments, and the GPU of both."""

    stream: Stream
    outside: Array
    device: str


def one_sided(ctx: Any, place: Place) -> None:
    segment = ctx.segment(1 << 14, device=place.device)
    bound = ctx.bind(place.outside)
    peer = 1 - ctx.rank
    ctx.barrier()
    ctx.write_notify_on(place.stream, segment[0:4096], peer, segment[4096:8192], 0)
    ctx.write_notify_on(place.stream, bound[0:256], peer, segment[8192:8448], 1)
    for notification in (0, 1):
        ctx.notify_wait_on(place.stream, segment, notification)
        ctx.notify_reset_on(place.stream, segment, notification)
    ctx.write(segment[0:256], peer, segment[9000:9256])
    ctx.wait()
    ctx.barrier()


def handle(ctx: Any, place: Place) -> None:
    with ctx.allreduce_handle(place.outside) as collective:
        for _ in range(2):
            collective.run(stream=place.stream)
        collective.start(stream=place.stream)
        collective.wait()


def allreduce(ctx: Any, place: Place) -> None:
    ctx.allreduce(place.outside, stream=place.stream)
    ctx.allreduce(place.outside, "mean", stream=place.stream)


def exchange(ctx: Any, place: Place) -> None:
    layers = [((300,), "f4"), ((70,), "f4")]
    with GradientExchange(ctx, layers, device=place.device) as gradients:
        for _ in range(2):
            for layer in (1, 0):
                gradients.ready(layer, stream=place.stream)
            for layer in (0, 1):
                gradients.wait(layer)
        gradients.finish()


# If peers do not reach a GPU, arrays are copied, and no GPU writes to another.
STAGED = os.environ.get("PGASDL_GPU") == "staged"
PARTS = (handle, allreduce, exchange) if STAGED else (one_sided, handle, allreduce, exchange)


def on_host(ctx: Any) -> bool:
    """Whether memory of the host still works."""
    segment = ctx.segment(64)
    peer = 1 - ctx.rank
    ctx.write_notify(segment[0:8], peer, segment[8:16], 0)
    ctx.notify_reset(segment, ctx.notify_waitsome(segment))
    array = np.full(COUNT, 1.0, np.float32)
    ctx.allreduce(array)
    ctx.barrier()
    return bool((array == ctx.size).all())


class Rig:
    """Where two ranks work; on two GPUs if it is ``spread``."""

    def __init__(self, *, spread: bool = False) -> None:
        self.places = []
        for device in (0, 1 if spread else 0):
            with Device(device):
                self.places.append(Place(Stream(), Array(COUNT, np.float32), f"cuda:{device}"))

    def lacking(self) -> dict[str, list[str]]:
        """The errors of each part on each rank; then memory of the host, in the same context."""

        def program(ctx: Any) -> dict[str, str]:
            said = {}
            for part in PARTS:
                try:
                    part(ctx, self.places[ctx.rank])
                    said[part.__name__] = "works"
                except PgasError as error:
                    said[part.__name__] = f"{type(error).__name__}: {error}"
                ctx.barrier()
            assert on_host(ctx)
            return said

        ranks = loopback.run(2, program, timeout=SECONDS)
        return {part.__name__: [rank[part.__name__] for rank in ranks] for part in PARTS}

    def run(self) -> list[str]:
        """Run all; return the name of what each rank raised."""
        raised = ["", ""]

        def program(ctx: Any) -> None:
            try:
                for part in PARTS:
                    part(ctx, self.places[ctx.rank])
            except BaseException as error:
                raised[ctx.rank] = f"{type(error).__name__}: {error}"
                raise

        try:
            loopback.run(2, program, timeout=SECONDS)
        except PgasError as error:
            raised = [words or f"{type(error).__name__}: {error}" for words in raised]
        return raised

    def rest(self) -> dict[str, int]:
        """The things alive once nothing is under way."""
        for place in self.places:
            place.stream.synchronize()
        gc.collect()
        return live()


def in_use() -> dict[str, int]:
    """The things alive of the driver's and of the system's."""
    return live() | {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def more(first: dict[str, int], last: dict[str, int] | None = None) -> bool:
    """Whether there is more of anything than at first."""
    return last is not None and any(last[name] > first[name] for name in first)


def repeating(rig: Rig, n: int) -> None:
    """Make and close everything many times: no more is alive than after a few times."""

    def program(ctx: Any) -> list[dict[str, int]]:
        seen = []
        for turn in range(n + 1):
            for part in PARTS:
                part(ctx, rig.places[ctx.rank])
            if turn in (min(10, n), n):
                with Device():
                    rig.places[ctx.rank].stream.synchronize()
                ctx.barrier()
                gc.collect()
                ctx.barrier()
                time.sleep(0.5)  # lets the service thread look at the streams
                ctx.barrier()
                if ctx.rank == 0:  # only one rank: looking takes a descriptor
                    seen.append(in_use())
                    deadline = time.monotonic() + SECONDS / 2
                    while more(*seen) and time.monotonic() < deadline:
                        seen[-1] = in_use()
                ctx.barrier()
        return seen

    (first, last), _ = loopback.run(2, program, timeout=SECONDS)
    assert not more(first, last), (first, last)
    print(json.dumps(last))


def failing(rig: Rig, first: int, step: int) -> None:
    """Let one call after the other fail: errors that are ours, in time, and nothing is left."""
    for _ in range(2):
        assert rig.run() == ["", ""]
    rest = rig.rest()
    before = fail("any", 0)
    rig.run()
    n_calls = fail("any", 0) - before
    told = {}
    calls = [("any", n) for n in range(first, n_calls, step)]
    calls += [(name, 1 + (first + n) * step) for name in POLLED for n in range(3)]
    for call in calls:
        fail(*call)
        begun = time.monotonic()
        raised = rig.run()
        failed = _driver.fakeFailed()
        seconds = time.monotonic() - begun
        fail("any", 0)
        name = failed.decode() if failed else "none"
        assert seconds < 2 * SECONDS, (call, name, seconds, raised)
        left = rig.rest()
        assert left == rest or name in RELEASES, (call, name, raised, left, rest)
        rest = left
        if name not in RELEASES:
            told[name] = next(filter(None, raised), "")
        assert rig.run() == ["", ""], (call, name)
    assert threading.active_count() == 1
    print(json.dumps({"calls": n_calls, "told": told}))


def main() -> None:
    with Device():
        if sys.argv[1] == "failing":
            failing(Rig(), int(sys.argv[2]), int(sys.argv[3]))
        elif sys.argv[1] == "repeating":
            repeating(Rig(), int(sys.argv[2]))
        else:
            print(json.dumps(Rig(spread="spread" in sys.argv).lacking()))


if __name__ == "__main__":
    main()
