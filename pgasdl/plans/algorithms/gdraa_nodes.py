"""GDRAA between nodes, on blocks that each node has summed inside itself.

Paper
    MiMatrix: a worker with several GPUs sums inside the node and takes part in GDRAA as one;
    swCaffe likewise sums its four core groups before the network. Here every rank of a node speaks
    for one block of it, so that all of a node's links are in use.

Steps, on rank r of P; N nodes of neighbours, as large as ``group_size`` says; S bytes in q blocks,
block b in N sub-blocks, one for each node. In node m block b is held by its rank number
b mod (ranks of m). Nodes of q ranks each: one block each.
    Unlike nodes: q is a multiple of the ranks of the smallest, the last that is not beyond those of
    the largest. So the ranks of the smallest hold as much as each other, no rank of a larger one
    holds more, and more than half of every node's ranks hold a block. A holder of several sends no
    more messages across than gdraa: else q is a smaller multiple.
    1. Inside: Put each block to its holder's slot; wait for the mates' blocks; Reduce, by rank.
       ``direct``: flag "my data is ready" to all mates; load their blocks in one Reduce instead.
    2. Across, for a block that r holds: Put sub-block m' into its slot at the holder in node m'.
       Wait for the other nodes' sub-blocks; one Reduce, by node, times the kind's factor. Kind
       ``update``: Call the update. Put the result into place at the other holders; wait for theirs.
    3. Inside: Put the whole block to all mates; wait for their blocks. Flush.
       ``direct``: store it to all mates in one Reduce, flag "done", wait for their flags.

Cost
    Across: 2 latencies, 2 (N-1)/N S/q per rank, 2 (N-1)/N S per node. Inside: 2 latencies and
    2 (q-1)/q S, or with ``direct`` loads and stores. Inbox: (q-1)/q S + (N-1)/N S/q. With H blocks
    of one holder across H times as much per rank, and as much per node.

Kinds ``reduce-scatter`` and ``all-gather``: see ``node_blocks``.

Where nobody names a plan
    Nodes, if some have several ranks, run it at every size, but for the small arrays that
    ``halving-doubling`` takes: plain gdraa sends each byte across q times.
    Simulated on nodes of 8 with one adapter of 12.5 GB/s each (across 1.5 us, inside 0.5 us; memory
    10 GB/s), microseconds of ``direct``, of messages, of halving-doubling by nodes, and of gdraa:
        4 nodes     64 B: 6, 6, 11, 12      64 KiB: 25, 30, 29, 66      1 MiB: 314, 389, 361, 1013
        32 nodes    64 B: 15, 15, 22, 82    16 KiB: 27, 29, 26, 156     1 MiB: 356, 418, 397, 1349
    and on nodes of 7, 8 and 8, of messages and of gdraa: 64 KiB: 22, 60     16 MiB: 4144, 14007
    With 2 nodes of 2 gdraa is faster up to 16 KiB, by 0.8 us at most, and beyond that, if mates do
    not load, by 5 % at most; it still sends twice as much across, which other jobs feel.

Notifications, with h the number of a block among those its holder holds, H the most of any, and
A the most of (blocks of a holder) * (ranks of its node)
    h (ranks of the node) + i: block from mate number i.  ``direct``: h is 0, and i is ready.
    A + (h N + m) 2: sub-block from node m; + 1: m's result.  A + 2 H N + b: result of block b.

Which message proves a buffer free
    inside, my source, the holder's slot    the holder's result (3): made after it had read them
    across, my source, the slot there       that node's result (2), for the same reason
    holders' ``data`` / ``weights``         their scatter to me: they had begun this execution
    mates' ``data`` / ``weights``           their block, or ready flag: they had begun it
    ``direct``: my ``data``                 the holder's done flag: it neither loads nor stores more
    my results' sources                     nobody answers them: Flush

Wire precision: as in ``trees``, the sums inside a node being rounded once; not with ``direct``.

Example: P = 3, group_size 2: ranks 0 and 1 are a node, rank 2 another, which holds both blocks,
[0:32] and [32:40]. Block 0 has the sub-blocks [0:16] [16:32], block 1 only [32:40], of node 0.
H = A = 2; slots from mates at 0, from nodes at 32 and 48. Rank 0 runs
    Put data[32:40] -> rank 1 inbox[0:8], notify 0;  Wait 1
    Reduce data[0:32] = data[0:32] + inbox[0:32]
    Put data[16:32] -> rank 2 inbox[32:48], notify 2;  Wait 4
    Reduce data[0:16] = 1/3 * (data[0:16] + inbox[32:48])
    Put data[0:16] -> rank 2, notify 3;  Wait 5
    Put data[0:32] -> rank 1, notify 10;  Wait 11;  Flush
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms import node_blocks
from pgasdl.plans.algorithms.blocks import blocks, edge, flag, padded
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import (
    EXCHANGES,
    Case,
    Flush,
    Members,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Sizes,
    Span,
    Step,
    Wait,
    begins,
    lengths,
)

_KINDS = (*EXCHANGES, "reduce-scatter", "all-gather")


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    group_size: Sizes = 4,
    direct: int = 0,
    order: tuple[int, ...] = (),
) -> Plan:
    """Return rank's plan of the exchange that this module describes.

    ``direct`` : 1 if the ranks of a node map each other's memory; no use with ``wire``, since it
    loads memory as it is, or in kinds that are no exchanges
    ``order`` : rank r has block ``order[r]`` in kinds that give each a block; (): block r
    """
    view = RankView("gdraa-nodes", rank, size, count, kind, wire)
    view.require_sizes("group_size", group_size)
    if direct not in (0, 1):
        raise PlanError(f"plan gdraa-nodes: direct is {direct}, 0 or 1 is needed")
    if order and sorted(order) != list(range(size)):
        raise PlanError(f"plan gdraa-nodes: order {order} is not one of {size} ranks")
    direct = int(direct and not wire and view.exchange)
    if view.idle:
        return view.plan(mapped=bool(direct))
    if not view.exchange:
        return node_blocks.build(view, begins(size, group_size), order)
    node = _Node(view, group_size, bool(direct))
    return view.plan([node.steps()], node.notifications, node.inbox, mapped=node.direct)


def _blocks_for(size: int, group_size: Sizes) -> int:
    """Return the number of blocks that nodes of these sizes hold.

    >>> [_blocks_for(*case) for case in ((32, 8), (23, (7, 8, 8)), (10, (2, 5, 3)), (9, (8, 1)))]
    [8, 7, 4, 8]
    """
    each = lengths(size, group_size)
    if len(each) == 1:
        return size
    least = min(each)
    return least * max(1, min(max(each) // least, (size - 1) // (len(each) - 1)))


def _inbox(
    size: int, count: int, group_size: Sizes = 4, direct: int = 0, order: Sizes = ()
) -> tuple[int, int]:
    """Return the elements of the slots for blocks of the own node, and those of all slots."""
    del order
    sizes, nodes = set(lengths(size, group_size)), len(begins(size, group_size)) - 1
    q = _blocks_for(size, group_size)
    first = edge(count, q, 1)
    # Each holder numbers the slots of its blocks from 0.
    inside = 0 if direct else max(-(-q // n) * (n - 1) for n in sizes)
    across = max(-(-q // n) for n in sizes) * (nodes - 1) * padded(edge(first, nodes, 1))
    return inside * padded(first), inside * padded(first) + across


class _Node(node_blocks.NodeView):
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView, group_size: Sizes, direct: bool) -> None:
        super().__init__(view, begins(view.size, group_size))
        self.direct = direct
        sizes = set(lengths(view.size, group_size))
        self.q = _blocks_for(view.size, group_size)
        self.blocks = blocks(view.count, self.q)
        held = {n: -(-self.q // n) for n in sizes}
        self.parts = [blocks(n, self.nodes) for _, n in self.blocks]
        self.block_slot = padded(self.blocks[0][1])
        self.sub_slot = padded(self.parts[0][0][1])
        self.across, self.inbox = _inbox(view.size, view.count, group_size, direct)
        self.first_across = max(held[n] * n for n in sizes)
        self.first_done = self.first_across + max(held.values()) * 2 * self.nodes
        self.notifications = self.first_done + self.q

    def holder(self, node: int, block: int) -> int:
        """Return the rank that holds a block in a node."""
        ranks = self.ranks_of(node)
        return ranks[block % len(ranks)]

    def own(self, node: int, block: int) -> int:
        """Return the number of a block among its holder's blocks."""
        return block // len(self.ranks_of(node))

    def sub(self, block: int, node: int) -> tuple[int, int]:
        """Return offset and length of the part of a block that a node reduces."""
        begin, length = self.parts[block][node]
        return self.blocks[block][0] + begin, length

    def mine(self) -> list[int]:
        """Return the non-empty blocks that this rank holds."""
        held = range(self.place, self.q, len(self.ranks))
        return [block for block in held if self.blocks[block][1]]

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        yield from self.view.to_wire(0, self.view.count)
        yield from self.load() if self.direct else self.gather()
        for block in self.mine():
            yield from self.scatter(block)
        for block in self.mine():
            yield from self.reduce(block)
        for block in self.mine():
            yield from self.finish(block)
        for block in range(self.q):
            holder = self.holder(self.node, block)
            if holder != self.view.rank and self.blocks[block][1]:
                yield Wait(self.first_done + block, holder)
        yield from self.view.from_wire(0, self.view.count)
        reduced = any(self.sub(block, self.node)[1] for block in self.mine())
        if (reduced and self.nodes > 1) or (self.mine() and self.mates and not self.direct):
            yield Flush()

    # Inside the node

    def load(self) -> Iterator[Step]:
        """Yield step 1, where memory is mapped."""
        holders = [mate for mate in self.mates if self.holds(mate)]
        for mate in holders:
            yield flag(mate, self.place)
        if not self.mine():
            return
        for mate in reversed(self.mates):
            yield Wait(mate - self.ranks.start, mate)
        for block in self.mine():
            offset, _ = self.blocks[block]
            yield from self.sum_of(
                block,
                [
                    Span("data", offset, None if rank == self.view.rank else rank)
                    for rank in self.ranks
                ],
            )

    def holds(self, mate: int) -> bool:
        """Whether a mate holds a non-empty block: then its first block is not empty."""
        place = mate - self.ranks.start
        return place < self.q and self.blocks[place][1] > 0

    def gather(self) -> Iterator[Step]:
        """Yield step 1, by messages."""
        for block, (offset, n) in enumerate(self.blocks):
            holder = self.holder(self.node, block)
            if holder != self.view.rank and n:
                own = self.own(self.node, block)
                slot = self.mate_slot(own, self.view.rank, holder)
                source = Span(self.view.send, offset)
                yield Put(source, n, holder, slot, own * len(self.ranks) + self.place)
        for block in self.mine():
            offset, _ = self.blocks[block]
            own = self.own(self.node, block)
            for mate in reversed(self.mates):
                yield Wait(own * len(self.ranks) + mate - self.ranks.start, mate)
            yield from self.sum_of(
                block,
                [
                    Span(self.view.send, offset)
                    if rank == self.view.rank
                    else self.mate_slot(own, rank, self.view.rank)
                    for rank in self.ranks
                ],
            )

    def sum_of(self, block: int, srcs: list[Span]) -> Iterator[Step]:
        """Yield the node's sum of a block, if it has mates; with one node, the result."""
        offset, n = self.blocks[block]
        if self.nodes == 1:
            yield Reduce((self.view.reduced(offset),), tuple(srcs), n, self.view.scale)
            yield from self.view.update(offset, n)
        elif self.mates:
            yield Reduce((Span(self.view.send, offset),), tuple(srcs), n)

    def mate_slot(self, own: int, sender: int, holder: int) -> Span:
        """Return where a holder receives a mate's block."""
        place = own * len(self.mates) + sender - self.ranks.start - (sender > holder)
        return Span(self.view.receive, place * self.block_slot)

    def finish(self, block: int) -> Iterator[Step]:
        """Yield the end of step 2, from the other nodes' results on, and step 3."""
        for node in self.other_nodes():
            if self.sub(block, node)[1]:
                yield Wait(self.flag_of(block, node) + 1, self.holder(node, block))
        offset, n = self.blocks[block]
        result = Span(self.view.result, offset)
        if self.direct and self.mates:
            there = tuple(Span(self.view.result, offset, mate) for mate in self.mates)
            yield Reduce(there, (result,), n)
        for mate in self.mates:
            done = self.first_done + block
            yield flag(mate, done) if self.direct else Put(result, n, mate, result, done)

    # Across nodes

    def flag_of(self, block: int, node: int, at: int | None = None) -> int:
        """Return the flag that a node's sub-block is here (or at the holder in node ``at``)."""
        own = self.own(self.node if at is None else at, block)
        return self.first_across + (own * self.nodes + node) * 2

    def node_slot(self, block: int, sender: int, at: int) -> Span:
        """Return where the holder in node ``at`` receives another node's sub-block."""
        place = self.own(at, block) * (self.nodes - 1) + sender - (sender > at)
        return Span(self.view.receive, self.across + place * self.sub_slot)

    def scatter(self, block: int) -> Iterator[Step]:
        """Yield step 2: the node's sums, to the holders that reduce them."""
        for node in self.other_nodes():
            offset, n = self.sub(block, node)
            if n:
                source, slot = Span(self.view.send, offset), self.node_slot(block, self.node, node)
                notify = self.flag_of(block, self.node, node)
                yield Put(source, n, self.holder(node, block), slot, notify)

    def reduce(self, block: int) -> Iterator[Step]:
        """Yield step 2: the reduction of my node's part, and its result to all nodes."""
        offset, n = self.sub(block, self.node)
        if not n or self.nodes == 1:
            return
        for node in reversed(self.other_nodes()):
            yield Wait(self.flag_of(block, node), self.holder(node, block))
        own = Span(self.view.send, offset)
        srcs = tuple(
            own if node == self.node else self.node_slot(block, node, self.node)
            for node in range(self.nodes)
        )
        yield Reduce((self.view.reduced(offset),), srcs, n, self.view.scale)
        yield from self.view.update(offset, n)
        result = Span(self.view.result, offset)
        for node in self.other_nodes():
            notify = self.flag_of(block, self.node, node) + 1
            yield Put(result, n, self.holder(node, block), result, notify)


def _options_of(members: Members, piece: int) -> dict[str, Any]:
    del piece
    return {"group_size": members.node_size, "direct": int(members.mapped_on_node)}


def _suits(case: Case) -> bool:
    return case.members.several_nodes and case.kind in _KINDS


SPEC = PlanSpec(
    "gdraa-nodes",
    build,
    "sums inside nodes of group_size ranks, gdraa between them: 2(N-1)/N S per node on the network",
    kinds=_KINDS,
    options=("group_size", "direct", "order"),
    several=("group_size", "order"),
    suits=_suits,
    options_of=_options_of,
    shares=True,
    by_element=True,
    inbox=lambda *args, **options: _inbox(*args, **options)[1],
)
