"""Reductions of tensors, for every operator and dtype that torch.distributed has on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from pgasdl import _native
from pgasdl.buffers import DTYPES, as_numpy_dtype, native_dtype
from pgasdl.errors import BufferRefused

# PyTorch's stubs know neither the kinds nor an operator's attributes.
ReduceOp: Any = distributed.ReduceOp
Kind: Any = ReduceOp.RedOpType

# What the core calls those that it has.
NATIVE: dict[Any, str] = {
    Kind.SUM: "sum",
    Kind.AVG: "mean",
    Kind.PRODUCT: "prod",
    Kind.MIN: "min",
    Kind.MAX: "max",
}
# Of bool, what is a sum in one bit: NCCL's rule.
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

# What the core adds up by itself.
_CORES = {getattr(torch, name) for name in DTYPES}


class Reduction:
    """An operator, for tensors of one dtype.

    Parameters
    ----------
    op : ReduceOp
        Of torch.distributed.
    dtype : torch.dtype
        Of the tensors.

    Attributes
    ----------
    native : str or None
        The core's name of the operator, if the core reduces this dtype by it.
    by_parts : bool
        Complex numbers may be reduced as pairs of real ones.

    Raises
    ------
    BufferRefused
        There is no such reduction.
    """

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        op = op if isinstance(op, ReduceOp) else ReduceOp(op)
        self._factor: float | Tensor | None = None
        kind = op.op
        if kind == Kind.PREMUL_SUM:
            self._factor, kind = op.factor, Kind.SUM
        if dtype == torch.bool:
            kind = _OF_BOOL.get(kind, kind)
        floats = dtype.is_floating_point or dtype.is_complex
        bits = kind in (Kind.BAND, Kind.BOR, Kind.BXOR)
        if (floats and bits) or (not floats and kind == Kind.AVG):
            raise BufferRefused(f"{op.op.name} of {dtype} is not defined")
        if dtype.is_complex and kind in (Kind.MIN, Kind.MAX):
            raise BufferRefused(f"{op.op.name} of {dtype} is not defined: it has no order")
        self._kind = kind
        self.by_parts = kind in (Kind.SUM, Kind.AVG)
        self.native = NATIVE.get(kind) if dtype in _CORES else None

    def prepare(self, tensor: Tensor) -> Tensor:
        """Return what a rank contributes: ``tensor``, or its product with the operator's factor."""
        return tensor if self._factor is None else tensor * self._factor

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce contiguous tensors of one shape, in their order, into ``out``."""
        if out.numel() == 0:
            return
        if self.native is not None:
            name = native_dtype(as_numpy_dtype(out.dtype))
            mean = self.native == "mean"
            _native.reduce(
                [(out.data_ptr(), name)],
                [(part.data_ptr(), name) for part in parts],
                out.numel(),
                1 / len(parts) if mean else 1.0,
                "sum" if mean else self.native,
            )
            return
        combine = _BY_TORCH[Kind.SUM if self._kind == Kind.AVG else self._kind]
        total = parts[0].clone()
        for part in parts[1:]:
            combine(total, part, out=total)
        out.copy_(total / len(parts) if self._kind == Kind.AVG else total)
