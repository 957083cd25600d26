"""All-to-all: every rank has a block for every other.

Paper
    The transposition behind dMath's remaps and model-parallel layers; the scatter of MiMatrix's
    GDRAA without its sums.

Result: ``data`` is P blocks of count div P elements; block j of rank i becomes block i of rank j.
The count mod P elements behind the blocks stay as they are.

Steps on rank r of P
    1. Raise my credit at all others: my inbox is free.
    2. For every other j, starting behind r: wait for j's credit; Put block j into j's slot of r.
    3. For every other j: wait for its block; copy it into place, once my own block that lay there
       is sent: step 2's sources are proven read by a Flush.

Cost
    2 latencies, the first of them without payload; (P-1)/P S sent and received. Inbox: P blocks.

Notifications
    i: block from rank i is in my inbox. P + i: rank i's inbox is free (credit).

Which message proves a buffer free
    j's slot of r       j's credit: raised when j begins, and hence had copied the last one
    my ``data[j]``      Flush, before j's block is copied over it

Example: P = 3, 40 elements, blocks of 13, [39:40] stays; slots of 16. Rank 1 runs
    Put nothing -> rank 2, notify 4;  Put nothing -> rank 0, notify 4
    Wait 5;  Put data[26:39] -> rank 2 inbox[16:29], notify 1
    Wait 3;  Put data[0:13] -> rank 0 inbox[16:29], notify 1;  Flush
    Wait 0;  Reduce data[0:13] = inbox[0:13];  Wait 2;  Reduce data[26:39] = inbox[32:45]
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import flag, padded, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Flush, Plan, PlanSpec, Put, Reduce, Span, Step, Wait, always


def build(
    rank: int, size: int, count: int, *, kind: str = "all-to-all", wire: bool = False
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("all-to-all", rank, size, count, kind, wire)
    n = count // size
    if view.idle or not n:
        return view.plan()
    return view.plan([_steps(rank, size, n)], 2 * size, size * padded(n))


def _steps(rank: int, size: int, n: int) -> Iterator[Step]:
    peers = peers_after(rank, size)
    slot = padded(n)
    for peer in peers:
        yield flag(peer, size + rank)
    for peer in peers:
        yield Wait(size + peer, peer)
        yield Put(Span("data", peer * n), n, peer, Span("inbox", rank * slot), rank)
    yield Flush()
    for peer in reversed(peers):
        yield Wait(peer, peer)
        yield Reduce((Span("data", peer * n),), (Span("inbox", peer * slot),), n)


SPEC = PlanSpec(
    "all-to-all",
    build,
    "a block from everyone to everyone, directly: 2 latencies, (P-1)/P S, inbox of S",
    kinds=("all-to-all",),
    wire=False,
    suits=always,
)
