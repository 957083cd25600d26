"""Elementwise operations: NumPy's ufuncs, block by block, whatever the operands' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pgasdl.errors import BufferRefused, LayoutError
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.elements import Array, as_computed
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.reductions import reduce

Shape = tuple[int, ...]
Function = Callable[..., Any]
_PART = 1 << 17  # elements


def apply(function: Function, inputs: Sequence[Any], out: tuple[Any, ...] | None = None) -> Any:
    """Return what a function makes of its operands, element by element, in the result's layout.

    The result has the layout of ``out``, or of the first operand of its shape. Others are moved
    there, and kept as replicas, or everywhere if they are spread over the result as NumPy does it.
    Arrays of NumPy, and lists, are those that every rank has.

    Raises
    ------
    LayoutError
        Shapes that do not fit, operands of different groups, or ``out`` is a replica.
    BufferRefused
        The result is of another kind than ``out``: floating point numbers into integers.
    """
    inputs = [*map(_array, inputs)]
    result = out[0] if out else None
    arrays = [each for each in (*inputs, *(out or ())) if isinstance(each, DistributedArray)]
    if result is not None and not isinstance(result, DistributedArray):
        raise TypeError(f"out of type {type(result).__name__}: out has to be a matrix, too")
    require_same_space(*arrays)
    model = result if result is not None else max(arrays, key=_extent)
    shape = model.shape
    for each in inputs:
        shape = _spread(getattr(each, "shape", ()), shape, shape if result is not None else None)
    element = _dtype_of(function, inputs)
    if result is not None:
        result.require_original()
        if not np.can_cast(element, result.dtype, "same_kind"):
            raise BufferRefused(
                f"a result of {element} into {result.dtype}, which is of another kind"
            )
    if function is np.power and element.kind == "i":
        _require_powers(inputs[1], shape)
    layout = model.layout if shape == model.shape else _widened(model, shape)
    operands = [_aligned(each, shape, layout) for each in inputs]
    if result is None:
        result = make(len(shape), model.space, layout, element)
    try:
        for target, parts in _parts(result, operands):
            _compute(function, target, parts)
    finally:
        if out:  # also where it failed halfway: ranks stay in step
            result.changed()
    return result


def _array(operand: Any) -> Any:
    scalar = isinstance(operand, DistributedArray) or np.ndim(operand) == 0
    return operand if scalar else np.asarray(operand)


def _extent(array: DistributedArray) -> tuple[int, int]:
    return array.ndim, array.size


def _compute(function: Function, target: Array, operands: Sequence[Any]) -> None:
    """Fill an array: in place, or in parts whose temporary arrays the caches hold."""
    exact = all(as_computed(each) is each for each in (target, *filter(_is_array, operands)))
    if isinstance(function, np.ufunc) and exact:
        function(*operands, out=target)
        return
    height = max(1, _PART * len(target) // max(1, target.size))
    for at in range(0, len(target), height):
        rows = slice(at, at + height)
        parts = (
            as_computed(each[rows], target.dtype) if _is_array(each) else each for each in operands
        )
        target[rows] = function(*parts)


def _is_array(operand: Any) -> bool:
    return isinstance(operand, np.ndarray) and operand.ndim > 0


def _dtype_of(function: Function, inputs: Sequence[Any]) -> np.dtype[Any]:
    """Return the dtype that NumPy gives the result."""
    n = int(any(each is None for each in inputs))  # with an element all ranks refuse it

    def few(each: Any) -> Any:
        known = isinstance(each, DistributedArray | np.ndarray)
        return np.zeros(n, each.dtype) if known and each.ndim else each

    found: Array = function(*map(few, inputs))
    return found.dtype


def _spread(shape: Shape, over: Shape, only: Shape | None) -> Shape:
    """Return the shape of two that are spread over each other, as NumPy does it."""
    if shape in ((), over):
        return over
    try:
        found = np.broadcast_shapes(shape, over)
    except ValueError:
        found = None
    if found is None or len(found) > 2 or only not in (None, found):
        raise LayoutError(f"an operand of shape {shape} does not fit {over}")
    return found


def _widened(array: DistributedArray, shape: Shape) -> Layout:
    """Return the layout of a larger result: each block is spread as the array is."""
    layout = array.layout if array.ndim == 2 else array.layout.T
    height, width = (1, *shape)[-2:]

    def spread(block: Block) -> Block:
        down, right = (block.row, block.rows), (block.column, block.columns)
        down = (0, height) if layout.shape[0] == 1 else down
        right = (0, width) if layout.shape[1] == 1 else right
        return Block(block.rank, down[0], right[0], down[1], right[1])

    wide = Layout((height, width), map(spread, layout.blocks), layout.name)
    return wide if len(shape) == 2 else wide.T


def _require_powers(exponents: Any, shape: Shape) -> None:
    """Raise ValueError on all ranks where NumPy would on those that have negative exponents."""
    if isinstance(exponents, DistributedArray):
        least = reduce(exponents, "min", None) if exponents.size else 0
    else:
        least = np.min(exponents, initial=0)
    if least < 0 and 0 not in shape:
        raise ValueError("Integers to negative integer powers are not allowed.")


def _parts(result: DistributedArray, operands: Sequence[Any]) -> Iterator[tuple[Array, list[Any]]]:
    """Yield parts of this rank's result, and the operands' elements for each."""
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


def _aligned(operand: Any, shape: Shape, layout: Layout) -> Any:
    """Return an operand as blocks like those of the result, or as what every rank has."""
    if not isinstance(operand, DistributedArray):
        return operand
    return operand.replica(layout) if operand.shape == shape else operand.everywhere()


def _window(operand: Any, block: Block, result: DistributedArray) -> Any:
    """Return what belongs to a block, of a scalar or an array that every rank has."""
    if np.ndim(operand) == 0:
        return operand
    if result.ndim == 1:
        return np.broadcast_to(operand, result.shape)[block.where[0], None]
    return np.broadcast_to(operand, result.shape)[block.where]
