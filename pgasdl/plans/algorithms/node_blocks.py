"""Reduce-scatter and all-gather between nodes: each element leaves or enters a node once.

Paper
    The hierarchy is that of ``gdraa_nodes``, of which these are the kinds with a block per rank.

A node's speakers: of the blocks of all other nodes, in the order of elements, each of the node's s
ranks speaks for a run of neighbours, all runs having as many blocks, but for one. A run's elements
lie together, but for gaps where the node's own blocks lie.

Steps, on rank r of P in node m of N
    reduce-scatter
        1. Put every mate's run and its block into its slots for me; wait for all mates; Reduce the
           node's sum of my run, and of my block, by rank.
        2. Put each block of my run to its owner. Wait for the sums of my block from the other
           nodes' speakers; Reduce them, by node.
    all-gather
        1. Put my block into place at all mates, and at the speakers for it in the other nodes.
        2. Wait for the blocks of my run; Put it to all mates. Wait for their blocks and runs.

Cost
    Across: (N-1) S in all, the minimum: each element makes a hop to, or from, every other node.
    2 latencies; per rank (N-1) messages, and one for each block of its run, P/s or so.
    Inbox, reduce-scatter: (s-1) ceil(P/s) + N-1 blocks.
    Simulated on nodes of 8 as in ``gdraa_nodes``, microseconds of this, halving-doubling, and gdraa
    reduce-scatter  4 nodes   4 KiB: 11, 10, 21    64 KiB: 25, 42, 50    1 MiB: 247, 577, 619
                    32 nodes  4 KiB: 21, 18, 107   64 KiB: 41, 50, 172   1 MiB: 284, 665, 1402
    all-gather      32 nodes  4 KiB: 22, 18, 107   64 KiB: 35, 49, 172   1 MiB: 175, 660, 1402
    Halves of neighbours' blocks send (P-q) S across, with 8 ranks a node 8 times as much, which
    other jobs feel; so this is taken at every size.

Notifications, raised by rank i
    i: its place for my elements is free (credit). P + i: its elements are here.

Which message proves a buffer free
    slots, or ``data`` of an all-gather     the receiver's credit, raised when it begins
    my sources                              nobody answers them: Flush

Example: P = 3, ranks 0 and 1 are a node, rank 2 another; 48 elements, a block of 16 each.
reduce-scatter: slots from mates at 0 and 16, from the other node at 32. Rank 0 speaks for rank 2's
block, rank 2 for both others, and rank 1 for none. Rank 0 runs
    Put nothing -> rank 1, notify 0;  the same -> rank 2;  Wait 1
    Put data[16:32] -> rank 1 inbox[0:16], notify 3;  Wait 4
    Reduce data[0:16] = data[0:16] + inbox[0:16];  Reduce data[32:48] = data[32:48] + inbox[16:32]
    Wait 2;  Put data[32:48] -> rank 2 inbox[32:48], notify 3
    Wait 5;  Reduce data[0:16] = data[0:16] + inbox[32:48];  Flush
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pgasdl.plans.algorithms.blocks import blocks, edge, flag, flushed, padded, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Plan, Put, Reduce, Span, Step, Wait


def build(view: RankView, begins: Sequence[int], order: Sequence[int]) -> Plan:
    """Return rank's plan of at least one element between at least two ranks.

    ``begins`` : where each node begins, and the number of ranks; ``order`` : the block of each
    rank, or ().
    """
    node = _Node(view, begins, order or range(view.size))
    gathers = view.kind == "all-gather"
    steps = node.gather() if gathers else node.reduce()
    return view.plan([flushed(steps)], 2 * view.size, 0 if gathers else node.inbox)


class NodeView:
    """One rank among nodes of neighbours; ``begins`` has the first rank of each, and the end."""

    def __init__(self, view: RankView, begins: Sequence[int]) -> None:
        self.view, self.rank, self.begins = view, view.rank, begins
        self.nodes = len(begins) - 1
        self.node = bisect_right(begins, view.rank) - 1
        self.ranks = self.ranks_of(self.node)
        self.place = view.rank - self.ranks.start
        self.mates = [self.ranks[place] for place in peers_after(self.place, len(self.ranks))]

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self.begins[node], self.begins[node + 1])

    def other_nodes(self) -> list[int]:
        """Return all nodes but mine, beginning behind it."""
        return peers_after(self.node, self.nodes)


class _Node(NodeView):
    """One rank's side. Blocks are known by their number, ranks by their place in ``begins``."""

    def __init__(self, view: RankView, begins: Sequence[int], order: Sequence[int]) -> None:
        super().__init__(view, begins)
        self.blocks = [part for part in blocks(view.count, view.size) if part[1]]
        self.number = order  # of each rank's block
        self.owner = sorted(range(view.size), key=order.__getitem__)
        self.others = [
            number for number in range(len(self.blocks)) if self.owner[number] not in self.ranks
        ]
        self.run = self.run_of(view.rank)
        self.own = [view.rank] if self.has_block(view.rank) else []
        self.slot = padded(self.blocks[0][1])
        sizes = {end - begin for begin, end in pairwise(begins)}
        self.from_nodes = max((n - 1) * -(-view.size // n) for n in sizes) * self.slot
        self.inbox = self.from_nodes + (self.nodes - 1) * self.slot

    def has_block(self, rank: int) -> bool:
        """Whether a rank's block is not empty."""
        return self.number[rank] < len(self.blocks)

    def run_of(self, mate: int) -> list[int]:
        """Return the blocks that a rank of this node speaks for."""
        place, n = mate - self.ranks.start, len(self.ranks)
        low, high = (edge(len(self.others), n, at, 1) for at in (place, place + 1))
        return self.others[low:high]

    def speakers(self) -> list[tuple[int, int]]:
        """Return the other nodes, beginning behind this one, each with its speaker for my block."""
        found = []
        mine = self.number[self.rank]
        for node in self.other_nodes() if self.own else ():
            ranks = self.ranks_of(node)
            theirs = sorted(self.number[ranks.start : ranks.stop])
            others = len(self.blocks) - bisect_left(theirs, len(self.blocks))
            at = mine - bisect_left(theirs, mine)
            edges = [edge(others, len(ranks), place, 1) for place in range(len(ranks) + 1)]
            found.append((node, ranks.start + bisect_right(edges, at) - 1))
        return found

    def parts(self, mate: int) -> list[tuple[int, int]]:
        """Return the elements of a rank's run and of its block, neighbours together."""
        numbers = self.run_of(mate) + ([self.number[mate]] if self.has_block(mate) else [])
        found: list[tuple[int, int]] = []
        for offset, n in sorted(self.blocks[number] for number in numbers):
            if found and sum(found[-1]) == offset:
                found[-1] = (found[-1][0], found[-1][1] + n)
            else:
                found.append((offset, n))
        return found

    def credits(self, senders: Sequence[int]) -> Iterator[Step]:
        """Raise the credits of all ranks that send to me."""
        for sender in senders:
            yield flag(sender, self.rank)

    def here(self, sender: int) -> Wait:
        """Wait until all elements that a rank has for me are here."""
        return Wait(self.view.size + sender, sender)

    def reduce(self) -> Iterator[Step]:
        """Yield the steps of a reduce-scatter."""
        view, mine, speakers = self.view, self.parts(self.rank), self.speakers()
        yield from self.credits((self.mates if mine else []) + [rank for _, rank in speakers])
        for mate in self.mates:
            parts = self.parts(mate)
            if parts:
                yield Wait(mate, mate)
            yield from self.put(parts, mate, self.slots(parts, self.rank, mate))
        if self.mates and mine:
            for mate in reversed(self.mates):
                yield self.here(mate)
            slots = {mate: self.slots(mine, mate, self.rank) for mate in self.mates}
            for at, (offset, n) in enumerate(mine):
                own = Span("data", offset)
                srcs = [own if r == self.rank else slots[r][at] for r in self.ranks]
                yield Reduce((own,), tuple(srcs), n)
        owners = [self.owner[number] for number in self.run]
        for owner in sorted(owners, key=lambda rank: (rank < self.rank, rank)):
            offset, n = self.blocks[self.number[owner]]
            yield Wait(owner, owner)
            slot = self.node_slot(self.node, bisect_right(self.begins, owner) - 1)
            yield Put(Span("data", offset), n, owner, slot, view.size + self.rank)
        if speakers:
            for _, rank in reversed(speakers):
                yield self.here(rank)
            offset, n = self.blocks[self.number[self.rank]]
            own = Span("data", offset)
            nodes = range(self.nodes)
            srcs = [own if m == self.node else self.node_slot(m, self.node) for m in nodes]
            yield Reduce((own,), tuple(srcs), n)

    def gather(self) -> Iterator[Step]:
        """Yield the steps of an all-gather."""
        size, speakers = self.view.size, self.speakers()
        owners = [self.owner[number] for number in self.run]
        giving = [mate for mate in self.mates if self.parts(mate)]
        yield from self.credits(owners + giving)
        if self.own:
            offset, n = self.blocks[self.number[self.rank]]
            block = Span("data", offset)
            for _, rank in speakers:
                yield Wait(rank, rank)
                yield Put(block, n, rank, block, size + self.rank)
        for owner in owners:
            yield self.here(owner)
        parts = self.parts(self.rank)
        for mate in self.mates if parts else ():
            yield Wait(mate, mate)
            yield from self.put(parts, mate, [Span("data", offset) for offset, _ in parts])
        for mate in reversed(giving):
            yield self.here(mate)

    def put(self, parts: list[tuple[int, int]], mate: int, at: list[Span]) -> Iterator[Step]:
        """Put parts to a mate, and raise its notification after them."""
        last = len(parts) - 1
        for number, ((offset, n), there) in enumerate(zip(parts, at, strict=True)):
            notify = self.view.size + self.rank if number == last else None
            yield Put(Span("data", offset), n, mate, there, notify)

    def slots(self, parts: list[tuple[int, int]], sender: int, at: int) -> list[Span]:
        """Return where a rank receives a mate's share of its parts."""
        place = sender - self.ranks.start - (sender > at)
        begin = place * -(-self.view.size // len(self.ranks)) * self.slot
        found = []
        for _, n in parts:
            found.append(Span("inbox", begin))
            begin += padded(n)
        return found

    def node_slot(self, sender: int, at: int) -> Span:
        """Return where a rank of node ``at`` receives the sum of its block in another node."""
        return Span("inbox", self.from_nodes + (sender - (sender > at)) * self.slot)
