"""Products of matrices and vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from pgasdl.errors import LayoutError, UnavailableError
from pgasdl.matrix.array import DistributedArray, as_computed, require_same_space
from pgasdl.matrix.layout import Block
from pgasdl.matrix.reductions import combined, over_axis
from pgasdl.matrix.space import Array


def matmul(left: Any, right: Any) -> Any:
    """Return the product of two vectors, or of a matrix and a vector, as ``numpy.matmul``.

    A vector of NumPy is one that every rank has.

    Raises
    ------
    LayoutError
        Shapes that do not fit, or operands of different groups.
    UnavailableError
        Two matrices: their product is not offered yet.
    """
    require_same_space(*(each for each in (left, right) if isinstance(each, DistributedArray)))
    shapes = left.shape, right.shape
    if len(shapes[0]) == len(shapes[1]) == 2:
        raise UnavailableError("the product of two distributed matrices is not offered yet")
    if not all(shapes) or shapes[0][-1] != shapes[1][0]:
        raise LayoutError(f"a product of shapes {shapes[0]} and {shapes[1]}")
    result = np.result_type(left.dtype, right.dtype)
    if left.ndim == right.ndim:
        return _inner(left, right, result)
    matrix, vector, axis = (left, right, 1) if left.ndim == 2 else (right, left, 0)
    whole = vector.everywhere() if isinstance(vector, DistributedArray) else vector
    if not isinstance(matrix, DistributedArray):
        return np.matmul(left, whole) if axis else np.matmul(whole, right)
    whole = as_computed(whole)

    def part(block: Block, mine: Array) -> Array:
        down, right = block.where
        found: Array = as_computed(mine) @ whole[right] if axis else whole[down] @ as_computed(mine)
        return found

    return over_axis(matrix, axis, "sum", part, result)


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
    return combined(left, parts, "sum", exact).astype(result)
