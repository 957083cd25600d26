"""Collectives on the device have the bits of those on the host: all dtypes, plans and kinds."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import ml_dtypes
import numpy as np
from cuda_arrays import Array, Stream
from held import held

from on_device import PROGRAMS, driver, ranks
from on_device.findings import Tell
from pgasdl import GradientExchange

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64)
# The parts of programs/collectives.py.
PROGRAM_PARTS = ("allreduces", "long_arrays", "handles", "exchanges")


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    program = str(PROGRAMS / "collectives.py")
    launch = [sys.executable, "-m", "pgasdl", "run"]
    for n in (2,) if smoke else (2, 4, 3):
        name = f"any bits, {n} ranks"
        with tell.step(name):
            counts = (1, 1000) if smoke else (1, 1000, 100_003, 3_000_001)
            ranks.run(n, "on_device.collectives:bits", tell, timeout=60, counts=counts)
            tell.check(name, True, counts=counts)
        for part in PROGRAM_PARTS[:1] if smoke else PROGRAM_PARTS:
            name = f"{part}, {n} ranks"
            with tell.step(name):
                ranks.finished([*launch, "-n", str(n), program, "0", part], timeout=60)
                tell.check(name, True)
        name = f"an exchange among kernels, {n} ranks"
        with tell.step(name):
            turns = 2 if smoke else 8
            ranks.run(n, "on_device.collectives:exchange", tell, timeout=40, turns=turns)
            tell.check(name, True, turns=turns)
    with tell.step("calls that hold up others, beside collectives"):
        ranks.run(2, "on_device.collectives:beside", tell, timeout=25)


def beside(ctx: Any, tell: Tell) -> None:
    """Make collectives beside calls of the driver that hold up others."""
    held(ctx)
    tell.check("calls that hold up others, beside collectives", True)


def bits(ctx: Any, tell: Tell, *, counts: list[int]) -> None:
    """All-reduces of any bits: NaNs, infinities and subnormals among them."""
    stream = Stream()
    for dtype in DTYPES:
        for count in counts:
            random_bytes = np.random.default_rng([ctx.rank, count]).bytes(
                count * np.dtype(dtype).itemsize
            )
            mine = np.frombuffer(random_bytes, dtype).copy()
            wanted = mine.copy()
            ctx.allreduce(wanted)
            array = Array(count, dtype)
            for _ in range(3):
                array.fill(mine, stream)
                ctx.allreduce(array, stream=stream)
                found = array.values(stream)
                different = found.view(np.uint8) != wanted.view(np.uint8)
                assert not different.any(), f"{np.dtype(dtype)} x {count}: {differ(found, wanted)}"
            same_on_all_ranks(ctx, found)
            driver.free(array.address)
    ctx.barrier()


def differ(found: Any, wanted: Any) -> str:
    """The first item that is another, in hexadecimal."""
    size = found.dtype.itemsize
    for i in range(len(found)):
        if found[i].tobytes() != wanted[i].tobytes():
            here = f"{found[i].tobytes().hex()}, wanted {wanted[i].tobytes().hex()}"
            return f"item {i} of {size} bytes is {here}"
    return "no item"


def same_on_all_ranks(ctx: Any, found: Any) -> None:
    digest = hashlib.blake2b(found.tobytes(), digest_size=4).digest()
    number = np.array([int.from_bytes(digest, "little")])
    total = number.copy()
    ctx.allreduce(total)
    assert total[0] == ctx.size * number[0], "ranks have different bits"


def exchange(ctx: Any, tell: Tell, *, turns: int) -> None:
    """Layers ready in any order behind kernels of random length; the host waits for nothing."""
    counts, pick = (1, 300, 5000, 70_001), random.Random(ctx.rank)
    backward, forward, work = Stream(), Stream(), driver.Work()
    layers = [((count,), "f4") for count in counts]
    with (
        GradientExchange(ctx, layers, device="cuda:0") as on_device,
        GradientExchange(ctx, layers) as on_host,
    ):
        base = on_device.gradients.address
        gradients = [
            Array(layer.shape[0], np.float32, base + layer.at) for layer in on_device.layers
        ]
        given = [
            [
                np.random.default_rng([ctx.rank, turn, count]).standard_normal(count, np.float32)
                for count in counts
            ]
            for turn in range(turns)
        ]
        wanted = [reference(on_host, values) for values in given]
        sources = [[on_the_device(values, forward) for values in turn] for turn in given]
        results = [[Array(count, np.float32) for count in counts] for _ in range(turns)]
        forward.synchronize()
        ctx.barrier()
        done = driver.Event()
        for turn in range(turns):
            if turn:  # wait until the last gradients were used
                driver.call("cuStreamWaitEvent", backward.handle, done.handle, 0)
            for number in pick.sample(range(len(counts)), len(counts)):
                work.turns(backward, pick.choice((0, 10, 5000)))
                gradient, source = gradients[number], sources[turn][number]
                backward.copy(gradient.address or 0, source.address or 0, gradient.nbytes)
                on_device.ready(number, stream=backward)
            for number, gradient in enumerate(gradients):
                on_device.wait(number)
                work.turns(forward, pick.choice((0, 10, 5000)))
                result = results[turn][number]
                forward.copy(result.address or 0, gradient.address or 0, gradient.nbytes)
            done.record(forward)
        for turn in range(turns):
            for number in range(len(counts)):
                found = results[turn][number].values(forward)
                same = found.tobytes() == wanted[turn][number].tobytes()
                assert same, f"turn {turn}, layer {number}: {differ(found, wanted[turn][number])}"
        on_device.finish()
    ctx.barrier()


def reference(on_host: GradientExchange, values: list[Any]) -> list[Any]:
    """The mean gradients, by the host."""
    for number, value in enumerate(values):
        on_host.gradient(number)[:] = value
        on_host.ready(number)
    found = []
    for number in range(len(values)):
        on_host.wait(number)
        found.append(on_host.gradient(number).copy())
    return found


def on_the_device(values: Any, stream: Stream) -> Array:
    """A copy of an array of the host."""
    array = Array(values.size, values.dtype)
    stream.copy(array.address or 0, values.ctypes.data, values.nbytes)
    return array
