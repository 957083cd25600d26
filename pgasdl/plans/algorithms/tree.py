"""Tree: gradients go up a binomial tree and are reduced on the way; the result comes down.

Paper
    CaffeGPI: gradients from higher to lower ranks, rank 0 updates the model, the model from lower
    to higher ranks. One plan per layer: one layer's way up overlaps another's way down.

Steps on node v = (rank - root) mod P: those of ``trees``, by default in one chunk; the children of
v are v + 1, v + 2, v + 4, ... up to v's lowest set bit, its parent is v without that bit. With
``group_size`` = q > 0 each q neighbours, the ranks of a machine, have such a tree, and so have
their heads: S goes across N - 1 times, whatever the root is. Machines of unlike sizes: several q.

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

from pgasdl.plans.algorithms.hierarchy import suits, tuned
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Binomial, Groups, TwoLevel
from pgasdl.plans.algorithms.trees import TREE_KINDS, numbering, slots_of, tree_plan
from pgasdl.plans.plan import Plan, PlanSpec, Sizes


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
    group_size: Sizes = 0,
    chunks: int = 1,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("tree", rank, size, count, kind, wire)
    view.require_sizes("group_size", group_size, 0)
    ranks = numbering(view, root, group_size)
    shape = TwoLevel(ranks, Binomial, Binomial) if group_size else Binomial(size)
    return tree_plan(view, shape, ranks, chunks)


def _inbox(size: int, count: int, root: int = 0, group_size: Sizes = 0, chunks: int = 1) -> int:
    del chunks
    ranks = Groups(size, group_size or size, root)
    shape = TwoLevel(ranks, Binomial, Binomial) if group_size else Binomial(size)
    return slots_of(shape, count)


SPEC = PlanSpec(
    "tree",
    build,
    "binomial tree up and down: 2 ceil(log2 P) latencies, S per link, inbox of ceil(log2 P) S",
    kinds=TREE_KINDS,
    suits=suits("tree"),
    options=("root", "group_size", "chunks"),
    several=("group_size",),
    tuned=tuned("tree"),
    shares=True,
    by_element=True,
    inbox=_inbox,
)
