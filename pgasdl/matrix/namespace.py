"""The namespace of the Python array API, for matrices of one group: ``a.__array_namespace__()``.

It is one table of functions. What makes no sense on blocks, or moves everything, is refused by its
name: NumPy's function of ``numpy.asarray(a)`` does that.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import LayoutError
from pgasdl.matrix import elementwise, functions, making, products, solving
from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.elements import late
from pgasdl.matrix.serving import served
from pgasdl.matrix.space import Space

VERSION = "2023.12"
# Elementwise functions: NumPy's of the same name, or of the name that older ones have.
_ELEMENTWISE = """
abs acos:arccos acosh:arccosh add asin:arcsin asinh:arcsinh atan:arctan atan2:arctan2
atanh:arctanh bitwise_and bitwise_invert:invert bitwise_left_shift:left_shift bitwise_or
bitwise_right_shift:right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1
floor floor_divide greater greater_equal hypot isfinite isinf isnan less less_equal log log10
log1p log2 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative nextafter not_equal positive pow:power reciprocal remainder sign signbit sin sinh sqrt
square subtract tan tanh trunc
"""
ELEMENTWISE: dict[str, np.ufunc] = {
    name.split(":")[0]: getattr(np, name.split(":")[-1]) for name in _ELEMENTWISE.split()
}
_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "fV",  # bfloat16 is a V
    "complex floating": "c",
    "numeric": "iufcV",
}


def _isdtype(dtype: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(_isdtype(dtype, each) for each in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return as_numpy_dtype(dtype).kind in _KINDS[kind]
    return as_numpy_dtype(dtype) == as_numpy_dtype(kind)


def _dtype_of(value: Any) -> Any:
    return value.dtype if isinstance(value, DistributedArray | np.ndarray | np.generic) else value


def _vecdot(x1: Any, x2: Any, *, axis: int = -1) -> Any:
    if x1.shape[axis:][:1] != x2.shape[axis:][:1]:
        raise LayoutError(f"shapes {x1.shape} and {x2.shape} differ along axis {axis}")
    product = x1 * x2
    return product.sum(axis, dtype=product.dtype)


def _broadcast_to(x: Any, shape: Any, model: Any = None) -> Any:
    like = making.empty((x if model is None else model).space.group, shape, dtype=x.dtype)
    return elementwise.apply(lambda given: given, (x,), (like,))


def _broadcast_arrays(*arrays: Any) -> list[Any]:
    model = next(each for each in arrays if isinstance(each, DistributedArray))
    shape = np.broadcast_shapes(*(each.shape for each in arrays))
    return [_broadcast_to(each, shape, model) for each in arrays]


def _vector_norm(x: Any, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:
    size, element = abs(x), x.dtype if x.dtype.kind in "fV" else np.dtype(np.float64)
    if ord == 2:
        exact = np.square(size.astype(np.float64)).sum(axis, keepdims)
        return np.sqrt(exact).astype(element)
    if abs(ord) == math.inf:
        return (size.max if ord > 0 else size.min)(axis, keepdims).astype(element)
    if ord == 0:
        return (size != 0).sum(axis, keepdims).astype(element)
    return ((size**ord).sum(axis, keepdims) ** (1 / ord)).astype(element)


def _matrix_norm(x: Any, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    if ord != "fro":
        raise NotImplementedError(f"matrix_norm of ord {ord!r}: only 'fro' is there")
    return _vector_norm(x, axis=(0, 1), keepdims=keepdims)


def _trace(x: Any, *, offset: int = 0, dtype: Any = None) -> Any:
    at = making.eye(x.space.group, *x.shape, k=offset, layout=x.layout, dtype=np.bool_)
    return elementwise.apply(np.where, (at, x, x.dtype.type(0))).sum(dtype=dtype)


def _permute_dims(x: Any, axes: Any) -> Any:
    axes = [range(x.ndim)[each] for each in axes]
    if sorted(axes) != [*range(x.ndim)]:
        raise LayoutError(f"axes {axes} of an array of {x.ndim} dimensions")
    return x.copy() if axes == sorted(axes) else x.T


LINALG: dict[str, Callable[..., Any]] = {
    "cholesky": solving.cholesky,
    "matmul": products.matmul,
    "matrix_norm": _matrix_norm,
    "matrix_transpose": lambda x: x.mT,
    "outer": functions.DISTRIBUTED[np.outer],
    "solve": solving.solve,
    "trace": _trace,
    "vecdot": _vecdot,
    "vector_norm": _vector_norm,
}


def _full_like(
    x: Any, fill_value: Any, *, dtype: Any = None, device: str | None = None
) -> DistributedArray:
    made: DistributedArray = functions.DISTRIBUTED[np.full_like](
        x.to_device(device), fill_value, dtype
    )
    return made


def _filled(value: int) -> Callable[..., Any]:
    return lambda x, *, dtype=None, device=None: _full_like(x, value, dtype=dtype, device=device)


_OF_NUMPY = """
all any argmax argmin count_nonzero expand_dims max mean min prod squeeze std sum take tril triu var
where
"""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: functions.DISTRIBUTED[getattr(np, name)] for name in _OF_NUMPY.split()},
    **{name: LINALG[name] for name in ("matmul", "matrix_transpose", "vecdot")},
    "astype": lambda x, dtype, *, copy=True, device=None: (
        x.to_device(device).astype(dtype) if copy or x.dtype != dtype else x
    ),
    "broadcast_arrays": _broadcast_arrays,
    "broadcast_to": _broadcast_to,
    "clip": lambda x, min=None, max=None: functions.DISTRIBUTED[np.clip](x, min, max),
    "concat": functions.DISTRIBUTED[np.concatenate],
    "empty_like": _filled(0),
    "full_like": _full_like,
    "ones_like": _filled(1),
    "permute_dims": _permute_dims,
    "round": lambda x: x.copy() if x.dtype.kind in "iub" else np.rint(x),
    "zeros_like": _filled(0),
}


@served
@late
def call(group: str, name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function of the tables; served, so that workers call it, too."""
    return (LINALG if group == "linalg" else FUNCTIONS)[name](*inputs, **options)


class _Linalg:
    """The extension linalg."""

    def __getattr__(self, name: str) -> Any:
        return _function("linalg", LINALG, name)

    def __dir__(self) -> list[str]:
        return sorted(LINALG)


def _function(group: str, table: dict[str, Callable[..., Any]], name: str) -> Any:
    if name not in table:
        where = "numpy.linalg" if group == "linalg" else "numpy"
        known = hasattr(np.linalg if group == "linalg" else np, name) and not name.startswith("_")
        instead = f": use {where}.{name}(numpy.asarray(x)), on every rank" if known else ""
        raise AttributeError(f"matrices in blocks on ranks have no {name}{instead}")

    @wraps(table[name])
    def function(*inputs: Any, **options: Any) -> Any:
        given = [*inputs, *options.values()]
        given += [each for some in given if isinstance(some, list | tuple) for each in some]
        if any(isinstance(each, DistributedArray) for each in given):
            return call(group, name, inputs, options)
        # Numbers, and what every rank has, are NumPy's.
        arrays = (np.asarray(each) if isinstance(each, np.generic) else each for each in inputs)
        found = getattr(np.linalg if group == "linalg" else np, name)(*arrays, **options)
        return [*found] if isinstance(found, tuple) else found

    function.__name__ = function.__qualname__ = name
    return function


class Info:
    """What ``__array_namespace_info__()`` returns."""

    def capabilities(self) -> dict[str, Any]:
        """Return what depends on values or on the library."""
        return {"boolean indexing": True, "data-dependent shapes": False, "max dimensions": 2}

    def default_device(self) -> str:
        """Return the only device."""
        return "cpu"

    def devices(self) -> list[str]:
        """Return all devices."""
        return ["cpu"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """Return what functions make that are given no dtype."""
        real, whole = Namespace.float32, Namespace.int64
        return {"real floating": real, "integral": whole, "indexing": whole}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """Return the dtypes of a kind, by their names."""
        there = {name: getattr(Namespace, name) for name in _DTYPES}
        return {n: dtype for n, dtype in there.items() if kind is None or _isdtype(dtype, kind)}


def _how(
    usual: Any = None, *, dtype: Any = None, device: str | None = None, layout: Any = "rows"
) -> tuple[Any, Any]:
    """Return the layout and dtype of one that is made."""
    _require_cpu(device)
    return layout, usual if dtype is None else dtype


def _maker(function: Any) -> Any:
    """Name the options of :func:`_how` in the signature of a function that passes them on."""
    own, more = (inspect.signature(each).parameters for each in (function, _how))
    named = [each for name, each in (own | more).items() if name not in ("how", "usual")]
    function.__signature__ = inspect.Signature(named)
    return function


_DTYPES = ("bool", "int32", "int64", "float32", "float64")


class Namespace:
    """Functions of the Python array API that work on the blocks of a group's matrices.

    Functions that make matrices take ``layout``, too. float32 is made if no dtype is given, as
    everywhere in this package.
    """

    __name__, __array_api_version__ = "pgasdl.matrix", VERSION
    e, pi, inf, nan, newaxis = math.e, math.pi, math.inf, math.nan, None
    bool = np.dtype(np.bool_)
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    linalg = _Linalg()
    isdtype = staticmethod(_isdtype)

    def __init__(self, space: Space) -> None:
        self._group = space.group

    def __getattr__(self, name: str) -> Any:
        return ELEMENTWISE.get(name) or _function("", FUNCTIONS, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *ELEMENTWISE, *FUNCTIONS})

    def __array_namespace_info__(self) -> Info:
        """Return what is there."""
        return Info()

    def finfo(self, dtype: Any) -> Any:
        """Return the limits of floating point numbers."""
        about: Any = ml_dtypes.finfo(_dtype_of(dtype))  # type: ignore[no-untyped-call]
        names = ("eps", "max", "min", "smallest_normal")
        limits = {name: float(getattr(about, name)) for name in names}
        return SimpleNamespace(bits=about.bits, dtype=about.dtype, **limits)

    def iinfo(self, dtype: Any) -> Any:
        """Return the limits of integers."""
        return np.iinfo(_dtype_of(dtype))

    def result_type(self, *values: Any) -> np.dtype[Any]:
        """Return the dtype of a result of arrays, dtypes and numbers."""
        return np.result_type(*map(_dtype_of, values))

    def can_cast(self, given: Any, to: Any) -> Any:
        """Return whether nothing is lost, by the rules of dtypes."""
        return np.can_cast(_dtype_of(given), to)

    @_maker
    def asarray(self, values: Any, *, copy: Any = None, **how: Any) -> Any:
        """Make one of what every rank has, or return one, of another dtype if that is asked for."""
        layout, dtype = _how(**how)
        distributed = isinstance(values, DistributedArray)
        given = values if distributed else np.asarray(values)
        usual = given.dtype == np.float64 and not hasattr(values, "dtype")  # Python's numbers
        dtype = as_numpy_dtype(dtype or (np.float32 if usual else given.dtype))
        stays = distributed or given.ndim == 0
        if stays and not copy and dtype == given.dtype:
            return given
        if copy is False:
            raise ValueError("what is spread over ranks, or gets another dtype, is copied")
        return given.astype(dtype) if stays else making.array(self._group, given, layout, dtype)

    @_maker
    def full(self, shape: Any, fill_value: Any, **how: Any) -> Any:
        """Make one of equal elements; an array of NumPy if there are no dimensions."""
        kinds: dict[Any, Any] = {float: self.float32, int: self.int64}
        layout, dtype = _how(**how)
        dtype = dtype or kinds.get(type(fill_value)) or np.asarray(fill_value).dtype
        if shape == ():
            return np.full((), fill_value, as_numpy_dtype(dtype))
        return making.full(self._group, shape, fill_value, layout, dtype)

    @_maker
    def zeros(self, shape: Any, **how: Any) -> Any:
        """Make one of zeros."""
        return self.full(shape, 0.0, **how)

    @_maker
    def ones(self, shape: Any, **how: Any) -> Any:
        """Make one of ones."""
        return self.full(shape, 1.0, **how)

    @_maker
    def empty(self, shape: Any, **how: Any) -> Any:
        """Make one whose elements are not set."""
        if shape == ():
            return self.zeros(shape, **how)
        return making.empty(self._group, shape, *_how(np.float32, **how))

    @_maker
    def eye(self, n_rows: int, n_cols: int | None = None, *, k: int = 0, **how: Any) -> Any:
        """Make a matrix of ones on a diagonal, and zeros."""
        layout, dtype = _how(np.float32, **how)
        return making.eye(self._group, n_rows, n_cols, k=k, layout=layout, dtype=dtype)

    @_maker
    def arange(self, start: float, stop: Any = None, step: float = 1, **how: Any) -> Any:
        """Make a vector of numbers at equal distances, as ``numpy.arange``."""
        limits: Any = (0, start, step) if stop is None else (start, stop, step)
        layout, dtype = _how(**how)
        found = np.arange(*limits, dtype=dtype)
        usual = dtype is None and found.dtype == np.float64
        return making.array(self._group, found, layout, np.float32 if usual else dtype)

    @_maker
    def linspace(
        self, start: float, stop: float, num: int, *, endpoint: Any = True, **how: Any
    ) -> Any:
        """Make a vector of so many numbers between two, as ``numpy.linspace``."""
        layout, dtype = _how(np.float32, **how)
        found = np.linspace(start, stop, num, endpoint, dtype=dtype)
        return making.array(self._group, found, layout, dtype)


def _require_cpu(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise ValueError(f"device {device!r}: matrices lie in memory of the host, 'cpu'")


def namespace_of(array: DistributedArray, api_version: str | None = None) -> Namespace:
    """Return the namespace of an array's group, always the same."""
    if api_version not in (None, "2021.12", "2022.12", VERSION):
        raise ValueError(f"version {api_version!r} of the array API: this is {VERSION}")
    space = array.space
    found: Namespace = space.namespace or Namespace(space)
    space.namespace = found
    return found
