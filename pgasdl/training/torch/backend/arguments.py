"""What torch.distributed passes to a process group: options and tensors, in several forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pgasdl.errors import BufferRefused
from pgasdl.training.torch.backend.reductions import Reduction


def options_of(
    kind: Any, given: Any, field: str | None = None, timeout: timedelta | None = None
) -> Any:
    """Return options; a caller may give the only field that matters instead."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    options = kind()
    options.asyncOp = True  # whoever gives no options waits for the work
    if timeout is not None:
        options.timeout = timeout
    if given is not None and field is not None:
        setattr(options, field, given)
    return options


def listed(tensors: Any) -> list[Tensor]:
    """Return a list of tensors; one may be given instead."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(lists: Any) -> list[list[Tensor]]:
    """Return a list of lists of tensors; one list may be given instead."""
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], Tensor) else [list(each) for each in lists]


def message_of(tensors: list[Tensor]) -> Tensor:
    """Return the one tensor of a message."""
    (tensor,) = tensors
    require_host(tensor)
    if not tensor.is_contiguous():
        raise ValueError("a message has to be contiguous: send tensor.contiguous()")
    return tensor


def reduced(tensor: Tensor, op: Any) -> tuple[Tensor, Reduction]:
    """Return a tensor as numbers that have an order, and how to reduce it."""
    require_host(tensor)
    reduction = Reduction(op, tensor.dtype)
    if tensor.is_complex() and reduction.by_parts:
        tensor = torch.view_as_real(tensor)
        reduction = Reduction(op, tensor.dtype)
    return tensor, reduction


def require_host(tensor: Tensor) -> None:
    """Refuse a tensor on a device."""
    if tensor.device.type != "cpu":
        raise BufferRefused(f"a tensor on {tensor.device}: backend pgasdl takes host memory only")


def require_alike(tensor: Tensor, others: Sequence[Tensor], count: int | None = None) -> None:
    """Refuse tensors of another dtype, or of another number of elements than ``count``."""
    for number, other in enumerate(others):
        if other.dtype != tensor.dtype:
            raise ValueError(f"tensor {number} is {other.dtype}, not {tensor.dtype}")
        if count is not None and other.numel() != count:
            raise ValueError(
                f"tensor {number} has {other.numel()} elements of shape {list(other.shape)}, "
                f"not {count}"
            )


@contextmanager
def dense(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor in contiguous memory; what is written there, it gets."""
    dense = tensor.detach().contiguous()
    yield dense
    if dense.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(dense)


@contextmanager
def all_dense(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As :func:`dense`, for several."""
    dense = [each.detach().contiguous() for each in tensors]
    yield dense
    with torch.no_grad():
        for copy, tensor in zip(dense, tensors, strict=True):
            if copy.data_ptr() != tensor.data_ptr():
                tensor.copy_(copy)
