"""The right content of every buffer, computed by NumPy alone.

All values are small whole numbers, so that every dtype holds every partial sum exactly and the
order of additions does not matter. (The order has tests of its own, in tests/training.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Wanted = list[tuple[int, Array]]  # first element, and the values from there on

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
RATE = 0.25  # of an update: a power of two
_LINE = 16  # elements: blocks begin at multiples of it


def value(rank: int, key: int, count: int, dtype: str) -> Array:
    """A rank's contribution to the collective number ``key``: the sum of eight is below 2**8."""
    return ((np.arange(count) % 7) + (rank * 11 + key * 13) % 25).astype(DTYPES[dtype])


def blocks(count: int, size: int) -> list[tuple[int, int]]:
    """The members' blocks: whole lines, as equal as they can be, the longer ones first."""
    lines = -(-count // _LINE)
    cuts = [0]
    for rank in range(size):
        cuts.append(min(count, cuts[-1] + _LINE * (lines // size + (rank < lines % size))))
    return list(pairwise(cuts))


def reduced(terms: Sequence[Array], mean: bool) -> Array:
    """The sum or the mean: computed in float32, or in the dtype if that is float64 or integer."""
    dtype = terms[0].dtype
    wide = dtype if dtype.itemsize == 8 or dtype.kind == "i" else np.dtype(np.float32)
    total = np.sum([term.astype(wide) for term in terms], axis=0, dtype=wide)
    if mean:
        total = total * wide.type(1.0 / len(terms))
    return np.asarray(total.astype(dtype))


def result(kind: str, terms: Sequence[Array], member: int, root: int) -> Wanted:
    """The values that a member finds and where; the rest of its array may contain anything."""
    count, size = terms[0].size, len(terms)
    if kind in ("sum", "average"):
        return [(0, reduced(terms, kind == "average"))]
    if kind == "reduce":
        return [(0, reduced(terms, False))] if member == root else []
    if kind == "broadcast":
        return [(0, terms[root])]
    if kind == "reduce-scatter":
        low, high = blocks(count, size)[member]
        return [(low, reduced(terms, False)[low:high])]
    if kind == "all-gather":
        cuts = blocks(count, size)
        return [(low, terms[source][low:high]) for source, (low, high) in enumerate(cuts)]
    assert kind == "all-to-all"
    n = count // size
    return [(source * n, term[member * n :][:n]) for source, term in enumerate(terms)]


def require(found: Array, wanted: Array | Wanted, about: str) -> None:
    """Require equal bits; the error shows the first element that differs."""
    for begin, values in wanted if isinstance(wanted, list) else [(0, wanted)]:
        part = found[begin : begin + values.size]
        if part.tobytes() == values.tobytes():
            continue
        wrong = np.flatnonzero(part != values)
        at = int(wrong[0]) if wrong.size else 0
        raise AssertionError(
            f"{about}: element {begin + at} is {part[at]}, not {values[at]}; "
            f"{wrong.size} of {part.size} differ"
        )
