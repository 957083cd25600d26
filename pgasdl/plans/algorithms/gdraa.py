"""GDRAA: scatter, average, broadcast; every rank owns one block of the elements.

Paper
    MiMatrix, algorithm 1, "GPUDirect RDMA-aware allreduce": one-sided, every rank to every rank,
    two synchronizations per iteration, which is the minimum.

Steps, on rank r of P, with S bytes in P blocks (r owns block r)
    1. Put block j of ``data`` into rank j's inbox, for every other j, starting behind r.
    2. Wait for P - 1 blocks; one Reduce over own block and inbox, always in rank order 0..P-1.
       Kind ``update``: Call the update of block r of ``weights``.
    3. Put the reduced block (``update``: the new weights) into the same place at every other
       rank; wait for their blocks; Flush.

    Blocks are whole cache lines, so few elements leave the last ranks without a block. Such a
    rank only sends and receives: a layer of up to 16 elements has one owner.
    ``reduce-scatter`` is 1 and 2, ``all-gather`` is 3.

Cost
    2 latencies; (P-1)/P S sent and received per rank and phase, 2(P-1)/P S in total.
    Inbox: P - 1 slots of one block, in which the slot of sender i is i (i < r) or i - 1.

Notifications
    i: block from rank i is in my inbox. P + i: rank i's result is here.
    reduce-scatter: P + i: rank i's inbox is free (credit). all-gather: i: its ``data`` is (credit).

Which message proves a buffer free
    my ``data[j]`` (source of a scatter)    rank j's result: it had my block before it made it
    my inbox slot of rank j                 my own result: j waits for it before it sends again
    peers' ``data[r]`` / ``weights[r]``     their scatter to me: they had begun this execution
    my ``data[r]`` (source of the result)   nobody answers it: Flush
    reduce-scatter, all-gather (one way)    the receiver's credit, raised when it begins; Flush

Wire precision
    Step 1 casts block j into ``wire_out`` and puts it from there into ``wire_in``. The owner
    rounds its own block too, reduces from wire to wire (accumulating wider, rounding once), and
    the result lands in ``wire_out`` at every rank, which casts it back, the owner included: all
    ranks end with the same bits. ``update`` sends gradients so, but weights as they are: rounded
    weights would swallow small updates.

Example: P = 3, 40 elements, blocks [0:16] [16:32] [32:40], slots of 16. Rank 1 runs
    Put data[32:40] -> rank 2 inbox[16:24], notify 1
    Put data[0:16] -> rank 0 inbox[0:16], notify 1
    Wait 0; Wait 2; Reduce data[16:32] = 1/3 * (inbox[0:16] + data[16:32] + inbox[16:32])
    Put data[16:32] -> rank 2 data[16:32], notify 4; the same -> rank 0
    Wait 3; Wait 5; Flush
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import block_slots, blocks, flag, flushed, padded, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Plan, PlanSpec, Put, Reduce, Span, Step, Wait, always

# Below this many elements one cast of everything costs less than a step per block. Above, casts
# block by block overlap with the sending.
CAST_AT_ONCE = 16384


def build(rank: int, size: int, count: int, *, kind: str = "average", wire: bool = False) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("gdraa", rank, size, count, kind, wire)
    if view.idle:
        return view.plan()
    exchange = _Exchange(view)
    inbox = 0 if kind == "all-gather" else block_slots(size, count)
    return view.plan([exchange.steps()], 2 * size, inbox)


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView) -> None:
        self.view = view
        self.rank, self.size = view.rank, view.size
        self.peers = peers_after(view.rank, view.size)
        self.parts = blocks(view.count, view.size)
        self.slot = padded(self.parts[0][1])
        self.piecewise = view.wire and view.count > CAST_AT_ONCE

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        kind = self.view.kind
        if kind == "reduce-scatter":
            yield from flushed((*self.scatter(), *self.reduce()))
            return
        if kind != "all-gather":
            yield from self.scatter()
            yield from self.reduce()
        yield from flushed((*self.spread(), *self.collect()))

    def inbox(self, sender: int, owner: int) -> Span:
        """Slot of ``sender`` at ``owner``, which has none for itself."""
        return Span(self.view.receive, self.slot * (sender if sender < owner else sender - 1))

    def scatter(self) -> Iterator[Step]:
        """Yield step 1, and the rounding of the own block."""
        credit = self.view.kind == "reduce-scatter"
        own = self.parts[self.rank]
        if credit and own[1]:
            for peer in self.peers:
                yield flag(peer, self.size + self.rank)
        if not self.piecewise:
            yield from self.view.to_wire(0, self.view.count)
        for peer in self.peers:
            offset, n = self.parts[peer]
            if n:
                if self.piecewise:
                    yield from self.view.to_wire(offset, n)
                if credit:
                    yield Wait(self.size + peer, peer)
                source = Span(self.view.send, offset)
                yield Put(source, n, peer, self.inbox(self.rank, peer), self.rank)
        if self.piecewise:
            yield from self.view.to_wire(*own)

    def reduce(self) -> Iterator[Step]:
        """Yield step 2, for a rank that owns a block."""
        offset, n = self.parts[self.rank]
        if not n:
            return
        # Rank - 1 sent here first: between equally fast ranks, blocks arrive in this order.
        for peer in reversed(self.peers):
            yield Wait(peer, peer)
        srcs = tuple(
            Span(self.view.send, offset) if sender == self.rank else self.inbox(sender, self.rank)
            for sender in range(self.size)
        )
        yield Reduce((self.view.reduced(offset),), srcs, n, self.view.scale)
        yield from self.view.update(offset, n)

    def spread(self) -> Iterator[Step]:
        """Yield the Puts of step 3."""
        credit = self.view.kind == "all-gather"
        if credit:
            for peer in self.peers:
                if self.parts[peer][1]:
                    yield flag(peer, self.rank)
        offset, n = self.parts[self.rank]
        result = Span(self.view.result, offset)
        for peer in self.peers if n else ():
            if credit:
                yield Wait(peer, peer)
            yield Put(result, n, peer, result, self.size + self.rank)

    def collect(self) -> Iterator[Step]:
        """Yield the Waits of step 3, and the casts of results in wire precision."""
        if self.piecewise:
            yield from self.view.from_wire(*self.parts[self.rank])
        for owner in reversed(self.peers):
            offset, n = self.parts[owner]
            if n:
                yield Wait(self.size + owner, owner)
                if self.piecewise:
                    yield from self.view.from_wire(offset, n)
        if not self.piecewise:
            yield from self.view.from_wire(0, self.view.count)


SPEC = PlanSpec(
    "gdraa",
    build,
    "scatter, average, broadcast: 2 latencies, 2(P-1)/P S per rank, inbox of P-1 blocks",
    kinds=("average", "sum", "update", "reduce-scatter", "all-gather"),
    suits=always,
    shares=True,
    by_element=True,
    inbox=block_slots,
)
