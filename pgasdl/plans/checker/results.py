"""The result of each kind of plan: the elements or sums that each rank ends with."""

from __future__ import annotations

from dataclasses import dataclass

from pgasdl.plans.algorithms.blocks import blocks
from pgasdl.plans.algorithms.remap import Moves
from pgasdl.plans.plan import EXCHANGES


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a rank's result."""

    # First element, and number of elements.
    begin: int
    n: int
    # Rank that they come from; None: the sum over all ranks (the mean, in kinds ``average`` and
    # ``update``).
    source: int | None
    origin: int  # their first element in the ``data`` that they come from


def regions(kind: str, rank: int, size: int, count: int, root: int = 0) -> list[Region]:
    """List the parts of a rank's result. Other elements may hold anything.

    average, sum    every rank has the mean, or the sum
    update          the same, of the gradients; the result is in ``weights``
    reduce          ``root`` has the sum
    broadcast       every rank has the elements of ``root``
    reduce-scatter  rank r has block r of the sum, blocks being :func:`pgasdl.plans.blocks`
    all-gather      every rank has block r of rank r, for every r
    all-to-all      rank r has block r of every rank, in order of rank, blocks being of
                    count div size elements; the elements behind the blocks stay
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


def moved(moves: Moves) -> list[Region]:
    """List the parts of a rank's ``result`` after a remap: every row that it receives."""
    return [
        Region(rows.dst + i * rows.dst_step, rows.n, sender, rows.src + i * rows.src_step)
        for sender, received in enumerate(moves.receives)
        for rows in received
        for i in range(rows.rows)
    ]
