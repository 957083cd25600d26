"""Pairwise collectives: blocks for each other in arrays that lie anywhere, of any length.

One inbox and one set of notifications serve them all, one after the other; and remaps of matrices,
too. A collective is cut into executions of :data:`MOST` pieces at most, so that no plan is long,
whatever the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind, piece_bytes
from pgasdl.group import Group
from pgasdl.plans import Plan
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

    def bind(self, calls: PairwiseCalls) -> BoundPairs:
        """Return what makes it."""
        item = item_bytes(self.dtype)
        longest, part = self.blocks.longest, MOST * calls.piece(item)
        made: dict[Blocks, _native.Execution] = {}
        parts = []
        for begin in range(0, longest, part):
            blocks = _cut(self.blocks, begin, part) if longest > part else self.blocks
            if blocks not in made:
                made[blocks] = self._execution(calls, blocks, item)
            parts.append((made[blocks], begin * item))
        return BoundPairs(self.what, parts)

    def _execution(self, calls: PairwiseCalls, blocks: Blocks, item: int) -> _native.Execution:
        group = calls.group
        plan = pairwise.build(
            group.rank, blocks, piece=calls.piece(item), most=MOST, mapped=group.mapped
        )
        # Equal on all ranks; what they have for each other may differ.
        how = blocks.same, blocks.reduces, blocks.scale, self.reduction
        signature = str((self.what, self.dtype, blocks.longest, *how))
        return calls.execution(
            plan, dict.fromkeys(plan.buffers, self.dtype), signature, self.reduction
        )


@dataclass(frozen=True, slots=True)
class BoundPairs:
    """What makes a collective: ``execution.run_at(owner, addresses)``, part by part.

    Attributes
    ----------
    what : str
        The description's, for messages.
    parts : list[tuple[Execution, int]]
        Executions, and the bytes of each block that lie before theirs.
    """

    what: str
    parts: list[tuple[_native.Execution, int]]


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element, by the core's name."""
    return 1 if dtype == "bytes" else DTYPES[dtype].itemsize


def _piece_bytes(group: Group) -> int:
    piece = _ALL // max(1, group.size - 1) // _LEAST * _LEAST
    return min(piece_bytes(group.topology), max(_LEAST, piece))


def inbox_bytes(group: Group) -> int:
    """Return the length of the inbox."""
    return pairwise.inbox_pieces(group.size, group.mapped) * _piece_bytes(group)


def notifications(group: Group) -> int:
    """Return the number of notifications."""
    return pairwise.notifications(group.size, MOST)


class Bindable(Protocol):
    """A collective that can be bound."""

    def bind(self, calls: PairwiseCalls) -> BoundPairs:
        """Return what makes it."""
        ...


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
        self.group, self._segment, self._inbox = group, segment, inbox
        self._numbers = numbers
        self._piece = _piece_bytes(group)
        self._bound: dict[Hashable, BoundPairs] = {}

    @property
    def n_bound(self) -> int:
        """Collectives that are bound."""
        return len(self._bound)

    def piece(self, item: int) -> int:
        """Return the elements of a piece, of so many bytes each."""
        return self._piece // item

    def bound(self, key: Hashable, describe: Callable[[], Bindable]) -> BoundPairs:
        """Return what makes a collective, bound at its first use.

        Its addresses are those of the plan's buffers but for the inbox, 0 where there is none,
        and 0.

        Parameters
        ----------
        key : Hashable
            Tells it from all others of this rank.
        describe : Callable[[], Bindable]
            Describes it.
        """
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MOST_BOUND:
                for old in list(self._bound)[: _MOST_BOUND // 2]:
                    del self._bound[old]
            found = self._bound[key] = describe().bind(self)
        return found

    def execution(
        self, plan: Plan, dtypes: dict[str, str], signature: str, reduction: str = "sum"
    ) -> _native.Execution:
        """Bind one part of a collective. Every call names the places of its arrays.

        ``plan`` : its last buffer is the inbox
        ``signature`` : equal on all ranks
        """
        *arrays, inbox = plan.buffers
        nbytes = max(plan.buffers[name] * item_bytes(dtypes[name]) for name in arrays)
        anywhere = _native.local_memory(self.group.context, self._segment.address, nbytes)
        places = {name: PlanBuffer(anywhere, 0, dtypes[name]) for name in arrays}
        places[inbox] = PlanBuffer(self._segment, self._inbox, dtypes[inbox])
        tags = Tags(self._numbers, 0, signature)
        array = ArrayPlan((plan,), (plan.count,), ((1,),))
        return bind(self.group, array, places, tags, _REBASED, reduction)

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
