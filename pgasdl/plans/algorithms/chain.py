"""Chunked chain: a pipeline of chunks along all ranks, and back.

Paper
    S-Caffe section 5, the lower level of its hierarchical reduce: the last process
    sends the buffer in n chunks to its left neighbour, which adds its own and forwards them. There
    it is a reduce; here also a broadcast, and an exchange that comes back the way it went.

Steps on node v = (rank - root) mod P: those of ``trees``; v's only child is v + 1. The last node
sends its n chunks, each node adds its own and forwards, the root finishes; results come back.

Cost, with t(b) the time of one message and its reduction
    reduce, broadcast   (n + P - 2) t(S/n): the paper's equation (1)
    exchange            (n + 2 (P - 1) - 1) t(S/n), both directions of each link busy at once
    Every rank but the ends sends and receives S in each direction. Inbox: S. Best for large S and
    few ranks: on the paper's machine from 8 MB on, with up to 8 ranks; ``hierarchy`` says where
    nobody names a plan.

Which message proves a buffer free: as in ``trees``; chunk k's slot is its own place in one slot of
S, so chunks of one execution need no credits among each other.

Example: P = 3, root 0, 40 elements in 2 chunks [0:32] [32:40]. Rank 1 runs two lanes
    Wait 0;  Reduce data[0:32] = data[0:32] + inbox[0:32];    Put data[0:32] -> rank 0, notify 0
    Wait 1;  Reduce data[32:40] = data[32:40] + inbox[32:40]; Put data[32:40] -> rank 0, notify 1
and
    Wait 2;  Put data[0:32] -> rank 2, notify 2
    Wait 3;  Put data[32:40] -> rank 2, notify 3;  Flush
"""

from __future__ import annotations

from pgasdl.plans.algorithms.hierarchy import suits, tuned
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Chain
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
    chunks: int = 0,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("chain", rank, size, count, kind, wire)
    return tree_plan(view, Chain(size), numbering(view, root), chunks)


def _inbox(size: int, count: int, root: int = 0, chunks: int = 0) -> int:
    del root, chunks
    return slots_of(Chain(size), count)


SPEC = PlanSpec(
    "chain",
    build,
    "chunked chain and back: S per link and direction at full overlap, latency of P hops",
    kinds=TREE_KINDS,
    suits=suits("chain"),
    options=("root", "chunks"),
    tuned=tuned("chain"),
    shares=True,
    by_element=True,
    inbox=_inbox,
)
