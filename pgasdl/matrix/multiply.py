"""The product of two matrices: ranks multiply what they have by what they load or read.

A rank multiplies by NumPy's BLAS. Where memory is mapped, BLAS reads peers' blocks in place, and
nothing moves; elsewhere the next panel is read, into one of two buffers, while the present one is
multiplied. Everything is one-sided: ranks wait for each other before the first block is read, and
until the last one has been.

stationary="result"
    Each rank computes one block of the result, panel by panel of the inner dimension, and begins
    with those that it has, so that no two ranks begin at the same peer. By rows or by columns this
    is the cyclic variant of Fox's algorithm (dMath): blocks go round, but each comes from the rank
    that has it, and not from the neighbour's copy. On a grid it is SUMMA (van de Geijn and Watts,
    1997) without its broadcasts.
stationary="a", stationary="b"
    Each rank multiplies its block of one operand by all of the other that fits. Then the ranks
    that have the result add the products up, in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pgasdl.matrix.array import make
from pgasdl.matrix.choice import Way, addends, choose, stack
from pgasdl.matrix.elements import Array, computed
from pgasdl.matrix.homes import find_homes
from pgasdl.matrix.layout import Block, Layout
from pgasdl.matrix.operand import Operand, Range
from pgasdl.matrix.panels import SPARE, Panel, add_product, ahead, panels
from pgasdl.matrix.space import Space

# Elements of products that are added up at once.
_LARGEST = 1 << 20


def multiply(
    a: Operand,
    b: Operand,
    wanted: Layout | None,
    stationary: str | None,
    wire: np.dtype[Any] | None = None,
) -> Any:
    """Return the product, in a layout; operands that move are rounded to ``wire``. Collective."""
    space = a.array.space
    element = np.result_type(a.array.dtype, b.array.dtype)
    while True:
        item = min(each.itemsize for each in (element, wire) if each is not None)
        how = wanted, stationary, item, space.group.mapped, space.model
        way = choose(a.layout, b.layout, space.group.size, *how)
        if wire is not None:
            a, b = (
                each.rounded(wire) if moves else each
                for each, moves in zip((a, b), way.moving, strict=True)
            )
        if space.told is not None:
            space.told.note_product(a.layout, b.layout, way, a.kept + b.kept)
            result = make(2, space, way.layout, element)
            break
        result = _run(space, way, a, b, element)
        if result is not None:
            break
        # Some rank's part of an operand lies outside the pool: all get that operand first.
        a, b = (
            each.everywhere() if moves else each
            for each, moves in zip((a, b), way.moving, strict=True)
        )
        stationary = "result"
    return result if wanted in (None, way.layout) else result.remap(wanted)


def _run(space: Space, way: Way, a: Operand, b: Operand, element: np.dtype[Any]) -> Any:
    """Multiply; None: what ranks need of each other lies outside the pool."""
    where = f"{way.stationary} stays, {way.layout.identity}"
    what = f"product of {a.identity} and {b.identity}, {where}"
    with space.steps(what) as steps:
        job = steps(lambda: _Product(space, way, a, b, element))
        if job.moving and not steps(lambda: job.meet(what, job.moving)):
            return None
        steps(job.multiply)
        products = job.products
        if products is not None:
            if not steps(lambda: job.meet(what, [products])):
                return None
            steps(job.add_up)
        steps(job.end)
        if job.moving or products is not None:
            with space.during("wait"):
                steps(space.group.barrier)  # with seconds of its own: BLAS may take longer
        return job.result


class _Product:
    """One rank's part of a product; with a stationary ``b``, of the transposed product.

    ``moving`` are the operands that ranks need of each other; ``products`` are those of the blocks
    of a stationary ``a``, one below the other.
    """

    def __init__(
        self, space: Space, way: Way, a: Operand, b: Operand, element: np.dtype[Any]
    ) -> None:
        self._space, self._exact = space, computed(element)
        self.result = make(2, space, way.layout, element)
        exact = self.result
        if element != self._exact:
            exact = make(2, space, way.layout, self._exact)
        self._total = exact
        tiles = list(exact.blocks())
        turned = way.stationary == "b"
        if turned:
            a, b, way = b.T, a.T, way.T
            tiles = [(block.T, out.T) for block, out in tiles]
        self._a, self._b, self._tiles = a, b, tiles
        self._sums: list[tuple[Array, Range, Range]] = []
        self.moving = [each for each, moves in zip((a, b), way.moving, strict=True) if moves]
        self.products: Operand | None = None
        if way.stationary == "result":
            inner = 0, a.layout.shape[1]
            goals = [((_range(tile, 0), inner, _range(tile, 1)), out) for tile, out in tiles]
        else:
            columns = 0, b.layout.shape[1]
            layout = stack(a.layout, columns[1])
            found = make(2, space, layout.T if turned else layout, self._exact)
            self.products = Operand(found, turned)
            goals = [
                ((_range(block, 0), _range(block, 1), columns), out.T if turned else out)
                for block, (_, out) in zip(a.layout.of(space.rank), found.blocks(), strict=False)
            ]
            self._sums = list(self._to_add(a.layout))
            self.products.reserve(((down, across) for _, down, across in self._sums), keep=False)
        group = space.group
        where = group.rank, group.size, group.mapped
        self._goals = [
            (panels(a.layout, b.layout, whole, *where), whole, out) for whole, out in goals
        ]
        todo = [each for parts, _, _ in self._goals for each in parts]
        self._adds = len({(rows, columns) for rows, _, columns in todo}) < len(todo)
        a.reserve((rows, inner) for rows, inner, _ in todo)
        b.reserve((inner, columns) for _, inner, columns in todo)

    def meet(self, what: str, operands: Sequence[Operand]) -> bool:
        """Learn where parts of operands lie; False: outside the pool. Collective."""
        flats = [each.array.flat for each in operands]
        buffers = [buffer for each in operands for buffer in each.buffers]
        with self._space.during("wait"):
            homes, outside = find_homes(self._space.group, what, flats, None, buffers)
        for each, home in zip(operands, homes, strict=False):
            each.homes = home
        return not outside

    def _to_add(self, a: Layout) -> Iterator[tuple[Array, Range, Range]]:
        """Yield what products are added to, and which: their rows and columns."""
        for tile, out in self._tiles:
            height = max(1, _LARGEST // tile.columns)
            for _, first, row, rows in addends(a, tile):
                for at in range(0, rows, height):
                    end = min(at + height, rows)
                    here = out[first + at : first + end]
                    yield here, (row + at, row + end), _range(tile, 1)

    def multiply(self) -> None:
        """Multiply what this rank multiplies."""
        try:
            self._multiply()
        except BaseException:
            self._a.forget()
            self._b.forget()
            raise

    def _multiply(self) -> None:
        a, b = self._a, self._b
        edge = SPARE if self._adds else 0
        spare = self._space.empty(edge * edge, self._exact).reshape(edge, edge)

        def fetch(part: Panel, number: int) -> tuple[Array, Array]:
            rows, inner, columns = part
            return a.window(rows, inner, number), b.window(inner, columns, number)

        for parts, (rows, _, columns), out in self._goals:
            if not parts:
                out[...] = 0
            begun = set()
            for (down, _, across), (x, y) in ahead(self._space, parts, fetch):
                here = out[_slice(down, rows), _slice(across, columns)]
                first = (down, across) not in begun
                begun.add((down, across))
                with self._space.during("compute"):
                    add_product(self._exactly(x), self._exactly(y), here, first, spare)

    def add_up(self) -> None:
        """Add up the products of all ranks in this one's blocks of the result."""
        products = self.products
        assert products is not None
        for _, out in self._tiles:
            out[...] = 0

        def fetch(part: tuple[Array, Range, Range], number: int) -> Array:
            return products.window(*part[1:], number)

        for (out, _, _), product in ahead(self._space, self._sums, fetch):
            with self._space.during("compute"):
                np.add(out, product, out=out)

    def end(self) -> None:
        """Put the result into its dtype."""
        if self._total is not self.result:
            self.result.flat[:] = self._total.flat

    def _exactly(self, window: Array) -> Array:
        return window.astype(self._exact, copy=False)


def _range(block: Block, axis: int) -> Range:
    begin, length = (block.row, block.rows) if axis == 0 else (block.column, block.columns)
    return begin, begin + length


def _slice(part: Range, whole: Range) -> slice:
    return slice(part[0] - whole[0], part[1] - whole[0])
