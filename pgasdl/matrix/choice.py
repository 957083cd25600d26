"""Which matrix of a product stays where it is: from the layouts alone, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pgasdl.matrix.layout import Block, Extent, Layout, columns, grid, rows
from pgasdl.matrix.moves import pieces_of
from pgasdl.plans.cost import Model

STATIONARY = ("result", "a", "b")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to multiply two matrices, and what all ranks together move.

    "result" stays: each rank computes a block of it. "a" or "b" stays: each rank multiplies its
    block of that operand, and the products are summed where the result lies.
    """

    stationary: str
    layout: Layout  # of the result; a rank has one block at most
    moving: tuple[bool, bool]  # whether a rank needs elements of a, of b, that it does not have
    nbytes: int
    messages: int
    seconds: float  # predicted

    @property
    def name(self) -> str:
        """In a few words."""
        return f"stationary {self.stationary}, result in {self.layout}"

    @property
    def T(self) -> Way:  # noqa: N802 (NumPy's name)
        """The same for the transposed product: of ``b`` and ``a``, transposed."""
        turned = {"result": "result", "a": "b", "b": "a"}[self.stationary]
        costs = self.nbytes, self.messages, self.seconds
        return Way(turned, self.layout.T, self.moving[::-1], *costs)


@lru_cache(512)
def choose(
    a: Layout,
    b: Layout,
    size: int,
    wanted: Layout | None,
    stationary: str | None,
    item: int,
    mapped: bool,
    model: Model,
) -> Way:
    """Return the way with the lowest predicted time, of those in which ``stationary`` stays.

    The time is that until the result lies as it is wanted, where it is computed elsewhere.
    """
    costs = _Costs(size, item, mapped, model)
    found = []
    for kind in STATIONARY if stationary is None else (stationary,):
        for layout in _layouts(a, b, size, wanted):
            if kind == "result":
                way = costs.result(a, b, layout)
            elif kind == "a" and single(a):
                way = costs.operand(a, b, layout)
            elif kind == "b" and single(b):
                way = costs.operand(b.T, a.T, layout.T).T
            else:
                continue
            after = 0.0 if wanted in (None, layout) else costs.remap(layout, wanted)
            found.append((way.seconds + after, way))
    return min(found, key=lambda each: each[0])[1]


def single(layout: Layout) -> bool:
    """Whether no rank has two blocks, and no block is on two ranks."""
    return len(layout.holders) == len(layout.ranks) == len(layout.blocks)


def stack(a: Layout, n: int) -> Layout:
    """Return the layout of all ranks' products of their blocks of ``a``, one below the other."""
    found, row = [], 0
    for block in a.blocks:
        found.append(Block(block.rank, row, 0, block.rows, n))
        row += block.rows
    return Layout((row, n), found, "products")


def addends(a: Layout, tile: Block) -> Iterator[tuple[int, int, int, int]]:
    """Yield what is added up in a block of the result.

    The rank that has it; the first of the result's rows, the first of the :func:`stack`, and how
    many. Columns are the block's.
    """
    row = 0
    for block in a.blocks:
        top = max(block.row, tile.row)
        bottom = min(block.row + block.rows, tile.row + tile.rows)
        if top < bottom:
            yield block.rank, top - tile.row, row + top - block.row, bottom - top
        row += block.rows


def _layouts(a: Layout, b: Layout, size: int, wanted: Layout | None) -> list[Layout]:
    """Return the layouts that a result may be computed in."""
    shape, ranks = (a.shape[0], b.shape[1]), range(size)
    found = [] if wanted is None or len(wanted.ranks) < len(wanted.blocks) else [wanted]
    if a.blocks and a.whole_rows and single(a):  # a, and then b, lies where it is needed
        at = (Block(block.rank, block.row, 0, block.rows, shape[1]) for block in a.blocks)
        found.append(Layout(shape, at, a.name))
    if b.blocks and b.T.whole_rows and single(b):
        at = (Block(block.rank, 0, block.column, shape[0], block.columns) for block in b.blocks)
        found.append(Layout(shape, at, b.name))
    return list(dict.fromkeys([*found, *(make(shape, ranks) for make in (rows, columns, grid))]))


class _Costs:
    """What ways cost on one machine."""

    def __init__(self, size: int, item: int, mapped: bool, model: Model) -> None:
        self._size, self._item, self._mapped, self._model = size, item, mapped, model

    def result(self, a: Layout, b: Layout, layout: Layout) -> Way:
        """Cost of a stationary result."""
        k = a.shape[1]
        slowest, nbytes, messages = 0.0, 0, 0
        moving = [False, False]
        for tile in layout.blocks:
            busy = 0.0
            windows = (tile.row, 0, tile.rows, k), (0, tile.column, k, tile.columns)
            for which, (operand, window) in enumerate(zip((a, b), windows, strict=True)):
                moved, many, seconds = self._fetch(operand, window, tile.rank)
                nbytes, messages, busy = nbytes + moved, messages + many, busy + seconds
                moving[which] |= many > 0
            slowest = max(slowest, busy, float(self._model.flop) * tile.count * k)
        return Way("result", layout, (moving[0], moving[1]), nbytes, messages, slowest)

    def operand(self, a: Layout, b: Layout, layout: Layout) -> Way:
        """Cost of a stationary ``a``."""
        n = b.shape[1]
        first, then, nbytes, messages = 0.0, 0.0, 0, 0
        moving = False
        for block in a.blocks:
            window = block.column, 0, block.columns, n
            moved, many, seconds = self._fetch(b, window, block.rank)
            nbytes, messages, moving = nbytes + moved, messages + many, moving or many > 0
            first = max(first, seconds, float(self._model.flop) * block.count * n)
        for tile in layout.blocks:
            busy = 0.0
            for rank, _, _, height in addends(a, tile):
                moved = self._item * height * tile.columns
                busy += float(self._model.gamma) * moved
                if rank != tile.rank:
                    nbytes, messages = nbytes + moved, messages + 1
                    busy += self._message(tile.rank, rank, moved)
            then = max(then, busy)
        return Way("a", layout, (False, moving), nbytes, messages, first + then)

    def remap(self, layout: Layout, wanted: Layout) -> float:
        """Predict a remap."""
        return max(
            (
                sum(self._fetch(layout, block.extent, rank)[2] for block in wanted.of(rank))
                for rank in wanted.ranks
            ),
            default=0.0,
        )

    def _fetch(self, layout: Layout, window: Extent, rank: int) -> tuple[int, int, float]:
        """Return bytes, messages and seconds of getting a window of a matrix."""
        nbytes, messages, seconds = 0, 0, 0.0
        for holder, _, n in pieces_of(layout, window, rank, self._size):
            if holder == rank:
                continue
            moved = self._item * n
            seconds += self._message(rank, holder, moved)
            nbytes, messages = nbytes + moved, messages + 1
        return nbytes, messages, seconds

    def _message(self, rank: int, holder: int, nbytes: int) -> float:
        """Return the seconds of one read, or of loads out of mapped memory."""
        pair = self._model.pair(rank, holder)
        loaded = float(self._model.remote) * nbytes if self._mapped else 0.0
        return float(pair.latency + pair.startup + pair.beta * nbytes) + loaded
