"""Exchanges of layers by torch.distributed: in DistributedDataParallel's buckets, or others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from bench.cuts import DDP, buckets
from bench.timeline import Recorder
from pgasdl.torch import DDPState


def describe(cut: Sequence[Sequence[int]]) -> str:
    """Say how many there are."""
    return "1 bucket" if len(cut) == 1 else f"{len(cut)} buckets"


class Buckets:
    """All-reduces of a backend of torch.distributed, one for each bucket, when it is full.

    As in DistributedDataParallel: the mean is made by a division before, and the host waits for all
    buckets after the backward pass. ``state``: pgasdl's hook averages them, not the backend.
    """

    sums = False

    def __init__(
        self,
        group: Any,
        names: Sequence[str],
        counts: Sequence[int],
        *,
        nbytes: int = DDP,
        state: DDPState | None = None,
    ) -> None:
        self.recorder, self._state = Recorder(), state
        self._group, self._size = group, distributed.get_world_size(group)
        self._buckets = buckets(counts, nbytes)
        self._names = [names[layers[0]] for layers in self._buckets]
        self._memory = [torch.zeros(sum(counts[e] for e in layers)) for layers in self._buckets]
        self.gradients: list[Tensor] = []
        self._bucket_of: list[int] = []
        for bucket, layers in enumerate(self._buckets):
            self.gradients += self._memory[bucket].split([counts[layer] for layer in layers])
            self._bucket_of += [bucket] * len(layers)
        self._missing = [len(layers) for layers in self._buckets]
        self._works: list[Any] = []
        self.plan = describe(self._buckets)

    def ready(self, layer: int) -> None:
        bucket = self._bucket_of[layer]
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return
        self._missing[bucket] = len(self._buckets[bucket])
        began = time.monotonic()
        memory = self._memory[bucket]
        if self._state is not None:
            future = self._state.average(memory)
            self._works.append(future)
        else:
            memory.div_(self._size)
            work = distributed.all_reduce(memory, group=self._group, async_op=True)
            self._works.append(work)
            future = work.get_future()
        if self.recorder.on:
            future.add_done_callback(partial(self._note, self._names[bucket], began))

    def _note(self, name: str, began: float, _: object) -> None:
        self.recorder.add("exchange", name, began, time.monotonic())

    def backward_done(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def take(self, layer: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def result(self, layer: int) -> float:
        return float(self.gradients[layer][0])

    def exchange(self) -> float:
        distributed.barrier(self._group)
        began = time.monotonic()
        for layer in range(len(self.gradients)):
            self.ready(layer)
        self.backward_done()
        return time.monotonic() - began

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        distributed.destroy_process_group(self._group)
