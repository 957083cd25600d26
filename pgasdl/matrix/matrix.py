"""Distributed matrices and vectors, with the manners of NumPy's arrays."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from pgasdl.errors import LayoutError
from pgasdl.matrix import elementwise, functions, index, namespace, products, reductions
from pgasdl.matrix.array import DistributedArray
from pgasdl.matrix.elements import late
from pgasdl.matrix.reader import Reader
from pgasdl.matrix.reductions import Axis
from pgasdl.matrix.serving import served


class _Operators(DistributedArray, NDArrayOperatorsMixin):
    """Arithmetic and indices, the same for matrices and vectors."""

    @served
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = method == "__call__" and (not options or options.keys() == {"out"})
        if plain and ufunc.nout == 1:
            if ufunc.signature is None:
                return elementwise.apply(ufunc, inputs, **options)
            if ufunc is np.matmul:
                return products.matmul_into(*inputs, **options)
        asked = " with ".join([ufunc.__name__, *sorted({method, *options} - {"__call__", "out"})])
        raise TypeError(f"{asked} does not work on blocks: give it numpy.asarray(a)")

    def __array_function__(
        self, function: Any, types: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        del types
        return functions.call(function, inputs, options)

    @served
    def sum(
        self, axis: Axis = None, keepdims: bool = False, dtype: npt.DTypeLike | None = None
    ) -> Any:
        """Return the sum, or the sums over an axis, as ``numpy.sum``. Collective.

        Returns
        -------
        scalar, DistributedVector, or DistributedMatrix with ``keepdims``
            The layout and the plan of the all-reduce fix the order of the additions: the same bits
            on every rank and in every run. A vector is laid out as the columns if no column is cut
            (axis 0), as the rows if no row is cut (axis 1); else every rank has it all.
        """
        return reductions.reduce(self, "sum", axis, keepdims, dtype)

    @served
    def max(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return the maximum, or the maxima over an axis; as :meth:`sum`."""
        return reductions.reduce(self, "max", axis, keepdims)

    @served
    def min(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return the minimum, or the minima over an axis; as :meth:`sum`."""
        return reductions.reduce(self, "min", axis, keepdims)

    @served
    def mean(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return the mean, or the means over an axis, as ``numpy.mean``; see :meth:`sum`."""
        return reductions.mean(self, axis, keepdims)

    @served
    def prod(
        self, axis: Axis = None, keepdims: bool = False, dtype: npt.DTypeLike | None = None
    ) -> Any:
        """Return the product, or the products over an axis; as :meth:`sum`."""
        return reductions.reduce(self, "prod", axis, keepdims, dtype)

    @served
    def any(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return whether any element is true, or any over an axis; as :meth:`sum`."""
        return reductions.reduce(self != 0, "sum", axis, keepdims) != 0

    @served
    def all(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return whether all elements are true, or all over an axis; as :meth:`sum`."""
        return reductions.reduce(self == 0, "sum", axis, keepdims) == 0

    @served
    def var(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return the variance, or the variances over an axis, as ``numpy.var``; see :meth:`sum`."""
        return reductions.variance(self, axis, ddof, keepdims)

    @served
    @late
    def std(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return the square root of :meth:`var`."""
        return np.sqrt(self.var(axis, ddof, keepdims))

    @served
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return where the first maximum is, in C order or along an axis; as :meth:`sum`."""
        return reductions.place(self, "max", axis, keepdims)

    @served
    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return where the first minimum is; as :meth:`argmax`."""
        return reductions.place(self, "min", axis, keepdims)

    @served
    def norm(self, axis: Axis = None) -> Any:
        """Return the Frobenius or Euclidean norm, or those over an axis, as ``numpy.linalg.norm``.

        Collective.
        """
        return reductions.norm(self, axis)

    @served
    def axpy(self, alpha: float, other: DistributedArray) -> Self:
        """Add ``alpha`` times another one to it, in place, and return it."""
        elementwise.apply(lambda y, x: y + x * alpha, (self, other), (self,))
        return self

    @served
    def __getitem__(self, key: Any) -> Any:
        """Return elements as NumPy has them, on every rank. Collective.

        Of numbers and slices only what is asked for moves, and the range in which steps go. Masks,
        lists of places and new dimensions are for NumPy: all of it moves.
        """
        return index.get(self, key)

    @served
    def __setitem__(self, key: Any, value: Any) -> None:
        """Set elements to a scalar, or to an array that every rank has. All ranks call it.

        Keys are those of NumPy. ``a[a < 0] = 0`` moves nothing if both lie alike.
        """
        index.put(self, key, value)

    def __array_namespace__(self, *, api_version: str | None = None) -> namespace.Namespace:
        """Return the functions of the Python array API that there are for matrices of its group."""
        return namespace.namespace_of(self, api_version)

    @property
    def device(self) -> str:
        """``"cpu"``: blocks lie in memory of the host."""
        return "cpu"

    def to_device(self, device: str | None, *, stream: None = None) -> Self:
        """Return itself, for ``"cpu"``."""
        if device not in (None, "cpu") or stream is not None:
            raise ValueError(f"device {device!r}: matrices lie in memory of the host, 'cpu'")
        return self

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any:
        """Give another library this rank's block, in place. After a write all call `changed`.

        Raises
        ------
        LayoutError
            This rank has several blocks, or none: :meth:`blocks`.
        """
        mine = [each for _, each in self.blocks()]
        if len(mine) != 1:
            raise LayoutError(
                f"this rank has {len(mine)} blocks of {self}: give blocks() one by one"
            )
        block = mine[0] if self.ndim == 2 else mine[0][:, 0]
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        given = {name: each for name, each in options.items() if each is not None}
        return block.__dlpack__(stream=stream, **given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return np.empty(0).__dlpack_device__()

    def reader(self) -> Reader:
        """Return what reads elements by one-sided reads, with no other rank. Collective.

        Raises
        ------
        PoolFullError
            Some rank's blocks lie outside the pool; all raise it.
        """
        return Reader(self)

    def __bool__(self) -> bool:
        if self.size == 1:
            return bool(np.asarray(self))
        raise ValueError("a distributed array has no truth: ask for (a == b).all() or any()")

    if not TYPE_CHECKING:  # which knows what there is

        def __getattr__(self, name: str) -> Any:
            if not hasattr(np.ndarray, name):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            if getattr(np, name, None) in functions.DISTRIBUTED:
                return partial(getattr(np, name), self)
            raise AttributeError(f"no {name} of blocks on ranks: use numpy.asarray(a).{name}")

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    __hash__ = None  # type: ignore[assignment]  # == compares elements


class DistributedMatrix(_Operators, ndim=2):
    """A matrix in blocks on ranks of a group. All of them run the same statements.

    Made by the functions of :mod:`pgasdl.matrix`. Operators, in-place forms and NumPy's ufuncs work
    element by element, whatever the operands' layouts: the first matrix says where the result lies,
    and others are moved there, once until they change. Of NumPy's functions sum, max, min, mean,
    prod, any, all, var, std, argmax, argmin, count_nonzero, dot, outer, transpose, where, clip,
    copy, concatenate, tril, triu, expand_dims, squeeze, linalg.norm and those like zeros_like leave
    it distributed; all others, and options that these lack, get the whole of it, as
    ``numpy.asarray`` has it. :meth:`__array_namespace__` has the Python array API.

    Attributes
    ----------
    layout : Layout
        Which rank has which block.
    flat : ndarray
        This rank's blocks, one after another, of one dimension.
    """

    @property
    @served
    def T(self) -> DistributedMatrix:  # noqa: N802 (NumPy's name)
        """The transposed matrix: a copy, with each block where it was. Nothing moves."""
        turned = DistributedMatrix(self.space, self.layout.T, self.dtype)
        for (_, mine), (_, other) in zip(self.blocks(), turned.blocks(), strict=True):
            other[...] = mine.T
        return turned

    @property
    def mT(self) -> DistributedMatrix:  # noqa: N802 (the array API's name)
        """As :attr:`T`."""
        return self.T

    @served
    def softmax(self) -> DistributedMatrix:
        """Return the softmax of each row, in the same layout. Collective if rows are cut."""
        found: DistributedMatrix = reductions.softmax(self)
        return found


class DistributedVector(_Operators, ndim=1):
    """A vector in blocks on ranks of a group; as :class:`DistributedMatrix`."""

    @property
    def T(self) -> DistributedVector:  # noqa: N802 (NumPy's name)
        """The vector itself, as NumPy has it."""
        return self

    @served
    def dot(self, other: Any) -> Any:
        """Return the inner product, as ``numpy.dot``. Collective."""
        return products.matmul(self, other)
