"""Reductions of tensors, for every operator and dtype that torch.distributed has on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from pgasdl import _native
from pgasdl.buffers import DTYPES, as_numpy_dtype, native_dtype
from pgasdl.errors import BufferRefusedError

# PyTorch's stubs know neither the kinds nor an operator's attributes.
ReduceOp: Any = distributed.ReduceOp
Kind: Any = ReduceOp.RedOpType

# The core's names of the operators that it has.
NATIVE: dict[Any, str] = {
    Kind.SUM: "sum",
    Kind.AVG: "mean",
    Kind.PRODUCT: "prod",
    Kind.MIN: "min",
    Kind.MAX: "max",
}
# For bool an operator acts on one bit, as NCCL has it.
_OF_BOOL = {Kind.SUM: Kind.BOR, Kind.MAX: Kind.BOR, Kind.PRODUCT: Kind.BAND, Kind.MIN: Kind.BAND}
_BY_TORCH: dict[Any, Callable[..., Tensor]] = {
    Kind.SUM: torch.add,
    Kind.PRODUCT: torch.mul,
    Kind.MIN: torch.minimum,
    Kind.MAX: torch.maximum,
    Kind.BAND: torch.bitwise_and,
    Kind.BOR: torch.bitwise_or,
    Kind.BXOR: torch.bitwise_xor,
}

_PREMUL_SUM = int(Kind.PREMUL_SUM)
# The dtypes that the core adds up by itself.
_CORES = {getattr(torch, name) for name in DTYPES}


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Return an operator of torch.distributed, for tensors of one dtype."""
    number = hash(op)  # its kind: the attribute takes four times as long
    if number == _PREMUL_SUM:
        _, factor = op.__getstate__()  # 2.13 has the attribute `factor`, which 2.12 has not
        return Reduction(Kind.SUM, dtype, factor)
    return _without_factor(number, dtype)


@functools.cache
def _without_factor(number: int, dtype: torch.dtype) -> Reduction:
    return Reduction(Kind(number), dtype)


class Reduction:
    """An operator for tensors of one dtype; BufferRefusedError: there is no such reduction.

    ``native`` and ``dtype`` are the core's names, None and "" where the core cannot reduce it.
    ``prepares``: each rank multiplies by its own ``factor`` first.
    """

    def __init__(self, kind: Any, dtype: torch.dtype, factor: float | Tensor | None = None) -> None:
        self._factor, name = factor, kind.name
        if dtype == torch.bool:
            kind = _OF_BOOL.get(kind, kind)
        floats = dtype.is_floating_point or dtype.is_complex
        bits = kind in (Kind.BAND, Kind.BOR, Kind.BXOR)
        if (floats and bits) or (not floats and kind == Kind.AVG):
            raise BufferRefusedError(f"{name} of {dtype} is not defined")
        if dtype.is_complex and kind in (Kind.MIN, Kind.MAX):
            raise BufferRefusedError(f"{name} of {dtype} is not defined: it has no order")
        self.prepares = factor is not None
        self._by_parts = dtype.is_complex and kind in (Kind.SUM, Kind.AVG)
        if self._by_parts:  # complex numbers as pairs of real ones
            dtype = dtype.to_real()
        self._kind = Kind.SUM if kind == Kind.AVG else kind
        self._mean = kind == Kind.AVG
        self.native = NATIVE.get(kind) if dtype in _CORES else None
        self.dtype = "" if self.native is None else native_dtype(as_numpy_dtype(dtype))
        if factor is not None and not _scales(factor, dtype):
            raise BufferRefusedError(f"{name} of {dtype} with factor {factor} is not possible")
        if self.native is None and not _combines(self._kind, dtype):
            raise BufferRefusedError(f"{name} of {dtype} is not possible")

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a contiguous tensor, as they are reduced."""
        return torch.view_as_real(tensor) if self._by_parts else tensor

    def scale(self, size: int) -> float:
        """Return the factor of the sum of so many ranks."""
        return 1 / size if self._mean else 1.0

    def prepare(self, tensor: Tensor) -> Tensor:
        """Return a rank's contribution: ``tensor``, or its product with the operator's factor."""
        return tensor if self._factor is None else (tensor * self._factor).to(tensor.dtype)

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce contiguous tensors of one shape, in their order, into ``out``.

        ``out`` may be one of them.
        """
        if out.numel() == 0:
            return
        if self.native is not None:
            mean = self.native == "mean"
            _native.reduce(
                [(out.data_ptr(), self.dtype)],
                [(part.data_ptr(), self.dtype) for part in parts],
                out.numel(),
                1 / len(parts) if mean else 1.0,
                "sum" if mean else self.native,
            )
            return
        combine = _BY_TORCH[self._kind]
        total = parts[0]
        if len(parts) > 2:
            total = total.clone()
            for part in parts[1:-1]:
                combine(total, part, out=total)
        if len(parts) > 1:
            combine(total, parts[-1], out=out)
        else:
            out.copy_(total)
        if self._mean:
            out /= len(parts)


@functools.cache
def _combines(kind: Any, dtype: torch.dtype) -> bool:
    """Whether PyTorch has this operator for this dtype."""
    number = torch.empty(1, dtype=dtype, device="cpu")
    try:
        return kind in _BY_TORCH and _BY_TORCH[kind](number, number).dtype == dtype
    except RuntimeError:
        return False


def _scales(factor: float | Tensor, dtype: torch.dtype) -> bool:
    """Whether the product with a factor is one number of this dtype."""
    if isinstance(factor, Tensor) and (factor.numel() != 1 or factor.device.type != "cpu"):
        return False
    return _combines(Kind.PRODUCT, dtype) and (
        torch.result_type(torch.empty(1, dtype=dtype, device="cpu"), factor) == dtype
    )
