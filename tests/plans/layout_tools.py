"""Layouts of matrices, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from pgasdl.matrix.layout import Layout, columns, cyclic, grid, replicated, rows


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, int], size: int) -> Layout:
    """A layout on some ranks, in any order."""
    ranks = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
    sides = st.tuples(st.integers(1, 3), st.integers(1, 3))
    makes = (rows, columns, grid, replicated, lambda s, r: cyclic(s, r, draw(sides)))
    made = draw(st.sampled_from(makes))(shape, ranks)
    return Layout(shape, draw(st.permutations(made.blocks)))
