"""Pairwise collectives: blocks for each other in arrays that lie anywhere, of any length.

One inbox and one set of notifications serve them all, one after the other; and remaps of matrices,
too. A collective is cut into executions of :data:`MOST` pieces at most, so that no plan is long,
whatever the arrays are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import c_ubyte
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.collectives.bound import ArrayAccess, PlanBuffer, Tags, bind, piece_bytes
from pgasdl.group import Group
from pgasdl.plans import Plan
from pgasdl.plans.algorithms import pairwise, remap
from pgasdl.plans.algorithms.pairwise import Blocks
from pgasdl.plans.algorithms.remap import Moves
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.segment import Segment

# Pieces of a block in one execution.
MOST = 32
# Bytes of a piece, and of those of all other ranks together, which stay in the caches.
_LEAST, _ALL = 4 << 10, 512 << 10
_DIRECT = 256 << 10
_MOST_BOUND = 256
_REBASED = ArrayAccess(_native.BufferAccess.REBASED)


class BoundPairs(NamedTuple):
    """The executions of a collective: ``execution.run_at(owner, addresses)``, part by part.

    ``what`` : name of the collective, for messages
    ``parts`` : executions, and the bytes of each block that lie before theirs
    ``blocks`` : the bytes of those that leave from where they lie, and of those that are taken
    """

    what: str
    parts: list[tuple[_native.Execution, int]]
    blocks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def apart(self, places: list[int]) -> list[Any]:
        """Copy the blocks that leave from where they lie, if others are taken into them.

        Replaces their addresses in ``places``: of the blocks given, then of those taken. Returns
        what must live until the collective ends.
        """
        gives, takes = self.blocks
        taken = [(at, at + n) for at, n in zip(places[len(gives) :], takes, strict=False) if n]
        copies: list[Any] = []
        for number, n in enumerate(gives if taken else ()):
            at = places[number]
            if n and any(at < end and begin < at + n for begin, end in taken):
                copies.append(np.array((c_ubyte * n).from_address(at)))
                places[number] = copies[-1].ctypes.data
        return copies


@dataclass(frozen=True, slots=True)
class Pairs:
    """One collective, as a rank sees it, wherever its arrays lie.

    ``what`` : all ranks must agree on it
    ``dtype`` : of the elements of ``blocks``: one of the core's numbers, or "bytes"
    ``reduction`` : how elements are reduced; or "min", "max" or "prod"
    """

    what: str
    dtype: str
    blocks: Blocks
    reduction: str = "sum"

    def bind(self, calls: PairwiseCalls) -> BoundPairs:
        """Return its executions."""
        group, blocks, item = calls.group, self.blocks, item_bytes(self.dtype)
        direct = leaves_from_anywhere(group)
        piece = calls.piece(item) * (2 if direct else 1)  # slots of one side, twice as long
        longest, part = blocks.longest, MOST * piece
        how = blocks.same, blocks.reduces, blocks.scale, self.reduction
        made: dict[Blocks, _native.Execution] = {}
        parts = []
        for begin in range(0, longest, part):
            cut = _cut(blocks, begin, part) if longest > part else blocks
            if cut not in made:
                plan = pairwise.build(
                    group.rank, cut, piece=piece, most=MOST, mapped=group.mapped, direct=direct
                )
                dtypes = dict.fromkeys(plan.buffers, self.dtype)
                # Equal on all ranks; what they have for each other may differ.
                signature = _words(self.what, self.dtype, cut.longest, *how)
                made[cut] = calls.execution(plan, dtypes, signature, self.reduction)
            parts.append((made[cut], begin * item))
        if not direct:
            return BoundPairs(self.what, parts)
        leave = [0 if peer == group.rank else n * item for peer, n in enumerate(blocks.sends)]
        come = [n * item for n in blocks.receives]
        if blocks.same:
            leave, come[group.rank] = [max(leave)], 0  # its own is the same memory, or another
        elif blocks.reduces:
            come = [come[group.rank]]
        return BoundPairs(self.what, parts, (tuple(leave), tuple(come)))


@dataclass(frozen=True, slots=True)
class Remap:
    """Moves a matrix's blocks, wherever they lie, to their places in another layout.

    ``what`` : names the layouts; all ranks must agree on it
    ``moves`` : the rows that this rank sends and receives
    ``source``, ``target`` : the core's names of the dtypes
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
        """The result has a narrower dtype than the source."""
        return item_bytes(self.target) < item_bytes(self.source)

    def bind(self, calls: PairwiseCalls) -> BoundPairs:
        """Return its executions, for the addresses of ``data`` and ``result``, and 0."""
        group, moves = calls.group, self.moves
        piece = calls.piece(item_bytes(self.wire))
        how: dict[str, Any] = {
            "piece": piece,
            "most": MOST,
            "mapped": group.mapped,
            "narrows": self.narrows,
        }
        parts = []
        for begin in range(0, max(1, moves.longest), MOST * piece):
            plan = remap.build(group.rank, moves, begin=begin, **how)
            dtypes = dict(zip(plan.buffers, (self.source, self.target, self.wire), strict=True))
            signature = _words(self.what, self.source, self.target, begin)
            parts.append((calls.execution(plan, dtypes, signature), 0))
        return BoundPairs(self.what, parts)


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element, by the core's name."""
    return 1 if dtype == "bytes" else DTYPES[dtype].itemsize


def leaves_from_anywhere(group: Group) -> bool:
    """Whether blocks are put from where they lie: the transport registers no memory."""
    return not (group.mapped or group.members.registers)


def _piece_bytes(group: Group) -> int:
    piece = _ALL // max(1, group.size - 1) // _LEAST * _LEAST
    most = max(piece_bytes(group.topology), _DIRECT if leaves_from_anywhere(group) else 0)
    return min(most, max(_LEAST, piece))


def inbox_bytes(group: Group) -> int:
    """Return the length of the inbox."""
    return pairwise.inbox_pieces(group.size, group.mapped) * _piece_bytes(group)


def notifications(group: Group) -> int:
    """Return the number of notifications."""
    return pairwise.notifications(group.size, MOST)


class PairwiseCalls:
    """The pairwise collectives of a group, whose inbox begins at ``inbox`` of the segment.

    Their notifications are the first of ``numbers``, which numbers the group's executions.
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

    def bound(self, key: Hashable, describe: Callable[[], Pairs | Remap]) -> BoundPairs:
        """Return a collective's executions, bound at its first use; the key is unique on this rank.

        The addresses are those of the plan's buffers, 0 where there is none; and 0 for the inbox.
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
        """Bind a part; each call names the places of all arrays but the last buffer, the inbox."""
        *arrays, inbox = plan.buffers
        places = {}
        for name in arrays:  # each is moved by itself
            nbytes = plan.buffers[name] * item_bytes(dtypes[name])
            here = _native.local_memory(self.group.context, self._segment.address, nbytes)
            places[name] = PlanBuffer(here, 0, dtypes[name])
        places[inbox] = PlanBuffer(self._segment, self._inbox, dtypes[inbox])
        tags = Tags(self._numbers, 0, signature)
        array = ArrayPlan((plan,), (plan.count,), ((1,),))
        return bind(self.group, array, places, tags, _REBASED, reduction)

    def close(self) -> None:
        """Close the executions."""
        for bound in self._bound.values():
            for execution, _ in bound.parts:
                execution.close()
        self._bound.clear()


def _words(*parts: object) -> str:
    return ", ".join(map(str, parts))


def _cut(blocks: Blocks, begin: int, part: int) -> Blocks:
    """Return so many elements from ``begin`` on, of all blocks."""
    sends, receives = (
        tuple(max(0, min(part, n - begin)) for n in lengths)
        for lengths in (blocks.sends, blocks.receives)
    )
    longest = min(part, blocks.longest - begin)
    return replace(blocks, sends=sends, receives=receives, longest=longest)
