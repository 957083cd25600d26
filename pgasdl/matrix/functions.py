"""NumPy's functions that leave matrices distributed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.errors import LayoutError
from pgasdl.matrix import elementwise, products
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.making import array as array_of
from pgasdl.matrix.serving import served


def whole(value: Any) -> Any:
    """Return what every rank has of an argument; lists may have matrices in them. Collective."""
    if isinstance(value, DistributedArray):
        found = np.asarray(value)
        found.flags.writeable = False  # what is written there would be lost
        return found
    return type(value)(map(whole, value)) if type(value) in (list, tuple) else value


def _filled(value: Any) -> Callable[..., Any]:
    def like(array: Any, dtype: npt.DTypeLike | None = None) -> Any:
        element = array.dtype if dtype is None else dtype
        made = make(array.ndim, array.space, array.layout, element)
        made[...] = value
        return made

    return like


def _where(condition: Any, x: Any, y: Any) -> Any:
    return elementwise.apply(np.where, (condition, x, y))


def _clip(array: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **named: Any) -> Any:
    limits = named.pop("min", a_min), named.pop("max", a_max)
    return elementwise.apply(np.clip, (array, *limits), None if out is None else (out,), **named)


def _concatenate(arrays: Any, axis: int | None = 0) -> Any:
    """Put arrays beside each other: each block stays where it is."""
    model = next(each for each in arrays if isinstance(each, DistributedArray))
    group = model.space.group
    if axis is None:
        return array_of(group, np.concatenate([*map(whole, arrays)], axis=None))
    parts = [
        each if isinstance(each, DistributedArray) else array_of(group, each, "replicated")
        for each in arrays
    ]
    require_same_space(*parts)
    ndim, at = model.ndim, operator.index(axis)
    rest = [(*each.shape[: at % ndim], *each.shape[at % ndim + 1 :]) for each in parts]
    if {each.ndim for each in parts} != {ndim} or not -ndim <= at < ndim or len({*rest}) > 1:
        shapes = ", ".join(str(each.shape) for each in parts)
        raise LayoutError(f"shapes {shapes} do not fit beside each other along axis {axis}")
    blocks, length = [], 0
    for each in parts:
        down, right = (0, length) if at % ndim else (length, 0)
        blocks += [
            Block(b.rank, b.row + down, b.column + right, b.rows, b.columns)
            for b in each.layout.blocks
        ]
        length += each.shape[at]
    shape = list(model.layout.shape)
    shape[at % ndim] = length
    element = np.result_type(*(each.dtype for each in parts))
    found = make(ndim, model.space, Layout((shape[0], shape[1]), blocks), element)
    if found.flat.size:
        np.concatenate([each.flat for each in parts], out=found.flat, casting="unsafe")
    return found


def _take(array: Any, indices: Any, axis: int | None = None) -> Any:
    """Take some rows, columns or elements, of which every rank knows the places; all moves."""
    found = np.take(whole(array), whole(indices), axis)
    return array_of(array.space.group, found) if np.ndim(found) in (1, 2) else found


def _expand_dims(array: Any, axis: Any) -> Any:
    """Make a row or a column of a vector: each block stays where it is."""
    at = operator.index(axis)
    if array.ndim != 1 or not -2 <= at < 2:
        raise LayoutError(f"axis {axis} beside {array.ndim} dimensions: matrices have two at most")
    layout = array.layout if at % 2 else array.layout.T
    return make(2, array.space, layout, array.dtype, array.flat.copy())


def _squeeze(array: Any, axis: Any = None) -> Any:
    """Leave out dimensions of one row or column."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if axis is None:
        axes = tuple(n for n, length in enumerate(array.shape) if length == 1)
    if any(not -array.ndim <= each < array.ndim or array.shape[each] != 1 for each in axes):
        raise LayoutError(f"axis {axis} of shape {array.shape} has not one row or column")
    axes = tuple({each % array.ndim for each in axes})
    if len(axes) == array.ndim:
        return np.asarray(array).reshape(())[()]
    if not axes:
        return array.copy()
    layout = array.layout if axes[0] else array.layout.T
    return make(1, array.space, layout, array.dtype, array.flat.copy())


def _triangle(above: bool) -> Callable[..., Any]:
    def part(m: Any, k: int = 0) -> Any:
        if m.ndim != 2:
            raise LayoutError("a vector has no triangle")
        found = m.copy()
        for block, mine in found.blocks():
            row, column = np.ogrid[block.where]
            mine[column - row < k if above else column - row > k] = 0
        return found

    return part


def _outer(a: Any, b: Any) -> Any:
    if np.ndim(a) > 1 or np.ndim(b) > 1:
        raise LayoutError("an outer product is of vectors")
    group = (a if isinstance(a, DistributedArray) else b).space.group
    if not isinstance(a, DistributedArray):
        a = array_of(group, np.ravel(a))
    return _expand_dims(a, 1) * (b if isinstance(b, DistributedArray) else np.ravel(b))


DISTRIBUTED: dict[Any, Callable[..., Any]] = {
    np.sum: lambda a, axis=None, dtype=None, *, keepdims=False: a.sum(axis, keepdims, dtype),
    np.max: lambda a, axis=None, *, keepdims=False: a.max(axis, keepdims),
    np.min: lambda a, axis=None, *, keepdims=False: a.min(axis, keepdims),
    np.mean: lambda a, axis=None, *, keepdims=False: a.mean(axis, keepdims),
    np.prod: lambda a, axis=None, dtype=None, *, keepdims=False: a.prod(axis, keepdims, dtype),
    np.any: lambda a, axis=None, *, keepdims=False: a.any(axis, keepdims),
    np.all: lambda a, axis=None, *, keepdims=False: a.all(axis, keepdims),
    np.var: lambda a, axis=None, *, ddof=0, correction=0, keepdims=False: a.var(
        axis, ddof or correction, keepdims
    ),
    np.std: lambda a, axis=None, *, ddof=0, correction=0, keepdims=False: a.std(
        axis, ddof or correction, keepdims
    ),
    np.count_nonzero: lambda a, axis=None, *, keepdims=False: (a != 0).sum(axis, keepdims),
    np.argmax: lambda a, axis=None, *, keepdims=False: a.argmax(axis, keepdims),
    np.argmin: lambda a, axis=None, *, keepdims=False: a.argmin(axis, keepdims),
    np.linalg.norm: lambda x, *, axis=None: x.norm(axis),
    np.transpose: lambda array: array.T,
    np.dot: products.matmul,
    np.copy: lambda array: array.copy(),
    np.where: _where,
    np.concatenate: _concatenate,
    np.take: _take,
    np.expand_dims: _expand_dims,
    np.squeeze: _squeeze,
    np.tril: _triangle(False),
    np.triu: _triangle(True),
    np.outer: _outer,
    np.clip: _clip,
    np.zeros_like: _filled(0),
    np.ones_like: _filled(1),
    np.empty_like: _filled(0),
    np.full_like: lambda array, value, dtype=None: _filled(value)(array, dtype),
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.size: lambda array, axis=None: array.size if axis is None else array.shape[axis],
}


@cache
def _takes(function: Any, n_inputs: int, options: tuple[str, ...]) -> bool:
    """Whether what is distributed has these options of NumPy's."""
    try:
        inspect.signature(DISTRIBUTED[function]).bind(*range(n_inputs), **dict.fromkeys(options))
    except TypeError:
        return False
    return True


@served
def call(function: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call one of NumPy's functions: as it is above, or with the whole, as every rank has it."""
    if function in DISTRIBUTED and _takes(function, len(inputs), tuple(options)):
        return DISTRIBUTED[function](*inputs, **options)
    given = {name: whole(each) for name, each in options.items()}
    return function(*map(whole, inputs), **given)
