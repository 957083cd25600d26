"""NumPy's functions that leave matrices distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.matrix import elementwise, products
from pgasdl.matrix.array import DistributedArray, make
from pgasdl.matrix.serving import served


def whole(value: Any) -> Any:
    """Return what every rank has of an argument; lists may have matrices in them. Collective."""
    if isinstance(value, DistributedArray):
        return value.everywhere()
    return type(value)(map(whole, value)) if type(value) in (list, tuple) else value


def _filled(value: Any) -> Callable[..., Any]:
    def like(array: Any, dtype: npt.DTypeLike | None = None) -> Any:
        element = array.dtype if dtype is None else dtype
        made = make(array.ndim, array.space, array.layout, element)
        made.flat[:] = value
        return made

    return like


def _where(condition: Any, x: Any, y: Any) -> Any:
    return elementwise.apply(np.where, (condition, x, y))


def _clip(array: Any, a_min: Any = None, a_max: Any = None) -> Any:
    return elementwise.apply(np.clip, (array, a_min, a_max))


DISTRIBUTED: dict[Any, Callable[..., Any]] = {
    np.sum: lambda array, axis=None: array.sum(axis),
    np.max: lambda array, axis=None: array.max(axis),
    np.min: lambda array, axis=None: array.min(axis),
    np.mean: lambda array, axis=None: array.mean(axis),
    np.linalg.norm: lambda array: array.norm(),
    np.transpose: lambda array: array.T,
    np.dot: products.matmul,
    np.copy: lambda array: array.copy(),
    np.where: _where,
    np.clip: _clip,
    np.zeros_like: _filled(0),
    np.ones_like: _filled(1),
    np.empty_like: _filled(0),
    np.full_like: lambda array, value, dtype=None: _filled(value)(array, dtype),
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.size: lambda array, axis=None: array.size if axis is None else array.shape[axis],
}


@served
def call(function: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call one of NumPy's functions: as it is above, or with the whole, as every rank has it."""
    if function in DISTRIBUTED:
        return DISTRIBUTED[function](*inputs, **options)
    given = {name: whole(each) for name, each in options.items()}
    return function(*map(whole, inputs), **given)
