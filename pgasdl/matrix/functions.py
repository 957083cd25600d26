"""NumPy's functions that leave matrices distributed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.matrix import elementwise, products
from pgasdl.matrix.array import DistributedArray, make
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


DISTRIBUTED: dict[Any, Callable[..., Any]] = {
    np.sum: lambda a, axis=None, *, keepdims=False: a.sum(axis, keepdims),
    np.max: lambda a, axis=None, *, keepdims=False: a.max(axis, keepdims),
    np.min: lambda a, axis=None, *, keepdims=False: a.min(axis, keepdims),
    np.mean: lambda a, axis=None, *, keepdims=False: a.mean(axis, keepdims),
    np.prod: lambda a, axis=None, *, keepdims=False: a.prod(axis, keepdims),
    np.any: lambda a, axis=None, *, keepdims=False: a.any(axis, keepdims),
    np.all: lambda a, axis=None, *, keepdims=False: a.all(axis, keepdims),
    np.var: lambda a, axis=None, *, ddof=0, keepdims=False: a.var(axis, ddof, keepdims),
    np.std: lambda a, axis=None, *, ddof=0, keepdims=False: a.std(axis, ddof, keepdims),
    np.argmax: lambda a, axis=None, *, keepdims=False: a.argmax(axis, keepdims),
    np.argmin: lambda a, axis=None, *, keepdims=False: a.argmin(axis, keepdims),
    np.linalg.norm: lambda x, *, axis=None: x.norm(axis),
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
