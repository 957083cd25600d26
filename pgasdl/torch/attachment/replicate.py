"""Exchanges of ranks besides gradients: the model they begin with, and states."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pgasdl.buffers import aligned
from pgasdl.context import Context
from pgasdl.group import Group


def broadcast(model: nn.Module, context: Context, group: Group, timeout: float | None) -> None:
    """Give every rank the parameters and buffers of the group's first rank. Collective."""
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [aligned(each.nbytes) for each in tensors]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8)
    cuts = zip(torch.split(packed, sizes), tensors, strict=True)
    pairs = [(part[: each.nbytes], each) for part, each in cuts]
    for part, each in pairs:
        part.copy_(each.detach().contiguous().reshape(-1).view(torch.uint8))
    words = packed.view(torch.int32)
    with context.collective_handle("broadcast", words, group=group, timeout=timeout) as handle:
        handle(timeout=timeout)
    with torch.no_grad():
        for part, each in pairs:
            each.copy_(part.view(each.dtype).view(each.shape))


def allgather_objects(
    mine: Any, context: Context, group: Group, device: torch.device
) -> Iterator[Any]:
    """Yield every rank's object, of tensors, numbers and containers, by rank. Collective.

    Only one of them is in memory at a time. They travel by way of the host; tensors from a GPU come
    to ``device``, which may have another number there, and the rest stays on the host.
    """

    def placed(storage: Any, tag: str) -> Any:
        return storage.to(device=device) if tag.startswith("cuda") else storage

    file = io.BytesIO()
    torch.save(mine, file)
    blob = file.getvalue()
    own = group.index(context.rank)
    sizes = group.allgather("objects", struct.pack("<Q", len(blob)))
    for root, (size,) in enumerate(struct.unpack("<Q", each) for each in sizes):
        packed = torch.zeros(aligned(size), dtype=torch.uint8)
        if root == own:
            packed[:size] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        words = packed.view(torch.int32)
        with context.collective_handle("broadcast", words, group=group, root=root) as handle:
            handle()
        # A damaged file can do no harm: only data is loaded.
        file = io.BytesIO(packed[:size].numpy().tobytes())
        yield torch.load(file, map_location=placed, weights_only=True)
