"""Elementwise operations: NumPy's ufuncs, block by block, whatever the operands' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pgasdl.errors import BufferRefused, LayoutError
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.elements import Array, as_computed
from pgasdl.matrix.layout import Block

Function = Callable[..., Any]


def apply(function: Function, inputs: Sequence[Any], out: tuple[Any, ...] | None = None) -> Any:
    """Return what a function makes of its operands, element by element, in the result's layout.

    The result has the layout of ``out``, or of the first operand of its shape. Others are moved
    there, and kept as replicas. A vector stands for a row, as in NumPy; arrays of NumPy are those
    that every rank has.

    Raises
    ------
    LayoutError
        Shapes that do not fit, operands of different groups, or ``out`` is a replica.
    BufferRefused
        The result is of another kind than ``out``: floating point numbers into integers.
    """
    result = out[0] if out else None
    arrays = [each for each in (*inputs, *(out or ())) if isinstance(each, DistributedArray)]
    if result is not None and not isinstance(result, DistributedArray):
        return NotImplemented
    require_same_space(*arrays)
    model = result if result is not None else max(arrays, key=lambda each: each.ndim)
    for each in inputs:
        _require_fit(each, model)
    if result is None:
        result = make(model.ndim, model.space, model.layout, _dtype_of(function, inputs))
    else:
        result.require_original()
        found = _dtype_of(function, inputs)
        if not np.can_cast(found, result.dtype, "same_kind"):
            raise BufferRefused(
                f"a result of {found} into {result.dtype}, which is of another kind"
            )
    for target, operands in _parts(result, inputs):
        target[...] = function(*map(_as_computed, operands))
    if out:
        result.changed()
    return result


def _as_computed(operand: Any) -> Any:
    return as_computed(operand) if isinstance(operand, np.ndarray) else operand


def _dtype_of(function: Function, inputs: Sequence[Any]) -> np.dtype[Any]:
    """Return the dtype that NumPy gives the result."""

    def empty(each: Any) -> Any:
        known = isinstance(each, DistributedArray | np.ndarray)
        return np.empty(0, each.dtype) if known and each.ndim else each

    found: Array = function(*map(empty, inputs))
    return found.dtype


def _require_fit(operand: Any, model: DistributedArray) -> None:
    shape = np.shape(operand) if not isinstance(operand, DistributedArray) else operand.shape
    distributed = isinstance(operand, DistributedArray)
    fits = shape in (model.shape, model.shape[1:]) if distributed else _spreads(shape, model.shape)
    if not fits:
        raise LayoutError(f"an operand of shape {shape} does not fit {model.shape}")


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, over) == over
    except ValueError:
        return False


def _parts(result: DistributedArray, inputs: Sequence[Any]) -> Iterator[tuple[Array, list[Any]]]:
    """Yield parts of this rank's result, and the operands' elements for each."""
    operands = [_aligned(each, result) for each in inputs]
    alike = all(isinstance(each, DistributedArray) or np.ndim(each) == 0 for each in operands)
    if alike:
        yield (
            result.flat,
            [each.flat if isinstance(each, DistributedArray) else each for each in operands],
        )
        return
    local = [
        [mine for _, mine in each.blocks()] if isinstance(each, DistributedArray) else each
        for each in operands
    ]
    for number, (block, target) in enumerate(result.blocks()):
        yield (
            target,
            [
                each[number] if isinstance(each, list) else _window(each, block, result)
                for each in local
            ],
        )


def _aligned(operand: Any, result: DistributedArray) -> Any:
    """Return an operand as blocks like those of the result, or as what every rank has."""
    if not isinstance(operand, DistributedArray):
        return operand
    return operand.replica(result.layout) if operand.ndim == result.ndim else operand.everywhere()


def _window(operand: Any, block: Block, result: DistributedArray) -> Any:
    """Return what belongs to a block, of a scalar or an array that every rank has."""
    if np.ndim(operand) == 0:
        return operand
    if result.ndim == 1:
        return np.broadcast_to(operand, result.shape)[block.where[0], None]
    return np.broadcast_to(operand, result.shape)[block.where]
