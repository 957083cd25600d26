"""A linear layer whose weight is a distributed matrix, for networks with wide layers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

import pgasdl.matrix as pm
from pgasdl.context import Context
from pgasdl.errors import BufferRefusedError
from pgasdl.group import Group


class DistributedLinear(nn.Module):
    """A linear layer whose weight is spread over ranks. Each gives, and gets, its share of a batch.

    To the rest of the network it is one of data parallelism: inputs and outputs are those of this
    rank's samples, and gradients are means over the ranks, as those of
    :class:`~torch.nn.parallel.DistributedDataParallel`. No rank has all of the weight, its gradient
    or the state of its optimizer. Any optimizer that treats each element alone makes its step.

    Parameters
    ----------
    where : Context or Group
        The ranks.
    linear : nn.Linear
        The layer that it replaces, equal on all ranks, on the host.
    layout : Layout or str, default "rows"
        The layout of the weight, which has a row for each output: see
        :func:`pgasdl.matrix.empty`.

    Attributes
    ----------
    matrix : DistributedMatrix
        The weight as it is now, of ``(out_features, in_features)``.
    weight : nn.Parameter
        This rank's blocks of it, one after another; the same memory.
    bias : nn.Parameter, optional
        Every rank has all of it.

    Raises
    ------
    BufferRefusedError
        A weight of another dtype than float32 or float64, or not on the host.

    Notes
    -----
    Forward and backward are collective: all ranks call them in the same order, with as many samples
    each. This layer exchanges its own gradients: attach pgasdl to the rest of the network alone;
    DistributedDataParallel leaves this layer as it is. Norms of a gradient, also those of
    ``clip_grad_norm_``, are of all its parts, and so are collective, too; that of the weight is
    ``matrix.norm()``. Where memory is mapped, nothing but the inputs' own copy moves; elsewhere
    inputs that came by in forward are kept for backward, unless they are larger than the weight.
    Matrices lie in the pool (:meth:`pgasdl.Context.pool`), if it has room. dMath and Expresso:
    model parallelism of wide layers, beside data-parallel convolutions.
    """

    def __init__(
        self, where: Context | Group, linear: nn.Linear, layout: pm.Layout | str = "rows"
    ) -> None:
        super().__init__()
        _require(linear.weight)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._matrix = pm.array(where, linear.weight.detach().numpy(), layout)
        self._followed: Any = None  # the weight's memory, and its version there
        self.weight = _Weight(torch.from_numpy(self._matrix.flat))
        self.weight.matrix = self._matrix
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of this rank's samples. Collective."""
        if x.shape[-1] != self.in_features or x.dtype != self.weight.dtype:
            raise BufferRefusedError(
                f"inputs of {x.dtype} {tuple(x.shape)} into a layer of {self.weight.dtype} "
                f"with {self.in_features} inputs"
            )
        inputs = x.reshape(-1, self.in_features)
        apply: Any = _Linear.apply
        found: Tensor = apply(inputs, self.weight, self.bias, self.matrix)
        return found.view(*x.shape[:-1], self.out_features)

    @property
    def matrix(self) -> Any:
        """The weight, where it lies now: ``double()``, say, gave it new memory."""
        weight, matrix = self.weight.detach(), self._matrix
        _require(weight)
        if weight.numel() != matrix.flat.size:
            raise BufferRefusedError(
                f"a weight of {weight.numel()} elements: this rank has {matrix.flat.size} of "
                f"{matrix}"
            )
        matrix.flat = weight.contiguous().view(-1).numpy()
        version = None if weight.is_inference() else weight._version
        now = weight.untyped_storage()._cdata, version
        if now != self._followed:
            self._followed = now
            matrix.expire()
        if type(self.weight) is nn.Parameter:  # load_state_dict(assign=True) brought it
            self.weight.__class__ = _Weight
        if isinstance(self.weight, _Weight):
            self.weight.matrix = matrix
        return matrix

    def extra_repr(self) -> str:
        """Return what ``repr`` shows."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


_DDP: Any = DistributedDataParallel
_wrap = _DDP.__init__


@functools.wraps(_wrap)
def _wrap_others(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
    """Let DDP ignore these layers: it would give every rank the blocks of rank 0."""
    found = {
        each
        for name, layer in module.named_modules()
        if isinstance(layer, DistributedLinear)
        for each, _ in layer.named_parameters(name)
    }
    if found:
        found.update(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        _DDP._set_params_and_buffers_to_ignore_for_model(module, found)
    _wrap(ddp, module, *given, **named)


_DDP.__init__ = _wrap_others

_DTYPES = (torch.float32, torch.float64)


def _require(weight: Tensor) -> None:
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        raise BufferRefusedError(
            f"a weight of {weight.dtype} on {weight.device}: distributed layers "
            "are of float32 or float64, on the host"
        )


_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data


class _Weight(nn.Parameter):
    """A rank's part of a weight, whose gradient has the norm of all parts: the same everywhere."""

    matrix: Any = None

    def __deepcopy__(self, memo: Any) -> Any:
        found: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        found.matrix = self.matrix  # until the copied layer sets its own
        return found

    @property
    def grad(self) -> Tensor | None:
        """The gradient, of a class that takes the norm over all ranks' parts."""
        found: Tensor | None = _GRADIENT.__get__(self)
        return None if found is None else _part(found, self.matrix)

    @grad.setter
    def grad(self, found: Tensor | None) -> None:
        _GRADIENT.__set__(self, found)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__delete__(self)


_NORMS = frozenset({torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm})
# They return a part of the same gradient: of whatever is made of it otherwise, nobody knows.
_ALIKE = frozenset(
    {torch.clone, torch.detach, Tensor.clone, Tensor.detach, Tensor.double, Tensor.float, Tensor.to}
    | {_DATA.__get__}
)


class _Part(Tensor):
    """A rank's part of a gradient, whose norms are those of the whole gradient."""

    matrix: Any

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is torch._foreach_norm:
            return tuple(
                torch.linalg.vector_norm(each, *inputs[1:], **options) for each in inputs[0]
            )
        with torch._C.DisableTorchFunctionSubclass():
            if function in _NORMS:
                return cls._norm(*inputs, **options)
            found = function(*inputs, **options)
        matrix = getattr(inputs[0], "matrix", None) if function in _ALIKE and inputs else None
        return found if matrix is None else _part(found, matrix)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)  # no other process has the matrix
        return plain.__reduce_ex__(protocol)

    def _norm(self, p: Any = None, *given: Any, dtype: Any = None, **named: Any) -> Tensor:
        """Return the norm of all parts. Collective."""
        order = named.pop("ord", p)
        order = 2.0 if order in (None, "fro") else order
        if not (isinstance(order, float | int) and order > 0):
            raise ValueError(f"norm {order} of a gradient that is spread over ranks: above 0")
        if not all(each is None or each is False for each in (*given, *named.values())):
            raise ValueError("a norm of a gradient that is spread over ranks is one number of all")
        power = order if order < math.inf else 1.0
        own = torch.linalg.vector_norm(self, order, dtype=dtype) if self.numel() else 0.0
        what = f"norm {order} of the gradient of {self.matrix.identity}"
        op = "max" if order == math.inf else "sum"
        total = self.matrix.space.reduce(what, np.array([float(own) ** power]), op)[0]
        return self.new_tensor(total ** (1 / power), dtype=dtype or self.dtype).as_subclass(Tensor)


def _part(found: Tensor, matrix: Any) -> _Part:
    part = found.as_subclass(_Part)
    part.matrix = matrix
    return part


class _Linear(torch.autograd.Function):
    """The matrix products of forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, matrix: Any) -> Tensor:
        ctx.save_for_backward(weight)  # the same memory as the matrix: backward asks if it changed
        matrix.changed()  # the optimizer may have changed it
        inputs = _kept(x, matrix)
        outputs = pm.matmul(inputs, matrix, transpose_b=True, layout="rows")
        ctx.inputs, ctx.matrix = inputs, matrix
        found = torch.from_numpy(outputs.flat).view(len(x), matrix.shape[0])
        return found if bias is None else found.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, inputs, matrix = ctx.saved_tensors, ctx.inputs, ctx.matrix
        (of_outputs,) = gradients
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        given = _kept(of_outputs, matrix)
        group = matrix.space.group
        of_x = of_weight = of_bias = None
        if needs_x:
            found = pm.matmul(given, matrix, layout="rows")
            of_x = torch.from_numpy(found.flat).view(len(of_outputs), matrix.shape[1])
        if needs_weight:
            found = pm.matmul(given, inputs, transpose_a=True, layout=matrix.layout)
            of_weight = torch.from_numpy(found.flat).div_(group.size)
        if needs_bias:
            sums = of_outputs.sum(0).numpy()
            sums = matrix.space.reduce(f"gradients of biases of {matrix.identity}", sums)
            of_bias = torch.from_numpy(sums).div_(group.size)
        return of_x, of_weight, of_bias, None


def _kept(rows: Tensor, matrix: Any) -> Any:
    """Return the matrix of all ranks' rows; all of it comes to each rank where it is used twice."""
    space = matrix.space
    shape = len(rows) * space.group.size, rows.shape[1]
    found = pm.empty(space.group, shape, "rows", matrix.dtype)
    found.flat.reshape(rows.shape)[...] = rows.detach().numpy()
    if not space.group.mapped and found.size <= matrix.size:
        return found.replica("replicated")
    return found
