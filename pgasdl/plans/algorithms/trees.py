"""Up and down a tree in chunks: the common part of chains, binomial, k-ary and two-level trees.

Each plan has a file; ``shapes`` says which node is whose child, and numbers the ranks: node 0 is
the root. A child's place is the number of its slot at the parent.

Steps on a node, for each of the n chunks of ``data`` in order
    up      1. Wait for the chunk from all children; one Reduce over own chunk and theirs, by place.
               Root: times the kind's factor, and in kind ``update`` Call the update of the chunk.
            2. Others: Put the sum into the parent's slot.
    down    3. Wait for the parent's result, which comes into place; Put it to the children, the
               last first, since its subtree is the deepest. In the end Flush.
    An exchange goes up and down; with several chunks in two lanes, so that chunk k's way down
    overlaps chunk k + 1's way up. Kind ``reduce`` goes up only, ``broadcast`` down only.

Notifications, with places below D
    exchange    place * n + k: chunk k of that child.  D * n + k: result k
    reduce      the same, but D * n: the parent's slots for me are free (credit)
    broadcast   place: that child's ``data`` is free (credit).  D + k: chunk k

Which message proves a buffer free
    exchange
        my source of the way up     its result: the root had my sum before it was made
        my slots                    my result: a child waits for it before it sends again
        a child's result            its sum: it had begun this execution
        my source of the way down   nobody answers it: Flush
    reduce (one way: nothing comes back, so)
        my slots                    my credit, raised when I begin and hence had read them
        my source                   nobody answers it: Flush
    broadcast (one way)
        a child's ``data``          its credit, raised when it begins
        my source                   nobody answers it: Flush

Wire precision
    Own data is cast to ``wire_out`` and sums travel, and are reduced, in wire precision
    (accumulating wider, rounding once per hop). The result lands in ``wire_out``, is forwarded from
    there and cast back by all, the root included: all ranks end with the same bits. ``update``
    sends gradients so, but weights as they are: rounded weights would swallow small updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pgasdl.plans.algorithms.blocks import chunks_of, flag, flushed, padded
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Groups, Shape
from pgasdl.plans.plan import Plan, Put, Reduce, Sizes, Span, Step, Wait

TREE_KINDS = ("average", "sum", "update", "reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Link:
    """A neighbour in the tree: its rank, and the child's place at the parent."""

    rank: int
    place: int


def numbering(view: RankView, root: int, group_size: Sizes = 0) -> Groups:
    """Return the numbering of ranks from the root; 0: they are one group."""
    return Groups(view.size, group_size or view.size, view.require_root(root))


def slots_of(shape: Shape, count: int) -> int:
    """Return the elements of an inbox with a slot for each place at a node."""
    return shape.degree * padded(count)


def tree_plan(view: RankView, shape: Shape, ranks: Groups, chunks: int) -> Plan:
    """Return the plan of one rank in a tree of this shape; 0 chunks: as many as fit."""
    view.require("chunks", chunks, 0)
    return view.plan() if view.idle else TreeView(view, shape, ranks, chunks).plan()


class TreeView:
    """One rank's neighbours in a tree, and its steps."""

    def __init__(self, view: RankView, shape: Shape, ranks: Groups, chunks: int) -> None:
        self.view = view
        self.shape, self.degree = shape, shape.degree
        self.chunks = chunks_of(view.count, chunks)
        node = ranks.node(view.rank)
        self.children = [Link(ranks.rank(child), place) for place, child in shape.children(node)]
        self.parent: Link | None = None
        if node:
            parent, place = shape.parent(node)
            self.parent = Link(ranks.rank(parent), place)
        self.slot = padded(view.count)
        n = len(self.chunks)
        self.first_down = self.degree * (1 if view.kind == "broadcast" else n)
        self.notifications = self.first_down + (1 if view.kind == "reduce" else n)

    def plan(self) -> Plan:
        """Return the plan of this rank."""
        inbox = 0 if self.view.kind == "broadcast" else slots_of(self.shape, self.view.count)
        return self.view.plan(self.lanes(), self.notifications, inbox)

    def lanes(self) -> list[list[Step]]:
        """Return the steps by lane."""
        if self.view.kind == "reduce":
            return [list(self.reduce())]
        if self.view.kind == "broadcast":
            return [list(self.broadcast())]
        up = [step for k in range(len(self.chunks)) for step in self.up(k)]
        down = [step for k in range(len(self.chunks)) for step in self.down(k)]
        if not self.parent:
            up = list(flushed(up))
        down = list(flushed(down))
        return [up + down] if len(self.chunks) == 1 else [up, down]

    def reduce(self) -> Iterator[Step]:
        """Yield the way up alone."""
        for child in self.children:
            yield flag(child.rank, self.first_down)
        if self.parent:
            yield Wait(self.first_down, self.parent.rank)
        yield from flushed(step for k in range(len(self.chunks)) for step in self.up(k))

    def broadcast(self) -> Iterator[Step]:
        """Yield the way down alone."""
        if self.parent:
            yield flag(self.parent.rank, self.parent.place)
        for child in reversed(self.children):
            yield Wait(child.place, child.rank)
        hand = self.down if self.parent else self.hand_down
        yield from flushed(step for k in range(len(self.chunks)) for step in hand(k))

    def up(self, k: int) -> Iterator[Step]:
        """Yield the steps of chunk ``k`` from the children to the parent, or at the root to 3."""
        view = self.view
        offset, n = self.chunks[k]
        own = Span(view.send, offset)
        yield from view.to_wire(offset, n)
        for child in self.children:
            yield Wait(self.up_flag(child.place, k), child.rank)
        if self.children:
            slots = [self.slot_of(child.place, offset) for child in self.children]
            reduced = own if self.parent else view.reduced(offset)
            yield Reduce((reduced,), (own, *slots), n, 1.0 if self.parent else view.scale)
        if self.parent:
            at = self.slot_of(self.parent.place, offset)
            yield Put(own, n, self.parent.rank, at, self.up_flag(self.parent.place, k))
        elif view.exchange:
            yield from view.update(offset, n)
            yield from self.hand_down(k)

    def down(self, k: int) -> Iterator[Step]:
        """Yield the steps of result ``k`` from the parent to the children."""
        if self.parent:
            yield Wait(self.first_down + k, self.parent.rank)
            yield from self.hand_down(k)

    def hand_down(self, k: int) -> Iterator[Step]:
        """Yield the steps of result ``k`` to the children and into place."""
        offset, n = self.chunks[k]
        result = Span(self.view.result, offset)
        for child in reversed(self.children):
            yield Put(result, n, child.rank, result, self.first_down + k)
        yield from self.view.from_wire(offset, n)

    def slot_of(self, place: int, offset: int) -> Span:
        """Return where a parent receives a child's elements, from ``offset`` on."""
        return Span(self.view.receive, place * self.slot + offset)

    def up_flag(self, place: int, k: int) -> int:
        """Return the flag that chunk ``k`` of the child at a place is here."""
        return place * len(self.chunks) + k
