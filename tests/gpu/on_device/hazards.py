"""Calls that the driver holds up: while a stream waits for a word, or records a graph.

The word is stored by the host, after a while if nothing else releases the stream: a call that does
not return before waits for the stream, and would never return if the word's storing came after it.
Each question is a process of its own.
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
import ptx
from cuda_arrays import Array, Device, Stream
from held import held

from on_device import driver, ranks
from on_device.findings import Tell

BYTES = 1 << 20
# Another thread's calls while the stream waits.
BLOCKERS = (
    "nothing",
    "a pageable copy to the host behind the wait",
    "a pageable copy to the host behind a wait on stream 0",
    "a pageable copy to the host on stream 0",
    "loading a module",
    "cuMemFree",
    "cuMemHostUnregister",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
)
STREAMS = (8, 16, 32, 64, 128, 200)


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    patience = str(0.1 if smoke else 0.3)
    with tell.step("queues"):
        asked(tell, patience, "queues")
    for blocker in BLOCKERS[:2] if smoke else BLOCKERS:
        with tell.step(blocker):
            asked(tell.under(f"{blocker}: "), patience, "calls", blocker)
    if not smoke:
        with tell.step("captures"):
            asked(tell, patience, "captures")
    with tell.step("calls that hold up others, beside collectives"):
        ranks.run(2, "on_device.hazards:beside", tell, timeout=25)


def asked(tell: Tell, *arguments: str) -> None:
    """Run a process of this module's."""
    program = [sys.executable, "-m", "on_device.hazards", str(tell.path), tell.prefix]
    ranks.finished([*program, *arguments], timeout=20)


class Waiting:
    """A stream that waits for a word."""

    def __init__(self, patience: float, stream: Stream) -> None:
        self.patience, self.stream = patience, stream
        self._pinned, self._turn = driver.Pinned(4096), 0
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


# --- streams and the queues of the hardware


def queues(tell: Tell, patience: float) -> None:
    """Which of n streams do nothing while one waits, of streams that have work at the same time."""
    work, busy, smoke = driver.Work(), Stream(), patience < 0.2
    work.calibrate(busy)
    for kind, waits, priority in (
        ("", Stream(), 0),
        ("of greatest priority, ", Stream(), driver.greatest_priority()),
        ("beside stream 0, ", Stream(handle=0), 0),
    ):
        waiting, others, held = Waiting(patience, waits), list[Stream](), dict[int, list[int]]()
        for n in STREAMS:
            while len(others) < n:
                others.append(Stream(priority))
            for stream in [*others, waits]:
                work.turns(stream, 0, 1)
                stream.synchronize()
            with waiting():
                if not smoke:
                    work.fill(busy, patience / 4)  # none ends before all have begun
                for stream in others:
                    work.turns(stream, 0, 1)
                time.sleep(patience * 0.75)
                held[n] = [i for i, each in enumerate(others) if not driver.passed(each)]
        tell(f"{kind}streams held up by one that waits", len(held[n]), f"of {n}", held=held)


# --- calls


def actions(other: Stream, array: Array) -> dict[str, Callable[[], object]]:
    """The calls of a progress thread, or a program, meanwhile; each may be called once."""
    work, fresh, event = (
        driver.Work(),
        driver.Kernel(ptx.read(), "pgasdl_sum_f32_2"),
        driver.Event(),
    )
    pages = (ctypes.c_uint8 * BYTES).from_buffer(mmap.mmap(-1, BYTES))
    pinned, unused, pageable = driver.Pinned(4096), driver.Pinned(4096), np.zeros(BYTES, np.uint8)
    at = array.address or 0
    work.turns(other, 0, 1)
    event.record(other)
    other.synchronize()
    no_items = (ctypes.c_uint8 * 1200)()
    return {
        "cuEventQuery": event.reached,
        "cuEventRecord": lambda: event.record(other),
        "a launch": lambda: work.turns(other, 0, 1),
        "a first launch": lambda: fresh.launch("pgasdl_sum_f32_2", other, 1, 512, no_items),
        "a copy on the device": lambda: other.copy(at, at + BYTES // 2, BYTES // 2),
        "a copy from pinned memory": lambda: other.copy(at, pinned.address, 4096),
        "a pageable copy": lambda: other.copy(at, pageable.ctypes.data, BYTES),
        "cuMemsetD8Async": lambda: driver.call("cuMemsetD8Async", at, 0, BYTES, other.handle),
        "cuStreamWaitValue32": lambda: driver.wait_value(other, pinned.device, 0),
        "cuStreamWriteValue32": lambda: driver.write_value(other, pinned.device + 64, 1),
        "cuEventCreate": driver.Event,
        "cuStreamCreate": Stream,
        "cuMemAlloc": lambda: Array(BYTES, "u1"),
        "cuMemHostRegister": lambda: driver.register(ctypes.addressof(pages), BYTES),
        "cuMemHostUnregister": lambda: driver.unregister(unused.address),
        "loading a module": lambda: driver.Kernel(ptx.read(), "pgasdl_copy"),
    }


def calls(tell: Tell, patience: float, blocker: str) -> None:
    """Which calls return while a stream waits and another thread is at something."""
    zero = Stream(handle=0)
    waiting = Waiting(patience, zero if blocker.endswith("a wait on stream 0") else Stream())
    array, there, other = Array(BYTES, "u1"), Array(BYTES, "u1"), Stream()
    here = np.zeros(BYTES, np.uint8)

    def blocking() -> Callable[[], object]:
        unused, pinned = Array(BYTES, "u1"), driver.Pinned(4096)
        copy = (here.ctypes.data, there.address or 0, BYTES)
        return {
            BLOCKERS[0]: lambda: None,
            BLOCKERS[1]: lambda: waiting.stream.copy(*copy),
            BLOCKERS[2]: lambda: zero.copy(*copy),
            BLOCKERS[3]: lambda: zero.copy(*copy),
            BLOCKERS[4]: lambda: driver.Kernel(ptx.read(), "pgasdl_copy"),
            BLOCKERS[5]: lambda: driver.free(unused.address),
            BLOCKERS[6]: lambda: driver.unregister(pinned.address),
            BLOCKERS[7]: waiting.stream.synchronize,
            BLOCKERS[8]: lambda: driver.call("cuCtxSynchronize"),
        }[blocker]

    def in_thread(block: Callable[[], object], returned: list[bool]) -> None:
        with Device():
            block()
            returned.append(not waiting.released)

    held, at_once = [], list[bool]()
    asked = actions(other, array)
    for name, action in asked.items():
        block = blocking()
        thread = threading.Thread(target=in_thread, args=(block, at_once))
        with waiting():
            thread.start()
            time.sleep(0.02)
            action()
            if waiting.released:
                held.append(name)
        thread.join()
        other.synchronize()
    if blocker != BLOCKERS[0]:
        tell("returns", "at once" if all(at_once) else "when the stream goes on")
    tell(f"held up of {len(asked)} calls", ", ".join(held) or "none")


# --- captures


def captures(tell: Tell, patience: float) -> None:
    """Which calls spoil a capture, and whether a thread's RELAXED mode saves it."""
    stream, other, array, work = Stream(), Stream(), Array(BYTES, "u1"), driver.Work()
    work.turns(stream, 0, 1)
    stream.synchronize()
    for mode, of in ((driver.GLOBAL, "global"), (driver.THREAD_LOCAL, "of a thread")):
        for where in ("another thread", "its own thread"):
            for relaxed in (False, True):
                spoilt = []
                for name in actions(other, array):
                    action = actions(other, array)[name]
                    if refused := in_capture(mode, where, relaxed, action, stream, work):
                        spoilt.append(f"{name} {refused}")
                    other.synchronize()
                kind = ", relaxed" if relaxed else ""
                tell(f"a capture, {of}: spoilt by {where}{kind}", ", ".join(spoilt) or "nothing")


def in_capture(
    mode: int, where: str, relaxed: bool, action: Callable[[], object], stream: Stream,
    work: driver.Work,
) -> str:  # fmt: skip
    """Call one during a capture; what failed."""
    failed = list[str]()

    def acts() -> None:
        with Device():
            mine = ctypes.c_int(driver.RELAXED)
            if relaxed:
                driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mine))
            try:
                action()
            except (driver.DriverError, AssertionError) as error:
                failed.append(str(error).rpartition(" ")[2])
            if relaxed:
                driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mine))

    try:
        with driver.Capture(stream, mode):
            work.turns(stream, 0, 1)
            if where == "its own thread":
                acts()
            else:
                thread = threading.Thread(target=acts)
                thread.start()
                thread.join()
    except driver.DriverError as error:
        failed.append(f"ends with {error.result}")
    return " ".join(failed)


def beside(ctx: Any, tell: Tell) -> None:
    """Calls that hold up others, beside collectives."""
    held(ctx)
    tell.check("calls that hold up others, beside collectives", True)


def main() -> None:
    """Be the process that asks."""
    path, prefix, patience, name, *arguments = sys.argv[1:]
    program: Callable[..., None] = {"queues": queues, "calls": calls, "captures": captures}[name]
    with Device():
        program(Tell(Path(path), 0, prefix), float(patience), *arguments)


if __name__ == "__main__":
    main()
