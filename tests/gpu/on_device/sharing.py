"""Whether what one process does with the GPU holds up another's kernels.

Several processes of one GPU are time-sliced, unless MPS runs: one context at a time. The question
is what a stream costs that waits for a word: nothing, a slice, or all.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from cuda_arrays import Device, Stream

from on_device import driver
from on_device.findings import Tell

ANSWER_SECONDS = 20.0
# The other process's work while kernels are timed, in the order of the table.
OTHERS = {
    "no other process": "",
    "its context is idle": "idle",
    "its stream waits for a word": "waits",
    "eight of its streams wait": "waits 8",
    "it launches kernels all the time": "computes",
}


def run(tell: Tell, smoke: bool) -> None:
    """Time one process's kernels beside the other's doings."""
    seconds, times = (2e-4, 5) if smoke else (1e-3, 200)
    alone = 0.0
    with Child(_compute) as computing:
        for name, doing in OTHERS.items():
            if smoke and doing == "waits 8":
                continue
            with tell.step(name), Child(_other, doing=doing) as other:
                if doing:
                    other.ask("begin")
                kernels = computing.ask(("kernels", seconds, times))
                median = statistics.median(kernels)
                alone = alone or median
                tell(
                    f"a kernel of {1e3 * alone:.2f} ms, {name}", median / alone, "times as long",
                    worst_ms=1e3 * max(kernels), sum_ms=1e3 * sum(kernels), median_ms=1e3 * median,
                )  # fmt: skip
                if doing.startswith("waits"):
                    other.ask("release")
    for doing in ("idle", "computes"):
        with (
            tell.step(f"a waiting stream is released ({doing})"),
            Child(_answers) as answering,
            Child(_other, doing=doing) as other,
        ):
            other.ask("begin")
            kept = answering.ask(("answer", 10 if smoke else 200))
            median = 1e6 * statistics.median(kept)
            tell(
                f"host releases a waiting stream, the other {doing}", median, "us",
                worst_us=1e6 * max(kept),
            )  # fmt: skip


class Child:
    """A process that answers requests; it is killed at the end."""

    def __init__(self, program: Any, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_child, args=(program, theirs, settings), daemon=True
        )

    def __enter__(self) -> Child:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def ask(self, request: object) -> Any:
        self._pipe.send(request)
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"no answer to {request} within {ANSWER_SECONDS:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _child(program: Any, pipe: Connection, settings: dict[str, Any]) -> None:
    try:
        program(pipe, **settings)
    except EOFError:
        pass
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _compute(pipe: Connection) -> None:
    """Times kernels of a length that was found while nobody else was there."""
    with Device():
        stream, work = Stream(), driver.Work()
        work.calibrate(stream)
        while True:
            _, seconds, times = pipe.recv()

            def kernel(seconds: float = seconds) -> None:
                work.seconds(stream, seconds)
                stream.synchronize()

            pipe.send([driver.timed(kernel) for _ in range(times)])


def _other(pipe: Connection, doing: str) -> None:
    """Does something with the device, or nothing at all."""
    if not doing:
        pipe.recv()
        return
    with Device():
        streams, work = [Stream() for _ in range(8)], driver.Work()
        work.turns(streams[0], 1000)
        streams[0].synchronize()
        pipe.recv()
        if doing == "computes":
            work.calibrate(streams[0])
            pipe.send("begun")
            while not pipe.poll():
                for _ in range(8):
                    work.seconds(streams[0], 1e-3)
                streams[0].synchronize()
            return
        pinned = driver.Pinned(4096)
        if doing.startswith("waits"):
            for stream in streams[: int(doing.removeprefix("waits") or 1)]:
                driver.wait_value(stream, pinned.device, 1)
        time.sleep(0.01)
        pipe.send("begun")
        pipe.recv()
        pinned.words[0] = 1
        for stream in streams:
            stream.synchronize()
        pipe.send("released")


def _answers(pipe: Connection) -> None:
    """A stream waits for the host's word and answers."""
    with Device():
        stream, pinned = Stream(), driver.Pinned(4096)
        _, times = pipe.recv()
        kept = []
        for turn in range(1, times + 1):
            driver.wait_value(stream, pinned.device, turn)
            driver.write_value(stream, pinned.device + 64, turn)
            time.sleep(3e-4)
            began = time.perf_counter()
            pinned.words[0] = turn
            while pinned.words[16] != turn:
                pass
            kept.append(time.perf_counter() - began)
        pipe.send(kept)
