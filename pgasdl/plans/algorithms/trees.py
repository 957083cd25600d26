"""Trees: gradients go up a tree and are summed on the way; the result comes down.

Papers
    tree            CaffeGPI: gradients from higher to lower ranks, rank 0 updates the model, the
                    model from lower to higher ranks. A binomial tree.
    kary            CaffeGPI leaves open which tree; this is the other usual one: up to ``arity``
                    children, so that no inbox grows with P, and chunks flow evenly.
    chain           S-Caffe section 5, the lower level of its hierarchical reduce: the last process
                    sends the buffer in n chunks to its left neighbour, which adds its own.
    chain-chain     S-Caffe section 5, hierarchical reduce: chains of ``chain_size`` ranks, whose
    chain-binomial  heads form a chain (to 64 ranks) or a binomial tree (beyond). 8 is its ideal.
    Where the paper has a reduce, here are also a broadcast, and an exchange that comes back the way
    it went. S-Caffe does not say whether its upper level waits for the lower one; here chunks flow
    through both without a stop. ``hierarchy`` says which tree is taken where nobody names one.

Nodes are numbered from the root, 0; ``shapes`` says which node is whose child, and which rank it
is. A child's place is the number of its slot at the parent. ``tree`` with ``group_size`` = q > 0
has a tree of each q neighbours, the ranks of a machine, and one of their heads: S goes across N - 1
times, whatever the root is. Groups and chains of unlike sizes: several q.

Steps on a node, for each of the n chunks of ``data`` in order
    up      1. Wait for the chunk from all children; one Reduce over own chunk and theirs, by place.
               Root: times the kind's factor, and in kind ``update`` Call the update of the chunk.
            2. Others: Put the sum into the parent's slot.
    down    3. Wait for the parent's result, which comes into place; Put it to the children, the
               last first, since its subtree is the deepest. In the end Flush.
    An exchange goes up and down; with several chunks in two lanes, so that chunk k's way down
    overlaps chunk k + 1's way up. Kind ``reduce`` goes up only, ``broadcast`` down only.

Cost, with t(b) the time of one message and its reduction; S per link and direction
    tree            ceil(log2 P) latencies up, as many down; inbox of ceil(log2 P) S, because
                    buffers are symmetric (the root needs them all); S-Caffe's equation (1)
    kary            (n + d - 1) arity t(S/n) one way, depth d = ceil(log_arity(P)) or so; arity S
    chain           (n + P - 2) t(S/n) one way, S-Caffe's equation (2); an exchange
                    (n + 2 (P - 1) - 1) t(S/n); inbox of S. Best for large S and few ranks: on the
                    paper's machine from 8 MB on, with up to 8 ranks
    chain-chain     (n + q + m - 3) t(S/n) at most, with m = ceil(P / q) heads, which take two
                    chunks per step; inbox of 2 S
    chain-binomial  (n + q + ceil(log2 m) - 2) t(S/n), the root taking up to ceil(log2 m) + 1 chunks
                    per step: with many, its own link decides; inbox of (1 + ceil(log2 m)) S

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
    Chunk k has its own place in each slot, so chunks of one execution need no credits.

Wire precision
    Own data is cast to ``wire_out`` and sums travel, and are reduced, in wire precision
    (accumulating wider, rounding once per hop). The result lands in ``wire_out``, is forwarded from
    there and cast back by all, the root included: all ranks end with the same bits. ``update``
    sends gradients so, but weights as they are: rounded weights would swallow small updates.

Example: chain, P = 3, root 0, 40 elements in 2 chunks [0:32] [32:40]. Rank 1 runs two lanes
    Wait 0;  Reduce data[0:32] = data[0:32] + inbox[0:32];    Put data[0:32] -> rank 0, notify 0
    Wait 1;  Reduce data[32:40] = data[32:40] + inbox[32:40]; Put data[32:40] -> rank 0, notify 1
and
    Wait 2;  Put data[0:32] -> rank 2, notify 2
    Wait 3;  Put data[32:40] -> rank 2, notify 3;  Flush
chain-chain, P = 5, chain_size 2, root 0: chains 0-1, 2-3 and 4; 0 has the children 1 and
2, 2 has 3 and 4. 40 elements in one chunk, slots of 48. Rank 2 runs
    Wait 0;  Wait 1;  Reduce data[0:40] = data[0:40] + inbox[0:40] + inbox[48:88]
    Put data[0:40] -> rank 0 inbox[48:88], notify 1;  Wait 2
    Put data[0:40] -> rank 4 data[0:40], notify 2;  the same -> rank 3;  Flush
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pgasdl.plans.algorithms.blocks import chunks_of, flag, flushed, padded
from pgasdl.plans.algorithms.hierarchy import suits, tuned
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Binomial, Chain, Groups, Kary, Shape, TwoLevel
from pgasdl.plans.plan import (
    EXCHANGES,
    ROOTED,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Sizes,
    Span,
    Step,
    Wait,
    never,
    not_tuned,
)

# S-Caffe: the benefit of longer chains decreases beyond this.
_CHAIN_SIZE = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A neighbour in the tree: its rank, and the child's place at the parent."""

    rank: int
    place: int


def numbering(view: RankView, root: int, group_size: Sizes = 0) -> Groups:
    """Return the numbering of ranks from the root; 0: they are one group."""
    return Groups(view.size, group_size or view.size, view.require_root(root))


class TreeView:
    """One rank's neighbours in a tree, and its steps."""

    def __init__(self, view: RankView, shape: Shape, ranks: Groups, chunks: int) -> None:
        self.view = view
        self.degree = shape.degree
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
        inbox = 0 if self.view.kind == "broadcast" else self.degree * self.slot
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


def _spec(
    name: str,
    summary: str,
    shape: Callable[[Groups, Sizes], Shape],
    option: str = "",
    usual: int = 0,
    *,
    groups: bool = False,
    chunks: int = 0,
    chosen: bool = True,
) -> PlanSpec:
    """Return a row of the table; ``hierarchy`` may choose the plan, unless ``chosen`` is False.

    ``option`` goes into ``shape``; with ``groups`` it is the size of a group.
    """
    n_chunks = chunks

    def build(
        rank: int,
        size: int,
        count: int,
        *,
        kind: str = "average",
        wire: bool = False,
        root: int = 0,
        chunks: int = n_chunks,
        **options: Sizes,
    ) -> Plan:
        view, value = RankView(name, rank, size, count, kind, wire), options.get(option, usual)
        view.require_sizes(option, value, min(usual, 1))
        ranks = numbering(view, root, value if groups else 0)
        view.require("chunks", chunks, 0)
        if view.idle:
            return view.plan()
        return TreeView(view, shape(ranks, value), ranks, chunks).plan()

    def inbox(size: int, count: int, root: int = 0, chunks: int = 0, **options: Sizes) -> int:
        value = options.get(option, usual)
        ranks = Groups(size, value if groups and value else size, root)
        return shape(ranks, value).degree * padded(count)

    return PlanSpec(
        name,
        build,
        summary,
        kinds=(*EXCHANGES, *ROOTED),
        suits=suits(name) if chosen else never,
        options=tuple(filter(None, ("root", option, "chunks"))),
        several=(option,) if groups else (),
        tuned=tuned(name) if chosen else not_tuned,
        shares=True,
        by_element=True,
        inbox=inbox,
    )


def _kary(ranks: Groups, arity: Sizes) -> Shape:
    assert isinstance(arity, int)
    return Kary(ranks.size, arity)


def _binomial(ranks: Groups, group_size: Sizes) -> Shape:
    return TwoLevel(ranks, Binomial, Binomial) if group_size else Binomial(ranks.size)


SPECS = (
    _spec(
        "chain",
        "chunked chain and back: S per link and direction at full overlap, latency of P hops",
        lambda ranks, _: Chain(ranks.size),
    ),
    _spec(
        "chain-binomial",
        "chunked chains of chain_size ranks, their heads in a binomial tree: for many ranks",
        lambda ranks, _: TwoLevel(ranks, Chain, Binomial),
        "chain_size",
        _CHAIN_SIZE,
        groups=True,
    ),
    _spec(
        "chain-chain",
        "chunked chains of chain_size ranks, their heads in a chain: S per link, to some 64 ranks",
        lambda ranks, _: TwoLevel(ranks, Chain, Chain),
        "chain_size",
        _CHAIN_SIZE,
        groups=True,
    ),
    _spec(
        "tree",
        "binomial tree up and down: 2 ceil(log2 P) latencies, S per link, inbox of ceil(log2 P) S",
        _binomial,
        "group_size",
        groups=True,
        chunks=1,
    ),
    _spec(
        "kary",
        "tree of arity 2, or another, in chunks: depth log P, inbox of arity S whatever P",
        _kary,
        "arity",
        2,
        chosen=False,
    ),
)
