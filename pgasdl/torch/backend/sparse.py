"""The sum of sparse tensors over all ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from pgasdl.errors import BufferRefusedError
from pgasdl.torch.backend.arguments import contiguous, require_host
from pgasdl.torch.backend.collectives import Collectives, block_of, cut, rows
from pgasdl.torch.backend.reductions import Kind, ReduceOp


def require_summable(tensor: Tensor, op: Any) -> None:
    """Refuse what :func:`add_up` cannot add up."""
    kind = op.op if isinstance(op, ReduceOp) else op
    if kind != Kind.SUM:
        raise BufferRefusedError(
            f"{kind.name} of sparse tensors is not defined: they can be summed"
        )
    require_host(tensor)
    place = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    number = torch.zeros(1, dtype=tensor.dtype, device="cpu")
    try:
        torch.sparse_coo_tensor(place, number, (1,)).coalesce()
    except RuntimeError as error:
        raise BufferRefusedError(f"a sparse tensor of {tensor.dtype}: {error}") from error


def add_up(collectives: Collectives, tensor: Tensor, size: int, seconds: float) -> None:
    """Replace a sparse COO tensor by the sum of all ranks'."""
    deadline = time.monotonic() + seconds
    mine = tensor.detach().coalesce()
    number = torch.tensor([mine._nnz()], device="cpu")
    numbers = torch.empty(size, dtype=torch.int64, device="cpu")
    collectives.all_gather(rows(numbers, size), block_of(number), (number, numbers), seconds)
    counts = numbers.tolist()

    def gathered(part: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        whole = part.new_empty((sum(counts), *part.shape[1:]))
        into = cut(whole, counts, part.shape[1:].numel() * part.element_size())
        left = max(0.0, deadline - time.monotonic())
        collectives.all_gather(into, block_of(part), (whole, part), left)
        return whole

    indices = gathered(contiguous(mine.indices().t()))
    values = gathered(contiguous(mine.values()))
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
