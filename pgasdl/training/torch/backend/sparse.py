"""The sum of sparse tensors over all ranks."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from pgasdl.errors import BufferRefused
from pgasdl.training.torch.backend.collectives import Collectives


def add_up(collectives: Collectives, tensor: Tensor, size: int, seconds: float) -> None:
    """Replace a sparse COO tensor by the sum of all ranks'."""
    if tensor.layout != torch.sparse_coo:
        raise BufferRefused(f"a tensor of layout {tensor.layout}: sparse_coo can be summed")
    deadline = time.monotonic() + seconds
    mine = tensor.coalesce()
    numbers = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    collectives.all_gather(numbers, torch.tensor([mine._nnz()]), seconds)
    most = max(int(each) for each in numbers)

    def gathered(part: Tensor) -> list[Tensor]:
        """Return every rank's part: rows, padded to the longest."""
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(size)]
        collectives.all_gather(parts, padded, max(0.0, deadline - time.monotonic()))
        return [each[: int(n)] for each, n in zip(parts, numbers, strict=True)]

    indices = torch.cat(gathered(mine.indices().t().contiguous()))
    values = torch.cat(gathered(mine.values().contiguous()))
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    tensor.copy_(total)
