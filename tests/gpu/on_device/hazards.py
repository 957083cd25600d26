"""What a stream that waits for a word holds up in its own process.

The word is stored by the host, after a while if nothing else releases the stream: a call that does
not return before waits for the stream, and would never return if the word's storing came after it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cuda_arrays import Array, Device, Stream

from on_device import driver, ranks
from on_device.findings import Tell
from on_device.kernels import PTX


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    patience = str(0.2 if smoke else 1.0)
    for loading in ("", "EAGER", "LAZY"):
        if smoke and loading:
            continue
        name = f"CUDA_MODULE_LOADING={loading or 'unset'}"
        with tell.step(name):
            env = {"CUDA_MODULE_LOADING": loading} if loading else {}
            waits(tell.under(f"{name}: "), patience, "kernels", env=env)
    with tell.step("other calls"):
        waits(tell, patience, "calls")
    with tell.step("other streams"):
        waits(tell, patience, "streams")
    with tell.step("a pageable copy behind a collective"):
        ranks.run(2, "on_device.hazards:pageable", tell, timeout=25)


def waits(tell: Tell, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a process of this module's."""
    program = [sys.executable, "-m", "on_device.hazards", str(tell.path), tell.prefix]
    ranks.finished([*program, *arguments], timeout=30, env=env)


class Waiting:
    """A stream that waits for a word."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.stream, self._pinned, self._turn = Stream(), driver.Pinned(4096), 0
        self.released = False

    def _release(self) -> None:
        self._pinned.words[0] = self._turn
        self.released = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The stream waits while the block runs, or as long as patience lasts."""
        self._turn += 1
        self.released = False
        driver.wait_value(self.stream, self._pinned.device, self._turn)
        time.sleep(0.005)
        timer = threading.Timer(self.patience, self._release)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._release()
            self.stream.synchronize()

    def held_up(self, tell: Tell, name: str, call: Callable[[], Any]) -> None:
        """Tell whether a call returns while the stream waits."""
        with tell.step(name), self():
            taken = driver.timed(call)
            tell(name, "waits for the stream" if self.released else "at once", "", seconds=taken)


def kernels(tell: Tell, waiting: Waiting) -> None:
    """Modules and first launches."""
    other, work = Stream(), driver.Work()
    name = "pgasdl_sum_f32_2"
    kernel = driver.Kernel(PTX, name)

    def first_launch() -> None:
        parameters = (ctypes.c_uint8 * 1200)()  # of no items
        kernel.launch(name, other, 1, 512, parameters)
        other.synchronize()

    waiting.held_up(tell, "the first launch of a loaded kernel", first_launch)
    waiting.held_up(tell, "loading a module", lambda: driver.Kernel(PTX, "pgasdl_copy"))

    def load_and_launch() -> None:
        work.turns(other, 0)
        other.synchronize()

    waiting.held_up(tell, "a first launch of another module", load_and_launch)
    waiting.held_up(tell, "a later launch", load_and_launch)


def calls(tell: Tell, waiting: Waiting) -> None:
    """Of memory, events, streams, and of copies that are not pinned."""
    other = Stream()
    array, unused = Array(1 << 20, "u1"), Array(1 << 20, "u1")
    pageable = np.zeros(1 << 20, np.uint8)
    pages = mmap.mmap(-1, 1 << 20)
    pages_at = ctypes.addressof(ctypes.c_uint8.from_buffer(pages))
    there, here = array.address or 0, pageable.ctypes.data

    def copied(to: int, source: int) -> None:
        other.copy(to, source, 1 << 20)
        other.synchronize()

    for name, call in (
        ("cuMemAlloc", lambda: Array(1 << 20, "u1")),
        ("cuMemFree", lambda: driver.free(unused.address)),
        ("cuMemHostRegister", lambda: driver.call("cuMemHostRegister_v2", pages_at, 1 << 20, 3)),
        ("cuMemHostUnregister", lambda: driver.call("cuMemHostUnregister", pages_at)),
        ("cuEventCreate", driver.Event),
        ("cuStreamCreate", Stream),
        ("a pageable copy to the device by another stream", lambda: copied(there, here)),
        ("a pageable copy to the host by another stream", lambda: copied(here, there)),
    ):
        waiting.held_up(tell, name, call)
    for name, to, source in (
        ("a pageable copy to the host", here, there),
        ("a pageable copy to the device", there, here),
    ):
        behind(tell, waiting, name, to, source)


def behind(tell: Tell, waiting: Waiting, name: str, to: int, source: int) -> None:
    """Whether a copy behind the wait returns, and holds up the driver for other threads."""
    other, event = Stream(), driver.Event()
    times: list[float] = []

    def query() -> None:
        with Device():
            time.sleep(waiting.patience / 10)

            def asked() -> None:
                event.record(other)
                event.reached()

            times.append(driver.timed(asked))

    with tell.step(name), waiting():
        thread = threading.Thread(target=query)
        thread.start()
        taken = driver.timed(lambda: waiting.stream.copy(to, source, 1 << 20))
        returned = "waits for the stream" if waiting.released else "at once"
        thread.join()
    held = "is held up" if times[0] > waiting.patience / 2 else "is not held up"
    tell(
        f"{name} behind the wait: returns", f"{returned}; another thread {held}", "",
        seconds=taken, other_thread=times[0],
    )  # fmt: skip


def streams(tell: Tell, waiting: Waiting) -> None:
    """Whether streams share a queue of the hardware with one that waits."""
    others, work = [Stream() for _ in range(40)], driver.Work()
    for stream in others:
        work.turns(stream, 0, 1)
        stream.synchronize()
    with waiting():
        for stream in others:
            work.turns(stream, 0, 1)
        time.sleep(waiting.patience / 2)
        held = [number for number, stream in enumerate(others) if not driver.passed(stream)]
    tell("streams held up by one that waits", len(held), f"of {len(others)}", which=held)


def pageable(ctx: Any, tell: Tell) -> None:
    """A copy to pageable memory behind a collective, whose steps another thread launches."""
    stream, count = Stream(), 1 << 20
    segment = ctx.segment(4 * count, device="cuda:0")
    array = Array(count, np.float32, segment.address)
    handle = ctx.allreduce_handle(array)
    handle(stream=stream)
    stream.synchronize()
    found = np.empty(count, np.float32)
    for late in (0, 1):
        ctx.barrier()
        if ctx.rank == late:
            time.sleep(0.2)
        began = time.perf_counter()
        handle(stream=stream, timeout=5)
        stream.copy(found.ctypes.data, segment.address, array.nbytes)
        stream.synchronize()
        taken = time.perf_counter() - began
        tell.check("a pageable copy behind a collective", taken < 3, seconds=taken)
    ctx.barrier()


def main() -> None:
    """Be the process whose stream waits."""
    path, prefix, patience, name = sys.argv[1:]
    program = {"kernels": kernels, "calls": calls, "streams": streams}[name]
    with Device():
        program(Tell(Path(path), 0, prefix), Waiting(float(patience)))


if __name__ == "__main__":
    main()
