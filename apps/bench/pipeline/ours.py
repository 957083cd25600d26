"""Exchanges of layers by pgasdl: those of the papers, each by its own design."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

import pgasdl
from bench.pipeline.waiting import NoExchange
from bench.timeline import Recorder
from pgasdl.training.exchange import GradientExchange
from pgasdl.training.owner import Block


class Average:
    """Every layer's gradient is averaged: as soon as it is there, or, ``phased``, after all.

    ``update``: owners make the steps instead, and weights travel, as in CaffeGPI.
    """

    sums = False

    def __init__(
        self,
        ctx: pgasdl.Context,
        names: Sequence[str],
        counts: Sequence[int],
        *,
        plan: str | None = None,
        phased: bool = False,
        update: bool = False,
    ) -> None:
        self.recorder = Recorder()
        self._names, self._phased = names, phased
        layers = [((count,), np.float32) for count in counts]
        steps = {"kind": "update", "update": _copied} if update else {}
        self._exchange = GradientExchange(ctx, layers, plan=plan, **steps)
        every = range(len(counts))
        self.gradients = [self._exchange.gradient(layer) for layer in every]
        self._results = [self._exchange.weight(each) for each in every] if update else None
        self._barrier = ctx.barrier
        self._taken = [True] * len(counts)  # since it was ready
        self.plan = self._exchange.plan

    def ready(self, layer: int) -> None:
        if not self._phased:
            self._exchange.ready(layer)
            self._taken[layer] = False

    def backward_done(self) -> None:
        if self._phased:
            self._all()

    def _all(self) -> None:
        for layer in range(len(self._names)):
            self._exchange.ready(layer)
            self._taken[layer] = False
        for layer in reversed(range(len(self._names))):
            self.take(layer)

    def take(self, layer: int) -> None:
        if self._taken[layer]:
            return
        self._exchange.wait(layer)
        self._taken[layer] = True
        if self.recorder.on:
            timing = self._exchange.timing(layer)
            self.recorder.add("exchange", self._names[layer], timing.began, timing.ended)

    def drain(self) -> None:
        for layer in range(len(self._names)):
            self.take(layer)

    def result(self, layer: int) -> float:
        return float((self._results or self.gradients)[layer][0])

    def exchange(self) -> float:
        self._barrier(timeout=600)
        began = time.monotonic()
        self._all()
        return time.monotonic() - began

    def close(self) -> None:
        self._exchange.close()


def _copied(block: Block) -> None:
    """Stand in for an owner's step, which is the accelerator's work: the weights are the mean."""
    block.weights[:1] = block.gradient[:1]


class Packed(NoExchange):
    """swCaffe: all layers' gradients in one buffer, all-reduced after the backward pass."""

    def __init__(
        self, ctx: pgasdl.Context, names: Sequence[str], counts: Sequence[int], plan: str
    ) -> None:
        self.recorder = Recorder()
        shape = [((sum(counts),), np.float32)]
        self._exchange = GradientExchange(ctx, shape, plan=plan)
        self.gradients = _views(self._exchange, counts, False)
        self._barrier, self.plan = ctx.barrier, self._exchange.plan

    def backward_done(self) -> None:
        self._exchange.ready(0)
        self._exchange.wait(0)
        if self.recorder.on:
            timing = self._exchange.timing(0)
            self.recorder.add("exchange", "all", timing.began, timing.ended)

    def result(self, layer: int) -> float:
        return float(self.gradients[layer][0])

    def exchange(self) -> float:
        self._barrier(timeout=600)
        began = time.monotonic()
        self.backward_done()
        return time.monotonic() - began

    def close(self) -> None:
        self._exchange.close()


class SCaffe:
    """S-Caffe: gradients are reduced to the root, and the updated weights broadcast.

    SC-B does both in one piece after the backward pass; SC-OB broadcasts by layer, and waits for
    each layer before its forward pass, ``naive`` with one broadcast ahead; SC-OBR also reduces by
    layer, while backward goes on.
    """

    sums = False

    def __init__(
        self,
        ctx: pgasdl.Context,
        names: Sequence[str],
        counts: Sequence[int],
        *,
        reduce_layers: bool,
        broadcast_layers: bool,
        naive: bool = False,
    ) -> None:
        self.recorder = Recorder()
        self._names, self._root = names, ctx.rank == 0
        self._size, self._barrier = ctx.size, ctx.barrier
        self._parts = (reduce_layers, broadcast_layers)
        self._reduce = _packed(ctx, counts, "reduce", reduce_layers)
        self._broadcast = _packed(ctx, counts, "broadcast", broadcast_layers)
        self.gradients = _views(self._reduce, counts, reduce_layers)
        self.weights = _views(self._broadcast, counts, broadcast_layers)
        self._taken = [True] * len(counts)
        self._naive, self._next = naive, -1  # the next layer whose broadcast is to be started
        self.plan = f"{self._reduce.plan}; {self._broadcast.plan}"

    def ready(self, layer: int) -> None:
        if self._parts[0]:
            self._reduce.ready(layer)

    def backward_done(self) -> None:
        reduce_layers, broadcast_layers = self._parts
        if not reduce_layers:
            self._reduce.ready(0)
            self._wait(self._reduce, 0, "reduce all")
        self._next = len(self._names) - 1
        # The forward pass needs the last layer's weights first.
        for layer in reversed(range(len(self._names))):
            if reduce_layers:
                self._wait(self._reduce, layer, f"reduce {self._names[layer]}")
            if self._root:  # an update; on the accelerator, but for one element
                self.weights[layer][0] = self.gradients[layer][0] / self._size
            if broadcast_layers:
                self._taken[layer] = False
                if not self._naive:
                    self._start(layer)
        if not broadcast_layers:
            self._broadcast.ready(0)
            self._wait(self._broadcast, 0, "broadcast all")

    def _wait(self, exchange: GradientExchange, layer: int, name: str) -> None:
        exchange.wait(layer)
        if self.recorder.on:
            timing = exchange.timing(layer)
            self.recorder.add("exchange", name, timing.began, timing.ended)

    def take(self, layer: int) -> None:
        if not self._taken[layer]:
            self._start(layer)
            self._wait(self._broadcast, layer, f"broadcast {self._names[layer]}")
            self._taken[layer] = True
            self._start(layer - 1)  # naive: the next one starts when this one is here

    def _start(self, layer: int) -> None:
        """Start the broadcasts that were not, up to a layer's."""
        while self._next >= max(layer, 0):
            self._broadcast.ready(self._next)
            self._next -= 1

    def drain(self) -> None:
        for layer in reversed(range(len(self._names))):  # in forward order
            self.take(layer)

    def result(self, layer: int) -> float:
        return float(self.weights[layer][0])

    def exchange(self) -> float:
        self._barrier(timeout=600)
        began = time.monotonic()
        for layer in range(len(self._names)):
            self.ready(layer)
        self.backward_done()
        self.drain()
        return time.monotonic() - began

    def close(self) -> None:
        self._reduce.close()
        self._broadcast.close()


def _packed(
    ctx: pgasdl.Context, counts: Sequence[int], kind: str, layers: bool
) -> GradientExchange:
    shapes = counts if layers else [sum(counts)]
    return GradientExchange(ctx, [((count,), np.float32) for count in shapes], kind=kind)


def _views(
    exchange: GradientExchange, counts: Sequence[int], layers: bool
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    if layers:
        return [exchange.gradient(layer) for layer in range(len(counts))]
    return np.split(exchange.gradient(0), np.cumsum(counts)[:-1])
