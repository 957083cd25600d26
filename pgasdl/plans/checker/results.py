"""What each kind of plan promises: whose elements, or whose sum, ends up where."""

from __future__ import annotations

from dataclasses import dataclass

from pgasdl.plans.algorithms.blocks import blocks
from pgasdl.plans.plan import EXCHANGES


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a rank's result.

    Attributes
    ----------
    begin, n : int
        Where they are.
    source : int or None
        Rank that they come from; None: they are the sum of all ranks' (the mean, in kinds
        ``average`` and ``update``).
    origin : int
        Where in ``data`` they began.
    """

    begin: int
    n: int
    source: int | None
    origin: int


def regions(kind: str, rank: int, size: int, count: int, root: int = 0) -> list[Region]:
    """List what a rank's result holds. Elements that are not listed may hold anything.

    average, sum    everybody has the mean, or the sum
    update          the same, of the gradients; the result is in ``weights``
    reduce          ``root`` has the sum
    broadcast       everybody has what ``root`` had
    reduce-scatter  rank r has block r of the sum, blocks being :func:`pgasdl.plans.blocks`
    all-gather      everybody has block r of rank r, for every r
    all-to-all      rank r has block r of every rank, in order of rank, blocks being of
                    count div size elements; what is behind the blocks stays
    """
    found = []
    if kind in EXCHANGES or (kind == "reduce" and rank == root):
        found = [Region(0, count, None, 0)]
    elif kind == "broadcast":
        found = [Region(0, count, root, 0)]
    elif kind == "reduce-scatter":
        begin, n = blocks(count, size)[rank]
        found = [Region(begin, n, None, begin)]
    elif kind == "all-gather":
        found = [Region(begin, n, r, begin) for r, (begin, n) in enumerate(blocks(count, size))]
    elif kind == "all-to-all":
        n = count // size
        found = [Region(r * n, n, r, rank * n) for r in range(size)]
        found.append(Region(size * n, count - size * n, rank, size * n))
    return [region for region in found if region.n]
