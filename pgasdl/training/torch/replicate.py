"""All ranks begin with the same model."""

from __future__ import annotations

import torch
from torch import nn

from pgasdl.buffers import aligned
from pgasdl.context import Context
from pgasdl.group import Group


def broadcast(model: nn.Module, context: Context, group: Group, timeout: float | None) -> None:
    """Give every rank the parameters and buffers of the group's first. Collective.

    Raises
    ------
    Timeout, PeerLost, MismatchError
    """
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
