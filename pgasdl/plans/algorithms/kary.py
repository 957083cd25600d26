"""K-ary tree: every node has up to ``arity`` children, level by level.

Paper
    CaffeGPI leaves open which tree carries its gradients; this is the other usual one. A node of a
    binomial tree has up to ceil(log2 P) children, here at most ``arity``, so that no inbox grows
    with P, and chunks flow evenly.

Steps on node v = (rank - root) mod P: those of ``trees``; the children of v are
arity * v + 1 ... arity * v + arity, its parent is (v - 1) div arity.

Cost, in n chunks
    depth d = ceil(log_arity(P)) or so; reduce, broadcast (n + d - 1) arity t(S/n), for a node takes
    its children's chunks one after another. S per link and direction. Inbox: arity slots of S.

Which message proves a buffer free, and wire precision: as in ``trees``.

Example: P = 6, arity 2, root 0: 0 has the children 1 and 2, 1 has 3 and 4, 2 has 5. 40 elements in
one chunk, slots of 48. Rank 2 runs
    Wait 0;  Reduce data[0:40] = data[0:40] + inbox[0:40];  Put data[0:40] -> rank 0 inbox[48:88],
    notify 1;  Wait 2;  Put data[0:40] -> rank 5 data[0:40], notify 2;  Flush
"""

from __future__ import annotations

from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Kary
from pgasdl.plans.algorithms.trees import TREE_KINDS, numbering, slots_of, tree_plan
from pgasdl.plans.plan import Plan, PlanSpec


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    root: int = 0,
    arity: int = 2,
    chunks: int = 0,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("kary", rank, size, count, kind, wire)
    view.require("arity", arity, 1)
    return tree_plan(view, Kary(size, arity), numbering(view, root), chunks)


def _inbox(size: int, count: int, root: int = 0, arity: int = 2, chunks: int = 0) -> int:
    del root, chunks
    return slots_of(Kary(size, arity), count)


SPEC = PlanSpec(
    "kary",
    build,
    "tree of arity 2, or another, in chunks: depth log P, inbox of arity S whatever P",
    kinds=TREE_KINDS,
    options=("root", "arity", "chunks"),
    shares=True,
    by_element=True,
    inbox=_inbox,
)
