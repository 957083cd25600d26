"""Functions that make distributed matrices and vectors."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import BufferRefusedError, LayoutError, RankError
from pgasdl.group import Group
from pgasdl.matrix.array import make
from pgasdl.matrix.elements import Array, core_dtype
from pgasdl.matrix.layout import Layout, replicated
from pgasdl.matrix.serving import Local, is_master, served
from pgasdl.matrix.space import space_of

if TYPE_CHECKING:
    from pgasdl.context import Context

_Shape = int | tuple[int, ...]
# Random numbers are drawn in tiles of so many rows and columns, of matrices and of vectors.
_TILES = {2: (64, 64), 1: (4096, 1)}


@served
def empty(
    where: Context | Group,
    shape: _Shape,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make a matrix or vector whose elements are not set. Collective in a group's first use.

    Parameters
    ----------
    where : Context or Group
        The ranks: all, or those of a group. Layouts name them by their places in it.
    shape : int or tuple[int, ...]
        Rows and columns; or the elements of a vector.
    layout : Layout or str, default "rows"
        Which rank has which block; or "rows", "columns", "grid", "cyclic", "replicated", over all
        ranks of the group.
    dtype : dtype, default np.float32
        float32, float64, int32, int64, bool; float16 and bfloat16, which are computed in float32.

    Returns
    -------
    DistributedMatrix or DistributedVector

    Raises
    ------
    LayoutError
        The layout does not fit.
    BufferRefusedError
        Another dtype.
    """
    whole = _two(shape)
    space = space_of(where)
    return make(np.size(shape), space, space.layout(whole, layout), dtype)


@served
def full(
    where: Context | Group,
    shape: _Shape,
    value: Any,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make one of equal elements, or of an array that is spread over it, as ``numpy.full``.

    Parameters as for :func:`empty`.
    """
    made = empty(where, shape, layout, dtype)
    made[...] = value
    return made


@served
def zeros(
    where: Context | Group,
    shape: _Shape,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make one of zeros; parameters as for :func:`empty`."""
    return full(where, shape, 0, layout, dtype)


@served
def fromfunction(
    where: Context | Group,
    function: Callable[..., Any],
    shape: _Shape,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make one whose elements a function of their indices gives, as ``numpy.fromfunction``.

    ``function`` takes arrays of rows and of columns, or of the places in a vector: integers, where
    NumPy's have the dtype float. Other parameters as for :func:`empty`.
    """
    made = empty(where, shape, layout, dtype)
    for block, mine in made.blocks():
        at = np.ogrid[block.where] if made.ndim == 2 else [np.ogrid[block.where[0]]]
        mine[...] = np.reshape(function(*at), (-1, 1)) if made.ndim == 1 else function(*at)
    return made


@served
def eye(
    where: Context | Group,
    n_rows: int,
    n_columns: int | None = None,
    *,
    k: int = 0,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make a matrix of ones on its ``k``-th diagonal and zeros elsewhere, as ``numpy.eye``.

    Other parameters as for :func:`empty`.
    """
    shape = n_rows, n_rows if n_columns is None else n_columns
    made = empty(where, shape, layout, dtype)
    for block, mine in made.blocks():
        row, column = np.ogrid[block.where]
        mine[...] = column - row == k
    return made


def array(
    where: Context | Group,
    values: npt.ArrayLike | None,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike | None = None,
    *,
    root: int | None = None,
) -> Any:
    """Make one of an array of NumPy. Collective if one rank has it.

    Parameters
    ----------
    values : array_like, optional
        Of one or two dimensions, equal on all ranks, of which each takes its blocks.
    dtype : dtype, optional
        None: that of the array.
    root : int, optional
        The only rank that has it, by its place in the group; others pass anything. None: all have.
    where, layout
        As for :func:`empty`.
    """
    if is_master(where) and root is None:
        root = 0
    if root is None:
        given = _array(values, dtype)
        made = empty(where, given.shape, layout, given.dtype)
        for block, mine in made.blocks():
            mine[...] = _column(given)[block.where]
        return made
    return _from_root(where, Local(values), layout, dtype, root)


@served
def _from_root(
    where: Context | Group,
    values: Local,
    layout: Layout | str,
    dtype: npt.DTypeLike | None,
    root: int,
) -> Any:
    space = space_of(where)
    if not 0 <= root < space.group.size:
        raise RankError(f"root {root}: the group has {space.group.size} ranks")
    given, about = np.empty(0), b""
    if space.rank == root:
        try:
            given = _array(values.value, dtype)
            _two(given.shape)  # may raise, as the next may
            core_dtype(given.dtype)
            about = json.dumps([given.shape, given.dtype.name]).encode()
        except Exception as error:  # all are told
            about = json.dumps([None, str(error)]).encode()
    shape, name = json.loads(space.group.allgather("matrix.array", about)[root])
    if shape is None:
        raise BufferRefusedError(f"rank {root} has no array: {name}")
    found = replicated(_two(tuple(shape)), [root])
    flat = np.ascontiguousarray(given).reshape(-1) if space.rank == root else None
    whole = make(len(shape), space, found, name, flat)
    return whole.remap(layout)


@served
def random(
    where: Context | Group,
    shape: _Shape,
    seed: int,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make one of random numbers, 0 <= x < 1; see :func:`standard_normal`."""
    element = _drawn_dtype(dtype)
    bits = 1 + ml_dtypes.finfo(element).nmant  # type: ignore[no-untyped-call]

    def draw(dice: np.random.Generator, n: int) -> Array:
        return np.floor(np.ldexp(dice.random(n), bits)) * 2.0**-bits  # none is rounded up to 1

    return _drawn(where, shape, seed, layout, element, draw)


@served
def standard_normal(
    where: Context | Group,
    shape: _Shape,
    seed: int,
    layout: Layout | str = "rows",
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Make one of normally distributed random numbers, of mean 0 and variance 1.

    Parameters
    ----------
    seed : int
        0 <= seed. The elements depend on it and on their places alone: not on the layout, the
        number of ranks or the shape; a vector's are not those of a matrix of one column.
    where, shape, layout, dtype
        As for :func:`empty`.

    Notes
    -----
    dMath: runs are reproduced by the seeds that its master hands out; here by one seed and a
    generator that counts (Philox).
    """
    element = _drawn_dtype(dtype)
    return _drawn(where, shape, seed, layout, element, lambda dice, n: dice.standard_normal(n))


def _drawn(
    where: Context | Group,
    shape: _Shape,
    seed: int,
    layout: Layout | str,
    dtype: np.dtype[Any],
    draw: Callable[[np.random.Generator, int], Array],
) -> Any:
    made = empty(where, shape, layout, dtype)
    height, width = _TILES[made.ndim]
    for block, mine in made.blocks():
        bottom, right = block.row + block.rows, block.column + block.columns
        for row in range(block.row // height, -(-bottom // height)):
            for column in range(block.column // width, -(-right // width)):
                dice = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, row, column]))
                tile = draw(dice, height * width).reshape(height, width)
                top, left = max(block.row, row * height), max(block.column, column * width)
                part = tile[
                    top - row * height : bottom - row * height,
                    left - column * width : right - column * width,
                ]
                into = mine[top - block.row :, left - block.column :]
                into[: part.shape[0], : part.shape[1]] = part
    return made


def _two(shape: _Shape) -> tuple[int, int]:
    """Return the shape of a layout."""
    try:
        given: Any = shape if np.ndim(shape) else (shape,)
        sizes = tuple(map(operator.index, given))
    except TypeError:
        raise LayoutError(f"shape {shape!r}: whole numbers, one or two") from None
    if len(sizes) not in (1, 2):
        raise LayoutError(f"shape {shape}: matrices have two dimensions, vectors one")
    return sizes[0], sizes[1] if len(sizes) == 2 else 1


def _drawn_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    element = as_numpy_dtype(dtype)
    if core_dtype(element) == "bytes" or element.kind in "iu":
        raise BufferRefusedError(f"random numbers are no {element}")
    return element


def _array(values: npt.ArrayLike | None, dtype: npt.DTypeLike | None) -> Array:
    return np.asarray(values, None if dtype is None else as_numpy_dtype(dtype))


def _column(given: Array) -> Array:
    return given if given.ndim == 2 else given.reshape(-1, 1)
