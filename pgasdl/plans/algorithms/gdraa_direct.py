"""GDRAA where peers' memory is mapped: the owner works on all ranks' copies in one pass.

Paper
    MiMatrix's GDRAA; with direct loads and stores, scatter, average and broadcast of a block
    become one pass by its owner.

Steps, on rank r of P, with S bytes in P blocks (r owns block r)
    1. Flag "my data is ready" to every other owner; wait for everybody's flag.
    2. One Reduce: load block r of every rank in rank order 0..P-1, store the result to all.
       Kind ``update``: reduce into own ``data``, Call the update of block r of ``weights``, and
       store the new weights to all others in one pass.
    3. Flag "your block r is done" to all; wait for the flag of every other owner.

    A rank without a block (few elements) flags the owners and waits for them, nothing else.
    ``reduce-scatter`` stores the result nowhere else; ``all-gather`` stores own block to all.

Cost
    2 latencies; every byte is read once and written once per rank, which is the least possible;
    no inbox, no wire precision (memory is loaded as it is).

Notifications
    i: rank i's data is ready. P + i: rank i's block is done here.

Which message proves a buffer free
    peers' ``data[r]`` / ``weights[r]``     their ready flag: the application left them to us
    my ``data[j]``, ``weights[j]``          rank j's done flag: it neither loads nor stores more
    A Put carries flags only, so no source is ever live, and there is nothing to Flush.

Example: P = 3, 40 elements, blocks [0:16] [16:32] [32:40]. Rank 1 runs
    Put nothing -> rank 2, notify 1;  Put nothing -> rank 0, notify 1;  Wait 0;  Wait 2
    Reduce all data[16:32] = 1/3 * (rank 0 data[16:32] + data[16:32] + rank 2 data[16:32])
    Put nothing -> rank 2, notify 4;  Put nothing -> rank 0, notify 4;  Wait 3;  Wait 5
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import blocks, flag, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Plan, PlanSpec, Reduce, Span, Step, Wait, always, no_inbox


def build(rank: int, size: int, count: int, *, kind: str = "average", wire: bool = False) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    if wire:
        raise PlanError("plan gdraa-direct: loads peers' memory as it is, in no wire precision")
    view = RankView("gdraa-direct", rank, size, count, kind, wire)
    lanes = [] if view.idle else [_steps(view)]
    return view.plan(lanes, 2 * size, mapped=True)


def _steps(view: RankView) -> Iterator[Step]:
    rank, size, parts = view.rank, view.size, blocks(view.count, view.size)
    peers = peers_after(rank, size)
    for peer in peers:
        if parts[peer][1]:
            yield flag(peer, rank)
    offset, n = parts[rank]
    if n:
        for peer in reversed(peers):
            yield Wait(peer, peer)
        yield from _pass(view, offset, n, peers)
        for peer in peers:
            yield flag(peer, size + rank)
    for owner in reversed(peers):
        if parts[owner][1]:
            yield Wait(size + owner, owner)


def _pass(view: RankView, offset: int, n: int, peers: list[int]) -> Iterator[Step]:
    """Yield the owner's loads from all ranks and stores to all of them."""
    ranks = sorted((*peers, view.rank))
    everywhere = tuple(Span("data", offset, None if r == view.rank else r) for r in ranks)
    mine = Span("data", offset)
    others = tuple(Span(view.result, offset, peer) for peer in peers)
    if view.kind in ("average", "sum"):
        yield Reduce(everywhere, everywhere, n, view.scale)
        return
    if view.kind != "all-gather":
        yield Reduce((mine,), everywhere, n, view.scale)
        yield from view.update(offset, n)
    if view.kind != "reduce-scatter":
        yield Reduce(others, (Span(view.result, offset),), n)


SPEC = PlanSpec(
    "gdraa-direct",
    build,
    "mapped peers: each owner loads its block from all and stores the result to all, one pass",
    kinds=("average", "sum", "update", "reduce-scatter", "all-gather"),
    wire=False,
    mapped=True,
    works_on="mapped",
    suits=always,
    shares=True,
    by_element=True,
    inbox=no_inbox,
)
