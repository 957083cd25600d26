"""Products of matrices and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pgasdl.buffers import as_numpy_dtype
from pgasdl.errors import LayoutError
from pgasdl.matrix.array import DistributedArray, make, require_same_space
from pgasdl.matrix.choice import STATIONARY, single
from pgasdl.matrix.elements import STORED, Array, as_computed, late
from pgasdl.matrix.elementwise import require_room
from pgasdl.matrix.index import put
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.multiply import multiply
from pgasdl.matrix.operand import Operand
from pgasdl.matrix.reductions import combined, over_axis
from pgasdl.matrix.serving import served
from pgasdl.matrix.space import Space


@served
@late
def matmul(
    left: Any,
    right: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    layout: Layout | str | None = None,
    stationary: str | None = None,
    wire: npt.DTypeLike | None = None,
) -> Any:
    """Return a product of matrices and vectors, as ``numpy.matmul`` and operator ``@``. Collective.

    Operands may lie in any layouts; an array of NumPy is one that every rank has. A product of two
    matrices is computed where the least is to be moved, and lies there. Where ranks map each
    other's memory, and the matrices lie in the pool (:meth:`Context.pool`), BLAS reads peers'
    blocks in place; elsewhere they are read panel by panel while the one before is multiplied.

    Parameters
    ----------
    transpose_a, transpose_b : bool, default False
        Take a matrix for its transpose, which is not copied.
    layout : Layout or str, optional
        Of the matrix that is returned; None: where it is computed.
    stationary : str, optional
        What stays where it is: "result", "a" or "b"; None: what is predicted to be fastest.
    wire : dtype, optional
        A narrower one, such as ``bfloat16``, to which operands are rounded that ranks need of each
        other; None: none is. Sums are as wide as without it.

    Returns
    -------
    DistributedMatrix, DistributedVector or scalar

    Raises
    ------
    LayoutError
        Shapes or a ``wire`` that do not fit, operands of different groups, or a stationary operand
        of which some rank has several blocks, or a block that others have, too.
    MismatchError
        Ranks multiply different matrices.
    PeerLostError, PgasTimeoutError

    Notes
    -----
    dMath: cyclic GEMM. float16 and bfloat16 are multiplied in float32. The layouts fix the order
    of the additions: the same bits in every run.
    """
    left, right = map(_operand, (left, right))
    require_same_space(*(each for each in (left, right) if isinstance(each, DistributedArray)))
    shapes = left.shape, right.shape
    if len(shapes[0]) == len(shapes[1]) == 2:
        return _matrices(left, right, (transpose_a, transpose_b), layout, stationary, wire)
    if transpose_a or transpose_b or any(x is not None for x in (layout, stationary, wire)):
        raise LayoutError("a vector is not transposed, and its product has a layout of its own")
    if not {left.ndim, right.ndim} <= {1, 2} or shapes[0][-1] != shapes[1][0]:
        raise LayoutError(f"a product of shapes {shapes[0]} and {shapes[1]}")
    result = np.result_type(left.dtype, right.dtype)
    if left.ndim == right.ndim:
        return _inner(left, right, result)
    matrix, vector, axis = (left, right, 1) if left.ndim == 2 else (right, left, 0)
    whole = vector.everywhere() if isinstance(vector, DistributedArray) else vector
    if not isinstance(matrix, DistributedArray):
        return (np.matmul(left, whole) if axis else np.matmul(whole, right)).astype(result)
    whole = as_computed(whole)

    def part(block: Block, mine: Array) -> Array:
        down, right = block.where
        found: Array = as_computed(mine) @ whole[right] if axis else whole[down] @ as_computed(mine)
        return found

    return over_axis(matrix, axis, "sum", part, result)


@late
def matmul_into(left: Any, right: Any, out: tuple[Any] | None = None) -> Any:
    """Return a product, or put it into ``out``: ``a @= b``."""
    if out is None:
        return matmul(left, right)
    (goal,) = out
    if not isinstance(goal, DistributedArray):
        raise TypeError(f"out of type {type(goal).__name__}: out has to be a matrix, too")
    left, right = map(_operand, (left, right))
    shape = (*left.shape[:-1], *right.shape[1:])
    if shape != goal.shape:
        raise LayoutError(f"a product of shape {shape} into {goal.shape}")
    require_room(goal, np.result_type(left.dtype, right.dtype))
    found = matmul(left, right)
    if not isinstance(found, DistributedArray):
        put(goal, ..., found)
        return goal
    goal.flat[:] = found.remap(goal.layout).flat
    goal.changed()
    return goal


def _operand(operand: Any) -> Any:
    return operand if isinstance(operand, DistributedArray) else np.asarray(operand)


def _matrices(
    left: Any,
    right: Any,
    turned: tuple[bool, bool],
    layout: Layout | str | None,
    stationary: str | None,
    wire: npt.DTypeLike | None,
) -> Any:
    space = (left if isinstance(left, DistributedArray) else right).space
    a, b = (
        Operand(_distributed(each, space), turn)
        for each, turn in zip((left, right), turned, strict=True)
    )
    shape = a.layout.shape[0], b.layout.shape[1]
    if a.layout.shape[1] != b.layout.shape[0]:
        raise LayoutError(f"a product of shapes {a.layout.shape} and {b.layout.shape}")
    if stationary not in (None, *STATIONARY):
        raise LayoutError(f"stationary {stationary!r}; there are {', '.join(STATIONARY)}")
    for name, operand in (("a", a), ("b", b)):
        if stationary == name and not single(operand.layout):
            raise LayoutError(
                f"{name} cannot stay: {operand.layout} is not one block for each rank"
            )
    narrow = None if wire is None else as_numpy_dtype(wire)
    if narrow is not None and narrow not in (*STORED, np.dtype(np.float32)):
        raise LayoutError(f"wire {narrow}: float16, bfloat16 or float32")
    if narrow is not None and any(each.array.dtype.kind in "iub" for each in (a, b)):
        raise LayoutError(f"wire {narrow}: integers are not rounded")
    wanted = None if layout is None else space.layout(shape, layout)
    return multiply(a, b, wanted, stationary, narrow)


def _distributed(operand: Any, space: Space) -> DistributedArray:
    """Return a matrix, or one of what every rank has."""
    if isinstance(operand, DistributedArray):
        return operand
    everywhere = space.layout(operand.shape, "replicated")
    flat = np.ascontiguousarray(operand).reshape(-1)
    return make(2, space, everywhere, operand.dtype, flat, numbered=False)  # type: ignore[no-any-return]


def _inner(left: Any, right: Any, result: np.dtype[Any]) -> Any:
    if not isinstance(left, DistributedArray):
        left, right = right, left
    exact = np.dtype(np.float64) if result.kind not in "iu" else result
    if isinstance(right, DistributedArray):
        others = [mine for _, mine in right.replica(left.layout).blocks()]
    else:
        others = [right[block.where[0], None] for block, _ in left.blocks()]
    parts = [
        np.multiply(mine, other, dtype=exact).sum()
        for (block, mine), other in zip(left.blocks(), others, strict=True)
        if left.layout.keeper(block) == left.space.rank
    ]
    return combined(left, "inner product", parts, "sum", exact).astype(result)
