"""All ranks begin with the same model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pgasdl.context import Context
from pgasdl.group import Group

_ALIGNMENT = 16  # bytes: of the widest dtype


def broadcast(model: nn.Module, context: Context, group: Group, timeout: float | None) -> None:
    """Give every rank the parameters and buffers of the group's first. Collective."""
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [-(-_nbytes(each) // _ALIGNMENT) * _ALIGNMENT for each in tensors]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8)
    parts = [
        part[: _nbytes(each)]
        for part, each in zip(torch.split(packed, sizes), tensors, strict=True)
    ]
    for part, each in zip(parts, tensors, strict=True):
        part.copy_(each.detach().contiguous().reshape(-1).view(torch.uint8))
    words = packed.view(torch.int32)
    with context.collective_handle("broadcast", words, group=group, timeout=timeout) as handle:
        handle(timeout=timeout)
    with torch.no_grad():
        for part, each in zip(parts, tensors, strict=True):
            each.copy_(part.view(each.dtype).view(each.shape))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
