"""Tree: gradients go up a binomial tree, are reduced on the way, and the result comes down.

Paper
    CaffeGPI: gradients from higher to lower ranks, rank 0 updates the model, the model from lower
    to higher ranks. One plan per layer: one layer's way up overlaps another's way down.

Steps, on rank r of P; ranks are numbered from the root, v = (r - root) mod P; the children of v
are v + 1, v + 2, v + 4, ... up to v's lowest set bit, its parent is v without that bit
    1. Wait for all children; one Reduce over own data and their slots, the children by distance.
       Root: times 1/P, and in kind ``update`` Call the update of ``weights``.
    2. Others: Put the sum into the parent's slot; wait for the result.
    3. Put the result (``update``: the new weights) to the children, the deepest subtree first;
       Flush if there are any.

Cost
    2 ceil(log2 P) latencies; S per link and direction. Inbox: ceil(log2 P) slots of S, because
    buffers are symmetric (the root needs them all).

Notifications
    k: the sum of child v + 2^k is here. K = ceil(log2 P): the result is here.

Which message proves a buffer free
    my ``data`` (source of the way up)      the result: the root had my sum before it was made
    my inbox slots                          my result: a child waits for it before it sends again
    child's ``data`` / ``weights``          its sum: it had begun this execution
    my ``data`` / ``weights`` (way down)    nobody answers it: Flush. A leaf sends none: no Flush

Wire precision
    Own data is cast to ``wire_out`` and sums travel, and are reduced, in wire precision
    (accumulating wider, rounding once per level). The result lands in ``wire_out``, is forwarded
    from there and cast back by all, the root included: all ranks end with the same bits.
    ``update`` sends gradients so, but weights as they are: rounded weights would swallow small
    updates.

Example: P = 3, root 0: rank 0 has the children 1 and 2. 40 elements, slots of 48.
    rank 0: Wait 0; Wait 1; Reduce data[0:40] = 1/3 * (data[0:40] + inbox[0:40] + inbox[48:88])
            Put data[0:40] -> rank 2 data[0:40], notify 2;  the same -> rank 1;  Flush
    rank 2: Put data[0:40] -> rank 0 inbox[48:88], notify 1;  Wait 2
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.errors import PlanError
from pgasdl.plans.blocks import cast, padded, scale_of
from pgasdl.plans.plan import Call, Flush, Plan, PlanSpec, Put, Reduce, Span, Step, Wait


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
) -> Plan:
    """Return rank's plan of the exchange that this module describes, towards ``root``."""
    if not 0 <= root < size:
        raise PlanError(f"plan tree: root {root} is not one of {size} ranks")
    exchange = _Exchange(rank, size, count, kind, wire, root=root)
    steps: tuple[Step, ...] = ()
    if size > 1 and count:
        steps = (*exchange.up(), *exchange.down())
    elif count and kind == "update":
        steps = (Call("update", Span("data", 0), count),)
    lanes = (steps,) if steps else ()
    return Plan("tree", rank, size, count, lanes, exchange.buffers(), exchange.levels + 1)


def children(node: int, size: int) -> list[int]:
    """List the children of ``node``, numbered from the root, nearest first.

    >>> children(0, 6), children(2, 6), children(4, 6)
    ([1, 2, 4], [3], [5])
    """
    lowest = node & -node if node else size
    reach = [1 << level for level in range(size.bit_length())]
    return [node + step for step in reach if step < lowest and node + step < size]


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(
        self, rank: int, size: int, count: int, kind: str, wire: bool, *, root: int
    ) -> None:
        self.size, self.count, self.kind, self.wire, self.root = size, count, kind, wire, root
        self.node = (rank - root) % size
        self.children = children(self.node, size)
        self.levels = (size - 1).bit_length()
        self.send, self.receive = ("wire_out", "wire_in") if wire else ("data", "inbox")
        self.result = "weights" if kind == "update" else self.send

    def buffers(self) -> dict[str, int]:
        """Elements of each buffer."""
        sizes = {"data": self.count}
        if self.kind == "update":
            sizes["weights"] = self.count
        if self.size > 1 and self.count:
            sizes[self.receive] = self.levels * padded(self.count)
            if self.wire:
                sizes["wire_out"] = self.count
        return sizes

    def rank(self, node: int) -> int:
        """Rank of a node, numbered from the root."""
        return (node + self.root) % self.size

    def slot(self, level: int) -> Span:
        """Where a parent receives from the child at distance ``2 ** level``."""
        return Span(self.receive, level * padded(self.count))

    def up(self) -> Iterator[Step]:
        """Steps 1 and 2, up to the result's beginning its way down."""
        own = Span(self.send, 0)
        if self.wire:
            yield cast("data", "wire_out", 0, self.count)
        levels = range(len(self.children))
        for level in levels:
            yield Wait(level, self.rank(self.children[level]))
        if levels:
            updated = self.kind == "update" and self.node == 0
            reduced = Span("data", 0) if updated else own
            scale = 1.0 if self.node else scale_of(self.kind, self.size)
            yield Reduce((reduced,), (own, *map(self.slot, levels)), self.count, scale)
        if self.node:
            distance = self.node & -self.node
            level = distance.bit_length() - 1
            parent = self.rank(self.node - distance)
            yield Put(own, self.count, parent, self.slot(level), level)
        elif self.kind == "update":
            yield Call("update", Span("data", 0), self.count)

    def down(self) -> Iterator[Step]:
        """The result's way: from the parent, to the children, into place."""
        if self.node:
            yield Wait(self.levels, self.rank(self.node - (self.node & -self.node)))
        result = Span(self.result, 0)
        for child in reversed(self.children):
            yield Put(result, self.count, self.rank(child), result, self.levels)
        if self.result == "wire_out":
            yield cast("wire_out", "data", 0, self.count)
        if self.children:
            yield Flush()


SPEC = PlanSpec(
    "tree",
    build,
    "binomial tree up and down: 2 ceil(log2 P) latencies, S per link, inbox of ceil(log2 P) S",
    options=("root",),
)
