"""Remaps: a matrix's blocks, wherever they lie, come to where another layout wants them."""

from __future__ import annotations

from dataclasses import dataclass

from pgasdl.collectives.pairwise import MOST, BoundPairs, PairwiseCalls, item_bytes
from pgasdl.plans.algorithms import remap
from pgasdl.plans.algorithms.remap import Moves


@dataclass(frozen=True, slots=True)
class Remap:
    """A remap, as a rank sees it.

    Attributes
    ----------
    what : str
        All ranks must agree on it: it tells the layouts.
    moves : Moves
        What this rank sends and receives.
    source, target : str
        The core's names of the dtypes.
    """

    what: str
    moves: Moves
    source: str
    target: str

    @property
    def wire(self) -> str:
        """The dtype that travels: the narrower one."""
        return self.target if self.narrows else self.source

    @property
    def narrows(self) -> bool:
        """The result has a narrower dtype than what there was."""
        return item_bytes(self.target) < item_bytes(self.source)

    def bind(self, calls: PairwiseCalls) -> BoundPairs:
        """Return what makes it; its addresses are those of ``data`` and ``result``, and 0."""
        group, moves = calls.group, self.moves
        piece = calls.piece(item_bytes(self.wire))
        parts = []
        for begin in range(0, max(1, moves.longest), MOST * piece):
            plan = remap.build(
                group.rank,
                moves,
                piece=piece,
                most=MOST,
                mapped=group.mapped,
                narrows=self.narrows,
                begin=begin,
            )
            dtypes = dict(zip(plan.buffers, (self.source, self.target, self.wire), strict=True))
            signature = str((self.what, self.source, self.target, begin))
            parts.append((calls.execution(plan, dtypes, signature), 0))
        return BoundPairs(self.what, parts)
