"""Elementwise operations: NumPy's ufuncs, block by block, whatever the operands' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pgasdl.errors import BufferRefusedError, LayoutError
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.elements import STORED, Array, as_computed, core_dtype
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.reductions import reduce

Shape = tuple[int, ...]
Function = Callable[..., Any]
_PART = 1 << 17  # elements
_OF_BITS = (np.nextafter, np.spacing)  # of float32 they are something else


def apply(function: Function, inputs: Sequence[Any], out: tuple[Any, ...] | None = None) -> Any:
    """Return what a function makes of its operands, element by element, in the result's layout.

    The result has the layout of ``out``, or of the first operand of its shape. Others are moved
    there, and kept as replicas, or everywhere if they are spread over the result as NumPy does it.
    Arrays of NumPy, and lists, are those that every rank has.

    Raises
    ------
    LayoutError
        Shapes that do not fit, operands of different groups, or ``out`` is a replica.
    BufferRefusedError
        The result is of another kind than ``out``: floating point numbers into integers.
    """
    found = _at_once(function, inputs, out)
    if found is not None:
        return found
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
        require_room(result, element)
    if function is np.power and element.kind == "i":
        _require_powers(inputs[1], shape)
    layout = model.layout if shape == model.shape else _widened(model, shape)
    operands = [_aligned(each, shape, layout) for each in _weak(function, inputs, element)]
    if result is None:
        result = make(len(shape), model.space, layout, element)
    try:
        for target, parts in _parts(result, operands):
            _compute(function, target, parts)
    finally:
        if out:  # also where it failed halfway: ranks stay in step
            result.changed()
    return result


def _at_once(function: Function, inputs: Sequence[Any], out: tuple[Any, ...] | None) -> Any:
    """Do what :func:`apply` does in one call of NumPy, where nothing moves; None: it cannot be."""
    if not isinstance(function, np.ufunc) and function is not np.clip:
        return None
    model: DistributedArray | None = None
    flats, kinds = [], []
    for each in (*inputs, *out) if out else inputs:
        kind: Any = type(each)
        if isinstance(each, DistributedArray):
            if model is None:
                model = each
            elif not each.lies_as(model):
                return None
            each = each.flat  # noqa: PLW2901
            kind = each.dtype
        elif not (kind is float or each is None or _is_number(each)):
            return None
        flats.append(each)
        kinds.append(kind)
    element = _known_dtype(function, len(inputs), *kinds)
    if element is None or model is None:
        return None
    if not out:
        result = model.like(element)
        function(*flats, out=result.flat)
        return result
    out[0].require_original()
    try:
        function(*flats[:-1], out=flats[-1])
    finally:  # also where it failed halfway: ranks stay in step
        out[0].changed()
    return out[0]


def _is_number(operand: Any) -> bool:
    """Whether it is a number that changes no dtype by being large."""
    small = type(operand) is int and abs(operand) < 1 << 31
    return small or isinstance(operand, np.floating)


@lru_cache(1024)
def _known_dtype(function: Function, n_inputs: int, *kinds: Any) -> np.dtype[Any] | None:
    """Return the dtype of the result of arrays of some dtypes, and of numbers; perhaps of out.

    None: it is not computed in the dtypes that they have, or there is more to ask than these.
    """
    given = kinds[:n_inputs]
    if any(each in STORED for each in kinds) or (type(None) in given and function is not np.clip):
        return None
    empty: Any = (each() if isinstance(each, type) else np.empty(0, each) for each in given)
    found: np.dtype[Any] = function(*empty).dtype
    core_dtype(found)
    asked = function is np.power and found.kind == "i"
    room = all(np.can_cast(found, each, "same_kind") for each in kinds[n_inputs:])
    return found if room and not asked else None


def require_room(out: DistributedArray, element: np.dtype[Any]) -> None:
    """Raise an error unless a result of a dtype can be put into a matrix."""
    out.require_original()
    if not np.can_cast(element, out.dtype, "same_kind"):
        raise BufferRefusedError(
            f"a result of {element} into {out.dtype}, which is of another kind"
        )


def _array(operand: Any) -> Any:
    scalar = isinstance(operand, DistributedArray) or np.ndim(operand) == 0
    return operand if scalar else np.asarray(operand)


def _extent(array: DistributedArray) -> tuple[int, int]:
    return array.ndim, array.size


def _compute(function: Function, target: Array, operands: Sequence[Any]) -> None:
    """Fill an array: in place, or in parts whose temporary arrays the caches hold."""
    exact = all(as_computed(each) is each for each in (target, *filter(_is_array, operands)))
    exact = exact or function in _OF_BITS
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


def _weak(function: Function, inputs: Sequence[Any], element: np.dtype[Any]) -> Sequence[Any]:
    """Return operands with Python's numbers in 16 bits, where NumPy has them so."""
    kinds = [type(x) if type(x) in (int, float) else getattr(x, "dtype", type(x)) for x in inputs]
    if not {int, float} & {*kinds} or not {*STORED} & {*kinds}:
        return inputs
    taken: Any = [element] * len(inputs)
    if isinstance(function, np.ufunc):
        taken = function.resolve_dtypes((*kinds, None))
    return [
        dtype.type(each) if kind in (int, float) and dtype in STORED else each
        for each, kind, dtype in zip(inputs, kinds, taken, strict=False)
    ]


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
    local = [
        [mine for _, mine in e.blocks()] if isinstance(e, DistributedArray) else e for e in operands
    ]
    for number, (block, target) in enumerate(result.blocks()):
        mine = (e[number] if isinstance(e, list) else _window(e, block, result) for e in local)
        yield target, [*mine]


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
