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

Cost
    2 latencies; (P-1)/P S sent and received per rank and phase, 2(P-1)/P S in total.
    Inbox: P - 1 slots of one block, in which the slot of sender i is i (i < r) or i - 1.

Notifications
    i: block from rank i is in my inbox. P + i: rank i's result is here.

Which message proves a buffer free
    my ``data[j]`` (source of a scatter)    rank j's result: it had my block before it made it
    my inbox slot of rank j                 my own result: j waits for it before it sends again
    peers' ``data[r]`` / ``weights[r]``     their scatter to me: they had begun this execution
    my ``data[r]`` (source of the result)   nobody answers it: Flush

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

from pgasdl.plans.blocks import blocks, cast, padded, peers_after, scale_of
from pgasdl.plans.plan import Call, Flush, Plan, PlanSpec, Put, Reduce, Span, Step, Wait

# Below this many elements one cast of everything costs less than the steps that casting block by
# block adds; above, blocks cast and sent one after another overlap with the wire.
CAST_AT_ONCE = 16384


def build(rank: int, size: int, count: int, *, kind: str = "average", wire: bool = False) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    exchange = _Exchange(rank, size, count, kind, wire)
    steps: tuple[Step, ...] = ()
    if size > 1 and count:
        steps = (*exchange.scatter(), *exchange.reduce(), *exchange.collect())
    elif count and kind == "update":
        steps = (Call("update", Span("data", 0), count),)
    lanes = (steps,) if steps else ()
    return Plan("gdraa", rank, size, count, lanes, exchange.buffers(), 2 * size)


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, rank: int, size: int, count: int, kind: str, wire: bool) -> None:
        self.rank, self.size, self.count, self.kind, self.wire = rank, size, count, kind, wire
        self.peers = peers_after(rank, size)
        self.parts = blocks(count, size)
        self.slot = padded(self.parts[0][1])
        self.send, self.receive = ("wire_out", "wire_in") if wire else ("data", "inbox")
        self.result = "weights" if kind == "update" else self.send
        self.piecewise = wire and count > CAST_AT_ONCE

    def buffers(self) -> dict[str, int]:
        """Elements of each buffer."""
        sizes = {"data": self.count}
        if self.kind == "update":
            sizes["weights"] = self.count
        if self.size > 1 and self.count:
            sizes[self.receive] = (self.size - 1) * self.slot
            if self.wire:
                sizes["wire_out"] = self.count
        return sizes

    def inbox(self, sender: int, owner: int) -> Span:
        """Slot of ``sender`` at ``owner``, who has none for itself."""
        return Span(self.receive, self.slot * (sender if sender < owner else sender - 1))

    def scatter(self) -> Iterator[Step]:
        """Step 1, and the rounding of the own block."""
        if self.wire and not self.piecewise:
            yield cast("data", "wire_out", 0, self.count)
        for peer in self.peers:
            offset, n = self.parts[peer]
            if n:
                if self.piecewise:
                    yield cast("data", "wire_out", offset, n)
                yield Put(Span(self.send, offset), n, peer, self.inbox(self.rank, peer), self.rank)
        offset, n = self.parts[self.rank]
        if n and self.piecewise:
            yield cast("data", "wire_out", offset, n)

    def reduce(self) -> Iterator[Step]:
        """Step 2 and the Puts of step 3, for a rank that owns a block."""
        offset, n = self.parts[self.rank]
        if not n:
            return
        # Rank - 1 sent here first: between equally fast ranks, blocks arrive in this order.
        for peer in reversed(self.peers):
            yield Wait(peer, peer)
        srcs = tuple(
            Span(self.send, offset) if sender == self.rank else self.inbox(sender, self.rank)
            for sender in range(self.size)
        )
        reduced = Span("data" if self.kind == "update" else self.send, offset)
        yield Reduce((reduced,), srcs, n, scale_of(self.kind, self.size))
        if self.kind == "update":
            yield Call("update", reduced, n)
        result = Span(self.result, offset)
        for peer in self.peers:
            yield Put(result, n, peer, result, self.size + self.rank)

    def collect(self) -> Iterator[Step]:
        """The Waits of step 3; results that came in wire precision are cast back; Flush."""
        back = self.result == "wire_out"
        offset, n = self.parts[self.rank]
        if back and self.piecewise and n:
            yield cast("wire_out", "data", offset, n)
        for owner in reversed(self.peers):
            if self.parts[owner][1]:
                yield Wait(self.size + owner, owner)
                if back and self.piecewise:
                    yield cast("wire_out", "data", *self.parts[owner])
        if back and not self.piecewise:
            yield cast("wire_out", "data", 0, self.count)
        if n:
            yield Flush()


SPEC = PlanSpec(
    "gdraa",
    build,
    "scatter, average, broadcast: 2 latencies, 2(P-1)/P S per rank, inbox of P-1 blocks",
)
