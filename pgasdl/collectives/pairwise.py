"""Pairwise collectives: blocks for each other in arrays that lie anywhere, of any length.

One inbox and one set of notifications serve them all, one after the other, in the workspace of the
group's allreduces. A collective is cut into executions of :data:`MOST` pieces at most, so that no
plan is long, whatever the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind, piece_bytes
from pgasdl.group import Group
from pgasdl.plans.algorithms import pairwise
from pgasdl.plans.algorithms.pairwise import Blocks
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.segment import Segment

# Pieces of a block in one execution.
MOST = 32
# Bytes of a piece, and of those of all other ranks together, which stay in the caches.
_LEAST, _ALL = 4 << 10, 512 << 10
_MOST_BOUND = 256
_REBASED = ArrayAccess(_native.BufferAccess.REBASED)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One collective, as a rank sees it, wherever its arrays lie.

    Attributes
    ----------
    what : str
        All ranks must agree on it.
    dtype : str
        One of the core's numbers, or "bytes".
    blocks : Blocks
        In elements of it.
    reduction : str, default "sum"
        How elements are reduced; or "min", "max" or "prod".
    """

    what: str
    dtype: str
    blocks: Blocks
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class BoundPairs:
    """What makes a collective: ``execution.run_at(owner, addresses)``, part by part.

    Attributes
    ----------
    what : str
        The description's.
    parts : list[tuple[Execution, int]]
        Executions, and the bytes of each block that lie before theirs.
    """

    what: str
    parts: list[tuple[_native.Execution, int]]


def _piece_bytes(group: Group) -> int:
    piece = _ALL // max(1, group.size - 1) // _LEAST * _LEAST
    return min(piece_bytes(group.topology), max(_LEAST, piece))


def inbox_bytes(group: Group) -> int:
    """Return the length of the inbox."""
    return pairwise.inbox_pieces(group.size, group.mapped) * _piece_bytes(group)


def notifications(group: Group) -> int:
    """Return the number of notifications."""
    return pairwise.notifications(group.size, MOST)


class PairwiseCalls:
    """The pairwise collectives of a group.

    Parameters
    ----------
    segment : Segment
        Where the inbox is.
    inbox : int
        Where it begins.
    numbers : Numbering
        Numbers the group's executions. The first notifications are these collectives'.
    """

    def __init__(
        self, group: Group, segment: Segment, inbox: int, numbers: _native.Numbering
    ) -> None:
        self._group, self._segment, self._inbox = group, segment, inbox
        self._numbers = numbers
        self._piece = _piece_bytes(group)
        self._bound: dict[Hashable, BoundPairs] = {}

    @property
    def n_bound(self) -> int:
        """Collectives that are bound."""
        return len(self._bound)

    def bound(self, key: Hashable, pairs: Callable[[], Pairs]) -> BoundPairs:
        """Return what makes a collective, bound at its first use.

        Its addresses are those of the buffers ``give`` and ``take``, 0 where there is none, and 0.

        Parameters
        ----------
        key : Hashable
            Tells it from all others of this rank.
        pairs : Callable[[], Pairs]
            Describes it.
        """
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MOST_BOUND:
                for old in list(self._bound)[: _MOST_BOUND // 2]:
                    del self._bound[old]
            found = self._bound[key] = self._bind(pairs())
        return found

    def _bind(self, pairs: Pairs) -> BoundPairs:
        item = 1 if pairs.dtype == "bytes" else DTYPES[pairs.dtype].itemsize
        longest, part = pairs.blocks.longest, MOST * (self._piece // item)
        made: dict[Blocks, _native.Execution] = {}
        parts = []
        for begin in range(0, longest, part):
            blocks = _cut(pairs.blocks, begin, part) if longest > part else pairs.blocks
            if blocks not in made:
                made[blocks] = self._execution(pairs, blocks, item)
            parts.append((made[blocks], begin * item))
        return BoundPairs(pairs.what, parts)

    def _execution(self, pairs: Pairs, blocks: Blocks, item: int) -> _native.Execution:
        group, dtype, longest = self._group, pairs.dtype, blocks.longest
        plan = pairwise.build(
            group.rank, blocks, piece=self._piece // item, most=MOST, mapped=group.mapped
        )
        array = ArrayPlan((plan,), (longest,), ((1,),))
        # Every call names the places of the arrays.
        anywhere = _native.local_memory(group.context, self._segment.address, longest * item)
        places = {name: PlanBuffer(anywhere, 0, dtype) for name in plan.buffers}
        places["inbox"] = PlanBuffer(self._segment, self._inbox, dtype)
        # Equal on all ranks; what they have for each other may differ.
        how = blocks.same, blocks.reduces, blocks.scale, pairs.reduction
        tags = Tags(self._numbers, 0, str((pairs.what, dtype, longest, *how)))
        return bind(group, array, places, tags, _REBASED, pairs.reduction)

    def close(self) -> None:
        """Give up the executions."""
        for bound in self._bound.values():
            for execution, _ in bound.parts:
                execution.close()
        self._bound.clear()


def _cut(blocks: Blocks, begin: int, part: int) -> Blocks:
    """Return so many elements from ``begin`` on, of all blocks."""
    sends, receives = (
        tuple(max(0, min(part, n - begin)) for n in lengths)
        for lengths in (blocks.sends, blocks.receives)
    )
    longest = min(part, blocks.longest - begin)
    return replace(blocks, sends=sends, receives=receives, longest=longest)
