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

from pgasdl.errors import PlanError
from pgasdl.plans.blocks import blocks, flag, peers_after, scale_of
from pgasdl.plans.plan import Call, Plan, PlanSpec, Reduce, Span, Step, Wait


def build(rank: int, size: int, count: int, *, kind: str = "average", wire: bool = False) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    if wire:
        raise PlanError("plan gdraa-direct: loads peers' memory as it is, in no wire precision")
    buffers = {"data": count}
    if kind == "update":
        buffers["weights"] = count
    steps: list[Step] = []
    if size == 1:
        if kind == "update" and count:
            steps.append(Call("update", Span("data", 0), count))
    elif count:
        steps += _steps(rank, size, blocks(count, size), kind)
    lanes = (tuple(steps),) if steps else ()
    return Plan("gdraa-direct", rank, size, count, lanes, buffers, 2 * size, mapped=True)


def _steps(rank: int, size: int, parts: list[tuple[int, int]], kind: str) -> list[Step]:
    peers = peers_after(rank, size)
    steps: list[Step] = [flag(peer, rank) for peer in peers if parts[peer][1]]
    offset, n = parts[rank]
    if n:
        steps += [Wait(peer, peer) for peer in reversed(peers)]
        steps += _reduce(rank, size, offset, n, kind)
        steps += [flag(peer, size + rank) for peer in peers]
    steps += [Wait(size + owner, owner) for owner in reversed(peers) if parts[owner][1]]
    return steps


def _reduce(rank: int, size: int, offset: int, n: int, kind: str) -> list[Step]:
    everywhere = tuple(Span("data", offset, None if r == rank else r) for r in range(size))
    scale = scale_of(kind, size)
    if kind != "update":
        return [Reduce(everywhere, everywhere, n, scale)]
    mine = Span("data", offset)
    others = tuple(Span("weights", offset, peer) for peer in peers_after(rank, size))
    return [
        Reduce((mine,), everywhere, n, scale),
        Call("update", mine, n),
        Reduce(others, (Span("weights", offset),), n),
    ]


SPEC = PlanSpec(
    "gdraa-direct",
    build,
    "mapped peers: each owner loads its block from all and stores the result to all, one pass",
    wire=False,
    mapped=True,
)
