"""Matrices and vectors that are spread over ranks, and move by one-sided transfers (dMath).

>>> import numpy as np
>>> import pgasdl.matrix as pm
>>> from pgasdl import loopback
>>> def program(ctx):
...     a = pm.standard_normal(ctx, (64, 32), seed=1)  # by rows
...     b = pm.standard_normal(ctx, (64, 32), seed=2, layout="columns")
...     c = np.tanh(a + 0.5 * b)  # by rows; b is moved once, and kept until it changes
...     return c.sum(axis=0).shape, bool(c.max() < 1)
>>> loopback.run(2, program)
[((32,), True), ((32,), True)]
"""

from __future__ import annotations

from pgasdl.errors import LayoutError
from pgasdl.matrix.dtensor import from_dtensor, to_dtensor
from pgasdl.matrix.explain import Explanation, Movement
from pgasdl.matrix.layout import Block, Layout, columns, cyclic, grid, replicated, rows
from pgasdl.matrix.making import (
    array,
    empty,
    eye,
    fromfunction,
    full,
    random,
    standard_normal,
    zeros,
)
from pgasdl.matrix.matrix import DistributedMatrix, DistributedVector
from pgasdl.matrix.products import matmul
from pgasdl.matrix.reader import Reader
from pgasdl.matrix.remapping import RemapHandle
from pgasdl.matrix.serving import serve
from pgasdl.matrix.space import Span, explain, keep, trace
from pgasdl.matrix.storage import load, load_state, save

__all__ = [
    "Block",
    "DistributedMatrix",
    "DistributedVector",
    "Explanation",
    "Layout",
    "LayoutError",
    "Movement",
    "Reader",
    "RemapHandle",
    "Span",
    "array",
    "columns",
    "cyclic",
    "empty",
    "explain",
    "eye",
    "from_dtensor",
    "fromfunction",
    "full",
    "grid",
    "keep",
    "load",
    "load_state",
    "matmul",
    "random",
    "replicated",
    "rows",
    "save",
    "serve",
    "standard_normal",
    "to_dtensor",
    "trace",
    "zeros",
]
