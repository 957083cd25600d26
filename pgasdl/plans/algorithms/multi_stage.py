"""Multi-stage broadcast: stages start ahead, and a rank waits for each just before it needs it.

Paper
    S-Caffe section 4.2: parameters are broadcast by layer, overlapped with the forward pass. The
    naive design starts layer i + 1's broadcast when layer i is here, and overlaps only these two;
    multi-stage on-demand (SC-OB) starts all at once and waits for each just before its forward
    pass. Layers with waits of their own are plans of their own, in a GradientExchange of kind
    "broadcast": ``ready`` of all layers first, then ``wait`` layer by layer. This plan is the same
    protocol for ``stages`` equal parts of one array; ``ahead`` is how many of them a rank is ready
    for at once: 1 is the naive design, ``stages`` (or 0) on-demand.

Steps on node v = (rank - root) mod P of a binomial tree, one lane per stage k
    1. Not the root: raise my credit of stage k at the parent, if k < ``ahead``; wait for the stage;
       then raise my credit of stage k + ``ahead``.
    2. For each child, the deepest subtree first: wait for its credit of the stage; Put it. Flush,
       unless a later stage's credit will answer.

Cost
    One stage takes ceil(log2 P) t(S/stages); on-demand they overlap like chunks in a pipeline,
    naively they do not. S per link. No inbox: stages go right into place.

Notifications, with D = ceil(log2 P) places
    place * stages + k: the child there is ready for stage k.  D * stages + k: stage k is here.

Which message proves a buffer free
    a child's stage k of ``data``   its credit of stage k
    my stage k, sent on             the credit of stage k + ``ahead``; nothing after the last: Flush

Example: P = 3, root 0, 40 elements, 2 stages [0:32] [32:40], ahead 1. Rank 1 runs two lanes
    Put nothing -> rank 0, notify 0;  Wait 4;  Put nothing -> rank 0, notify 1
    Wait 5
rank 0 in lane 0: Wait 2;  Put data[0:32] -> rank 2, notify 4;  Wait 0;  the same -> rank 1
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import flag
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.algorithms.shapes import Binomial
from pgasdl.plans.algorithms.trees import TreeView, numbering
from pgasdl.plans.plan import Flush, Plan, PlanSpec, Put, Span, Step, Wait


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "broadcast",
    wire: bool = False,
    root: int = 0,
    stages: int = 4,
    ahead: int = 0,
) -> Plan:
    """Return rank's plan of the broadcast that this module describes."""
    view = RankView("multi-stage", rank, size, count, kind, wire)
    ranks = numbering(view, root)
    view.require("stages", stages, 1)
    view.require("ahead", ahead, 0)
    if view.idle:
        return view.plan()
    tree = TreeView(view, Binomial(size), ranks, stages)
    n = len(tree.chunks)
    lanes = [stage(tree, k, n, ahead or n) for k in range(n)]
    return view.plan(lanes, (tree.degree + 1) * n)


def stage(tree: TreeView, k: int, stages: int, ahead: int) -> Iterator[Step]:
    """Yield the lane of stage ``k``."""
    offset, n = tree.chunks[k]
    arrived = tree.degree * stages
    if tree.parent:
        first = tree.parent.place * stages
        if k < ahead:
            yield flag(tree.parent.rank, first + k)
        yield Wait(arrived + k, tree.parent.rank)
        if k + ahead < stages:
            yield flag(tree.parent.rank, first + k + ahead)
    part = Span("data", offset)
    for child in reversed(tree.children):
        yield Wait(child.place * stages + k, child.rank)
        yield Put(part, n, child.rank, part, arrived + k)
    if tree.children and k + ahead >= stages:
        yield Flush()


SPEC = PlanSpec(
    "multi-stage",
    build,
    "broadcast by stages, each under way as soon as its receivers are ready for it",
    kinds=("broadcast",),
    wire=False,
    options=("root", "stages", "ahead"),
    by_element=True,
)
