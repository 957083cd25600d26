"""Pairwise collectives: blocks for each other in arrays that lie anywhere, of any length.

One inbox and one set of notifications serve them all, one after the other, in the workspace of the
group's allreduces. A collective is cut into executions of :data:`MOST` pieces at most, so that no
plan is long, whatever the arrays are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind
from pgasdl.group import Group
from pgasdl.plans.algorithms import pairwise
from pgasdl.plans.algorithms.pairwise import Blocks
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.segment import Segment

# Pieces of a block in one execution.
MOST = 32
# Bytes of a piece between two ranks; with more ranks those of all together stay in the caches.
_PIECE, _LEAST, _ALL = 128 << 10, 4 << 10, 512 << 10
_MOST_BOUND = 256
_REBASED = ArrayAccess(_native.BufferAccess.REBASED)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One collective, as a rank sees it.

    Attributes
    ----------
    what : str
        All ranks must agree on it.
    dtype : str
        One of the core's numbers, or "bytes".
    blocks : Blocks
        In elements of it.
    gives, takes : Sequence[int]
        Where the blocks of the buffers ``give`` and ``take`` lie, 0 where there is none.
    reduction : str, default "sum"
        How elements are reduced; or "min", "max" or "prod".
    """

    what: str
    dtype: str
    blocks: Blocks
    gives: Sequence[int]
    takes: Sequence[int]
    reduction: str = "sum"


def _piece_bytes(group: Group) -> int:
    piece = _ALL // max(1, group.size - 1) // _LEAST * _LEAST
    return min(_PIECE, max(_LEAST, piece))


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
        Numbers the group's executions.
    first : int
        Where the notifications begin.
    """

    def __init__(
        self, group: Group, segment: Segment, inbox: int, numbers: _native.Numbering, first: int
    ) -> None:
        self._group, self._segment, self._inbox = group, segment, inbox
        self._numbers, self._first = numbers, first
        self._piece = _piece_bytes(group)
        self._bound: dict[tuple[Any, ...], _native.Execution] = {}

    @property
    def n_bound(self) -> int:
        """Executions that are bound."""
        return len(self._bound)

    def parts(self, pairs: Pairs) -> Iterator[tuple[_native.Execution, list[int]]]:
        """Yield what makes the collective, part by part: ``execution.run_at(owner, addresses)``."""
        item = 1 if pairs.dtype == "bytes" else DTYPES[pairs.dtype].itemsize
        part = MOST * (self._piece // item)
        for begin in range(0, pairs.blocks.longest, part):
            execution = self._execution(pairs, begin, part, item)
            at = begin * item
            arrays = (*pairs.gives, *pairs.takes)  # in the order of the plan's buffers
            yield execution, [*(address and address + at for address in arrays), 0]

    def _execution(self, pairs: Pairs, begin: int, part: int, item: int) -> _native.Execution:
        """Return what moves elements from ``begin`` on, of all blocks; bound at its first use."""
        of = pairs.blocks
        sends, receives, longest = of.sends, of.receives, of.longest
        if longest > part:
            sends = tuple(max(0, min(part, n - begin)) for n in sends)
            receives = tuple(max(0, min(part, n - begin)) for n in receives)
            longest = min(part, longest - begin)
        # Equal on all ranks; what they have for each other may differ.
        how = of.same, of.reduces, of.scale, pairs.reduction
        alike = pairs.what, pairs.dtype, longest, *how
        key = *alike, sends, receives
        if (found := self._bound.get(key)) is not None:
            return found
        group = self._group
        plan = pairwise.build(
            group.rank,
            replace(of, sends=sends, receives=receives, longest=longest),
            piece=self._piece // item,
            most=MOST,
            mapped=group.mapped,
        )
        array = ArrayPlan((plan,), (longest,), ((1,),))
        # Every call names the places of the arrays.
        anywhere = _native.local_memory(group.context, self._segment.address, longest * item)
        places = {name: PlanBuffer(anywhere, 0, pairs.dtype) for name in plan.buffers}
        places["inbox"] = PlanBuffer(self._segment, self._inbox, pairs.dtype)
        tags = Tags(self._numbers, self._first, str(alike))
        execution = bind(group, array, places, tags, _REBASED, pairs.reduction)
        if len(self._bound) >= _MOST_BOUND:
            for old in list(self._bound)[: _MOST_BOUND // 2]:
                del self._bound[old]
        self._bound[key] = execution
        return execution

    def close(self) -> None:
        """Give up the executions."""
        for execution in self._bound.values():
            execution.close()
        self._bound.clear()
