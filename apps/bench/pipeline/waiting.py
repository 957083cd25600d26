"""Iterations whose compute is a wait: an accelerator that computes while the host's core is free.

The accelerator does its work items one after the other, as a stream does. In the forward
pass a layer is given to it as soon as the layer's weights are there; the host does not wait for it.
The backward pass depends on no exchange: it is given to it as a whole, and the host sleeps until
each gradient is there. So the host's work for the exchange delays the iteration only where the
accelerator has nothing else to do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from bench.pipeline.workload import Workload
from bench.timeline import Recorder


class LayerExchange(Protocol):
    """How a variant exchanges the gradients of layers, which are numbered as they arrive."""

    gradients: Sequence[Any]  # each layer's memory, flat
    recorder: Recorder  # gets the spans of exchanges
    sums: bool  # its results are sums, not means
    plan: str  # how it exchanges, in a few words

    def ready(self, layer: int) -> None:
        """The layer's gradient is there."""

    def backward_done(self) -> None:
        """All gradients are there."""

    def take(self, layer: int) -> None:
        """The layer is about to be used."""

    def drain(self) -> None:
        """Let everything end that is under way."""

    def result(self, layer: int) -> float:
        """Return the first element of the layer's mean gradient."""

    def exchange(self) -> float:
        """Return the seconds of one exchange of all layers, with nothing else to do."""

    def close(self) -> None:
        """Give the memory back."""


class NoExchange:
    """Every rank for itself."""

    sums, plan = False, ""

    def __init__(self, counts: Sequence[int]) -> None:
        self.gradients = [np.zeros(count, np.float32) for count in counts]
        self.recorder = Recorder()

    def ready(self, layer: int) -> None:
        pass

    def backward_done(self) -> None:
        pass

    def take(self, layer: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def result(self, layer: int) -> float:
        return float("nan")

    def exchange(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Accelerator:
    """Stands in for an accelerator: does one item after the other, each for a given time."""

    def __init__(self) -> None:
        self._free = 0.0

    def compute(self, seconds: float) -> tuple[float, float]:
        """Give it work; return when that begins and ends."""
        begin = max(self._free, time.monotonic())
        self._free = begin + seconds
        return begin, self._free


def sleep_until(moment: float) -> None:
    """Leave the core to others until then."""
    seconds = moment - time.monotonic()
    if seconds > 0:
        time.sleep(seconds)


class WaitingRunner:
    """Runs iterations of a workload that take ``seconds`` of compute.

    ``write``: the host writes whole gradients, as a copy from the device would; else one element.
    """

    def __init__(
        self,
        work: Workload,
        exchange: LayerExchange,
        seconds: float,
        rank: int,
        size: int,
        *,
        write: bool = False,
    ) -> None:
        self._work, self._exchange, self._write = work, exchange, write
        self._rank, self._size = rank, size
        self._accelerator = Accelerator()
        self.recorder, self.plan = exchange.recorder, exchange.plan
        self.seconds = seconds
        self._number = 0

    def iterate(self) -> None:
        """Make one iteration; exchanges may still be under way when it returns."""
        exchange, compute, recorder = self._exchange, self._accelerator.compute, self.recorder
        clock, work = time.monotonic, self._work
        for stage in work.forward:
            before = clock()
            for layer in stage.layers:
                exchange.take(layer)
            if recorder.on:
                recorder.add("host", f"wait {stage.name}", before, clock())
            begin, end = compute(stage.share * self.seconds)
            recorder.add("forward", stage.name, begin, end)
        spans = [compute(share * self.seconds) for share in work.backward]
        self._number = (self._number + 1) % 1024
        value = float(self._number + self._rank)
        for layer, (begin, end) in enumerate(spans):
            recorder.add("backward", work.names[layer], begin, end)
            sleep_until(end)
            gradient = exchange.gradients[layer]
            if self._write:
                gradient[:] = value
            else:
                gradient[0] = value
            before = clock()
            exchange.ready(layer)
            if recorder.on:
                recorder.add("host", f"turn {work.names[layer]}", before, clock())
        before = clock()
        exchange.backward_done()
        recorder.add("host", "after backward", before, clock())

    def drain(self) -> None:
        """Let everything end, and compare the last iteration's means with the right ones."""
        self._exchange.drain()
        mean = self._number + (self._size - 1) / 2
        for layer, name in enumerate(self._work.names):
            found = self._exchange.result(layer)
            if found == found and found != mean:
                raise SystemExit(f"{name}: a mean of {mean} came out as {found}: no figures")

    def exchange(self) -> float:
        """Return the seconds of one exchange alone."""
        return self._exchange.exchange()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record spans in the ``with`` block."""
        self.recorder.on = True
        yield
        self.recorder.on = False

    def close(self) -> None:
        """Give the memory back."""
        self._exchange.close()
