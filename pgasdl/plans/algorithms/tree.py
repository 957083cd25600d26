"""Tree: gradients go up a binomial tree and are reduced on the way; the result comes down.

Paper
    CaffeGPI: gradients from higher to lower ranks, rank 0 updates the model, the model from lower
    to higher ranks. One plan per layer: one layer's way up overlaps another's way down.

Steps on node v = (rank - root) mod P: those of ``trees``, by default in one chunk; the children of
v are v + 1, v + 2, v + 4, ... up to v's lowest set bit, its parent is v without that bit.

Cost
    reduce, broadcast   ceil(log2 P) latencies, S per link; S-Caffe's equation (2)
    exchange            2 ceil(log2 P) latencies; S per link and direction
    Inbox: ceil(log2 P) slots of S, because buffers are symmetric (the root needs them all).

Which message proves a buffer free, and wire precision: as in ``trees``.

Example: P = 3, root 0: rank 0 has the children 1 and 2. 40 elements, slots of 48.
    rank 0: Wait 0; Wait 1; Reduce data[0:40] = 1/3 * (data[0:40] + inbox[0:40] + inbox[48:88])
            Put data[0:40] -> rank 2 data[0:40], notify 2;  the same -> rank 1;  Flush
    rank 2: Put data[0:40] -> rank 0 inbox[48:88], notify 1;  Wait 2
"""

from __future__ import annotations

from dataclasses import dataclass

from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.trees import TREE_KINDS, tree_plan
from pgasdl.plans.plan import ROOTED, Case, Plan, PlanSpec


def children(node: int, size: int) -> list[int]:
    """List the children of ``node``, numbered from the root, nearest first.

    >>> children(0, 6), children(2, 6), children(4, 6)
    ([1, 2, 4], [3], [5])
    """
    lowest = node & -node if node else size
    reach = [1 << level for level in range(size.bit_length())]
    return [node + step for step in reach if step < lowest and node + step < size]


@dataclass(frozen=True, slots=True)
class Binomial:
    """A binomial tree. A child's place is the logarithm of its distance."""

    size: int

    @property
    def degree(self) -> int:
        """Return the number of places: the root has a child at every power of two."""
        return (self.size - 1).bit_length()

    def parent(self, node: int) -> tuple[int, int]:
        """Return the node without its lowest bit."""
        distance = node & -node
        return node - distance, distance.bit_length() - 1

    def children(self, node: int) -> list[tuple[int, int]]:
        """Return the children, nearest first."""
        return list(enumerate(children(node, self.size)))


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
    chunks: int = 1,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    return tree_plan(RankView("tree", rank, size, count, kind, wire), Binomial(size), root, chunks)


def _suits(case: Case) -> bool:
    return case.kind in ROOTED


SPEC = PlanSpec(
    "tree",
    build,
    "binomial tree up and down: 2 ceil(log2 P) latencies, S per link, inbox of ceil(log2 P) S",
    kinds=TREE_KINDS,
    suits=_suits,
    options=("root", "chunks"),
    shares=True,
    by_element=True,
)
