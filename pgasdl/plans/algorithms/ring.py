"""Ring: blocks go round twice, first to be summed, then as results.

Paper
    The algorithms by rings that swCaffe (5.1) leaves aside for their p latencies: every rank talks
    to two neighbours only, whatever P, and each link carries the least that an exchange can need.

Steps on rank r of P, with S bytes in P blocks (r ends up with the sum of block r)
    1. For s = 0..P-2: Put block r - 1 - s (mod P) into slot s of the right neighbour; wait for
       block r - 2 - s in my slot s; Reduce it into ``data``. The last of them is block r: times the
       kind's factor, and in kind ``update`` Call the update.
    2. For s = 0..P-2: Put the result of block r - s into place at the right neighbour; wait for
       that of block r - 1 - s. Flush.
    ``reduce-scatter`` is 1, ``all-gather`` is 2. Blocks without elements are left out.

Cost
    2 (P-1) latencies; 2 (P-1)/P S sent and received per rank. Inbox: P - 1 slots of one block.

Notifications
    s: slot s is filled. P - 1 + s: result number s is here. 2 (P-1): credit, in one-way kinds.

Which message proves a buffer free
    exchange: a block that comes round as a result has passed every rank's step 1, so that
        my source of a block, the right neighbour's slot s      are free when the result is here
        the right neighbour's ``data`` of a block               it had sent it on before the sum was
                                                                complete
    reduce-scatter, all-gather (one way): the slots, or ``data``, of the right neighbour are free
        when its credit is here, raised when it begins
    my last source of each block: nobody answers it: Flush

Wire precision: as in ``trees``: sums are rounded once per hop, results travel as they are.

Example: P = 3, 40 elements, blocks [0:16] [16:32] [32:40], slots of 16. Rank 0 runs
    Put data[32:40] -> rank 1 inbox[0:8], notify 0
    Wait 0;  Reduce data[16:32] += inbox[0:16];  Put data[16:32] -> rank 1 inbox[16:32], notify 1
    Wait 1;  Reduce data[0:16] = 1/3 * (data[0:16] + inbox[16:32])
    Put data[0:16] -> rank 1, notify 2;  Wait 2;  Put data[32:40] -> rank 1, notify 3;  Wait 3
    Flush
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import block_slots, blocks, flag, flushed, padded
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Plan, PlanSpec, Put, Reduce, Span, Step, Wait


def build(rank: int, size: int, count: int, *, kind: str = "average", wire: bool = False) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("ring", rank, size, count, kind, wire)
    if view.idle:
        return view.plan()
    ring = _Ring(view)
    inbox = 0 if kind == "all-gather" else block_slots(size, count)
    return view.plan([ring.steps()], 2 * (size - 1) + 1, inbox)


class _Ring:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView) -> None:
        self.view = view
        self.left, self.right = (view.rank - 1) % view.size, (view.rank + 1) % view.size
        self.parts = blocks(view.count, view.size)
        self.slot = padded(self.parts[0][1])
        self.hops = view.size - 1

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        view = self.view
        if not view.exchange:
            # Every block goes round the ring, except back to where it began.
            first = view.rank if view.kind == "all-gather" else view.rank - 1
            if self.others_than(first):
                yield flag(self.left, 2 * self.hops)
            if self.others_than(first + 1):
                yield Wait(2 * self.hops, self.right)
        yield from view.to_wire(0, view.count)
        if view.kind == "reduce-scatter":
            yield from flushed(self.sums())
            return
        if view.kind != "all-gather":
            yield from self.sums()
        yield from flushed((*self.results(), *view.from_wire(0, view.count)))

    def block(self, number: int) -> tuple[int, int]:
        """Return offset and length of a block, counted round the ring."""
        return self.parts[number % self.view.size]

    def others_than(self, number: int) -> bool:
        """Whether some other block has elements."""
        return self.block(number)[1] < self.view.count

    def sums(self) -> Iterator[Step]:
        """Yield step 1."""
        view = self.view
        for hop in range(self.hops):
            slot = Span(view.receive, hop * self.slot)
            offset, n = self.block(view.rank - 1 - hop)
            if n:
                yield Put(Span(view.send, offset), n, self.right, slot, hop)
            offset, n = self.block(view.rank - 2 - hop)
            if n:
                yield Wait(hop, self.left)
                own, last = Span(view.send, offset), hop == self.hops - 1
                reduced = view.reduced(offset) if last else own
                yield Reduce((reduced,), (own, slot), n, view.scale if last else 1.0)
                if last:
                    yield from view.update(offset, n)

    def results(self) -> Iterator[Step]:
        """Yield step 2."""
        for hop in range(self.hops):
            offset, n = self.block(self.view.rank - hop)
            if n:
                result = Span(self.view.result, offset)
                yield Put(result, n, self.right, result, self.hops + hop)
            offset, n = self.block(self.view.rank - 1 - hop)
            if n:
                yield Wait(self.hops + hop, self.left)


SPEC = PlanSpec(
    "ring",
    build,
    "two neighbours only: 2(P-1) latencies, 2(P-1)/P S per rank, inbox of P-1 blocks",
    kinds=("average", "sum", "update", "reduce-scatter", "all-gather"),
    shares=True,
    inbox=block_slots,
)
