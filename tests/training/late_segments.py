"""Segments on the stand-in for a GPU: memory of the host, whose tensors are the stand-in's.

As on a GPU, bound memory is mapped by peers, who are threads here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import late_gpu
import pytest
import torch
from late_gpu import DEVICE, LateEvent, LateTensor

from pgasdl import _native
from pgasdl.context import Context
from pgasdl.segment import Segment, SegmentTable
from pgasdl.torch import streams

_bound: dict[tuple[int, int], int] = {}  # addresses, by segment and rank


class LateSegment(Segment):
    """A segment that says that it is on ``cuda:0``."""

    @property
    def device(self) -> str:
        return str(DEVICE)

    def address_of(self, peer: int) -> int:
        mapped = self.bound and self.group.context.mapped
        return _bound[self.id, peer] if mapped else super().address_of(peer)

    def torch(self, *arguments: Any, **named: Any) -> Any:
        return super().torch(*arguments, **named).as_subclass(LateTensor)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of CUDA."""
    make, bind, write = SegmentTable.make, SegmentTable.bind, Context.write

    def make_late(
        table: Any, group: Any, *given: Any, device: int | None = None, **named: Any
    ) -> Any:
        nbytes, notifications, timeout, *rest = given
        device = rest[0] if rest else device
        segment = make(table, group, nbytes, notifications, timeout, **named)
        if device is not None:
            segment.__class__ = LateSegment
        return segment

    def bind_late(table: Any, group: Any, memory: Any, *given: Any) -> Any:
        segment = bind(table, group, dataclasses.replace(memory, device=None), *given)
        if memory.device is not None:
            segment.__class__ = LateSegment
            table._add(segment)
            _bound[segment.id, group.context.rank] = memory.address
            group.barrier()
        return segment

    def write_late(context: Any, *given: Any, **named: Any) -> None:
        LateEvent(late_gpu.gpu.current(DEVICE)).synchronize()  # as the core does
        write(context, *given, **named)

    patch.setattr(streams, "cuda", late_gpu.gpu)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(_native, "cuda_missing", lambda: "")
    patch.setattr(_native, "cuda_device_count", lambda: 1)
    patch.setattr(_native, "cuda_devices", list)
    patch.setattr(SegmentTable, "make", make_late)
    patch.setattr(SegmentTable, "bind", bind_late)
    patch.setattr(Context, "write", write_late)
    patch.setattr(Context, "_why_unreached", lambda self, device: "")
