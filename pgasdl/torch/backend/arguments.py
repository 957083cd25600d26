"""Arguments of torch.distributed to a process group: options and tensors, in several forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pgasdl.errors import BufferRefusedError


def options_of(
    kind: Any, given: Any, field: str | None = None, timeout: timedelta | None = None
) -> Any:
    """Return options; a caller may give the only field that matters instead."""
    if given is not None and hasattr(given, "asyncOp"):
        return given
    options = kind()
    options.asyncOp = True  # a caller that gives no options waits for the work
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
    (tensor,) = readable(tensors)
    if not tensor.is_contiguous():
        raise ValueError("a message has to be contiguous: send tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise BufferRefusedError("a message has to be as in memory: send tensor.resolve_conj()")
    return tensor


def readable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the content of tensors, without their history; refuse those outside host memory.

    :func:`pgasdl.torch.backend.on_gpu.takes_gpus` has seen to calls whose first tensor is on a GPU.
    """
    return [_alias(each) for each in tensors]


def writable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same as :func:`readable`, but also refuse elements that share their memory."""
    aliases = readable(tensors)
    for each in aliases:
        if 0 in each.stride():
            require_unshared(each)
    return aliases


def require_unshared(tensor: Tensor) -> None:
    """Refuse a result whose elements share their memory."""
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise BufferRefusedError(
            f"a result in an expanded tensor, of shape {list(tensor.shape)}, whose elements "
            "share memory: give tensor.contiguous()"
        )


def require_host(tensor: Tensor) -> None:
    """Refuse a tensor that is not in host memory."""
    where = tensor.device
    if where.type != "cpu":
        if where.type == "cuda":
            raise on_several(("cpu", str(where)))
        raise BufferRefusedError(
            f"a tensor on {where}: backend pgasdl takes those of the host and of CUDA"
        )


def on_several(devices: Iterable[str]) -> BufferRefusedError:
    """Return the error for tensors on several devices."""
    found = " and ".join(sorted(devices))
    return BufferRefusedError(f"tensors on {found} in one call: give all on one device")


def on_device(tensor: Tensor) -> Tensor:
    """Return the content of a tensor, without its history, wherever it is.

    Writes to it do not count as changes of the tensor, as if memory were written to directly.
    """
    _require_dense(tensor)
    if hasattr(tensor, "trigger_wait"):  # the result of a functional collective
        tensor = tensor.trigger_wait()
    alias = tensor.data
    if not _has_memory(alias):
        raise _without_memory(tensor)
    return alias


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _require_dense(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
        raise BufferRefusedError(f"a tensor ({kind}) that is no dense array of numbers")


def _alias(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu:
        require_host(tensor)
    _require_dense(tensor)
    plain = type(tensor) is Tensor and not tensor.requires_grad
    alias = tensor if plain else tensor.detach()
    if _has_memory(alias):
        return alias
    if hasattr(tensor, "trigger_wait"):
        return _alias(tensor.trigger_wait())
    raise _without_memory(tensor)


def _without_memory(tensor: Tensor) -> BufferRefusedError:
    return BufferRefusedError(f"a tensor without memory ({type(tensor).__name__})")


def require_alike(tensor: Tensor, others: Sequence[Tensor], count: int | None = None) -> None:
    """Refuse tensors of another dtype, or of another number of elements than ``count``."""
    dtype = tensor.dtype
    for number, other in enumerate(others):
        if other.dtype != dtype:
            raise ValueError(f"tensor {number} is {other.dtype}, not {dtype}")
        if count is not None and other.numel() != count:
            raise ValueError(
                f"tensor {number} has {other.numel()} elements of shape {list(other.shape)}, "
                f"not {count}"
            )


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor if its memory is as it shows, else a copy."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def in_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors if their memory is as they show, else copies; see :func:`give_back`."""
    for each in tensors:
        if not each.is_contiguous() or each.is_conj() or each.is_neg():
            return [contiguous(every) for every in tensors]
    return tensors


def give_back(memory: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy the results from the copies back into the tensors."""
    if memory is tensors:
        return
    for copy, tensor in zip(memory, tensors, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
