"""GDRAA where peers' memory can be read, but not mapped: owners pull, and everybody pulls back.

Paper
    MiMatrix's GDRAA; scatter and broadcast are made by their receivers, as in the rendezvous of
    MPI libraries that copy through the kernel once. ``data`` is private memory, of which nobody
    writes another rank's: a rank that aborted cannot harm an array that its owner took back.

Steps, on rank r of P (r owns block r, which is cut in pieces)
    1. Flag "my data is ready" to every other owner; wait for everybody's flag.
    2. For each piece of block r: copy it from each peer into a slot of own ``inbox``; one Reduce
       over all ranks' in rank order 0..P-1 into own ``data``; flag "this piece is done" to all.
    3. Meanwhile, one piece behind: copy the other owners' pieces, as they are done, to ``data``.
    4. Flag "I have all of your block" to every other owner; wait for everybody's flag.

    A rank without a block (few elements) flags the owners and copies from them, nothing else.

Cost
    3 latencies, and one for each piece that the copy of another does not hide. Every rank copies
    2 (P-1)/P of the bytes from its peers, once; a slot stays in a cache until it is reduced.

Notifications
    i: rank i's data is ready. P + i: rank i has all of my block.
    2 P + k P + i: piece k of rank i's block is done.

Which message proves a buffer free
    own ``data``, other owners' blocks  their flag that the piece is done: they have read mine
    own ``data``, block r               the last flags: all have read it
    own ``inbox``                       nobody else's; own steps are in order

Example: P = 2, 64 elements, piece 16: blocks [0:32] [32:64]. Rank 0 runs
    Put nothing -> rank 1, notify 0;    Wait 1
    Reduce inbox[0:16] = rank 1 data[0:16];     Reduce data[0:16] = 1/2 * (data + inbox)
    Put nothing -> rank 1, notify 4
    Reduce inbox[0:16] = rank 1 data[16:32];    Reduce data[16:32], likewise
    Put nothing -> rank 1, notify 6
    Wait 5;  Reduce data[32:48] = rank 1 data[32:48];  Wait 7;  Reduce data[48:64], likewise
    Put nothing -> rank 1, notify 2;    Wait 3
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import ALIGN, blocks, edge, flag, padded, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Case, Members, Plan, PlanSpec, Reduce, Span, Step, Wait

# 128 KiB of float32: long enough to hide a system call, and in a cache when it is reduced.
PIECE = 32768
# Where ranks share cores, and from so many bytes on, one copy by the kernel is about as fast as two
# through a mapped workspace: 0.8 to 1.3 of its time with 64 MB, but 1.3 to 1.8 with 16 MB (4 and 8
# ranks on 2 cores of an EPYC; on another 0.76 and 0.9; beside other programs 0.4 to 0.8).
# With a core each the kernel's copy took 2 to 4 times as long on an EPYC; on a Xeon 0.9 (4 MB in
# large pages) to 2 times.
_CROWDED_BYTES = 64 << 20


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    piece: int = PIECE,
) -> Plan:
    """Return rank's plan of the exchange that this module describes.

    ``piece`` is rounded up to whole cache lines.
    """
    view = RankView("gdraa-read", rank, size, count, kind, wire)
    exchange = _Exchange(view, padded(view.require("piece", piece, 1)))
    lanes = [] if view.idle else [exchange.steps()]
    return view.plan(lanes, exchange.notifications(), _inbox(size, count, piece), mapped=True)


def _inbox(size: int, count: int, piece: int = PIECE) -> int:
    """Return the elements of a slot for each peer; the same on every rank."""
    return (size - 1) * padded(min(padded(piece), edge(count, size, 1)))


class _Exchange:
    """One rank's side; ``pieces[i]`` are the offset and length of each piece of owner i."""

    def __init__(self, view: RankView, piece: int) -> None:
        self.view, self.rank, self.size = view, view.rank, view.size
        self.peers = peers_after(view.rank, view.size)
        self.pieces = [
            [(at, min(piece, begin + n - at)) for at in range(begin, begin + n, piece)]
            for begin, n in blocks(view.count, view.size)
        ]
        self.slot = padded(max((n for pieces in self.pieces for _, n in pieces), default=0))
        self.owners = [peer for peer in self.peers if self.pieces[peer]]

    def notifications(self) -> int:
        """All notifications; the same on every rank."""
        return self.size * (2 + max(map(len, self.pieces)))

    def steps(self) -> Iterator[Step]:
        mine = self.pieces[self.rank]
        for owner in self.owners:
            yield flag(owner, self.rank)
        if mine:
            for peer in reversed(self.peers):
                yield Wait(peer, peer)
        for k in range(max(map(len, self.pieces)) + 1):
            if k < len(mine):
                yield from self.reduce(k)
            if k > 0:
                yield from self.collect(k - 1)
        for owner in self.owners:
            yield flag(owner, self.size + self.rank)
        if mine:
            for peer in reversed(self.peers):
                yield Wait(self.size + peer, peer)

    def reduce(self, k: int) -> Iterator[Step]:
        """Copy piece ``k`` of the own block from everybody, reduce it, and flag it."""
        offset, n = self.pieces[self.rank][k]
        contributions = {self.rank: Span("data", offset)}
        for number, peer in enumerate(self.peers):
            contributions[peer] = Span("inbox", number * self.slot)
            yield Reduce((contributions[peer],), (Span("data", offset, peer),), n)
        in_order = tuple(contributions[rank] for rank in range(self.size))
        yield Reduce((Span("data", offset),), in_order, n, self.view.scale)
        for peer in self.peers:
            yield flag(peer, self.done(k, self.rank))

    def collect(self, k: int) -> Iterator[Step]:
        """Copy piece ``k`` of the other owners' blocks, once it is done."""
        for owner in reversed(self.peers):
            if k < len(self.pieces[owner]):
                offset, n = self.pieces[owner][k]
                yield Wait(self.done(k, owner), owner)
                yield Reduce((Span("data", offset),), (Span("data", offset, owner),), n)

    def done(self, k: int, owner: int) -> int:
        """Return the notification that piece ``k`` of an owner is done."""
        return (2 + k) * self.size + owner


def _options_of(members: Members, piece: int) -> dict[str, int]:
    """Return twice what is staged at once, or less: a slot for each peer fits in four of those.

    A call of the system per piece costs more than a flag: two pieces of 512 KiB take 0.8 to 0.95 of
    the time of eight of 128 KiB (two ranks on a Xeon, 4 and 16 MB).
    """
    slot = 4 * piece // max(1, members.size - 1) // ALIGN * ALIGN
    return {"piece": min(2 * piece, max(ALIGN, slot))}


def _longest(piece: int, size: int, notifications: int) -> int:
    return (notifications // size - 2) * piece * size


def _suits(case: Case) -> bool:
    return case.members.oversubscribed and case.nbytes >= _CROWDED_BYTES


SPEC = PlanSpec(
    "gdraa-read",
    build,
    "arrays that peers can read, not map: each owner copies its block from all, all copy it back",
    kinds=("average", "sum"),
    wire=False,
    mapped=True,
    works_on="readable",
    suits=_suits,
    options=("piece",),
    options_of=_options_of,
    shares=True,
    longest=_longest,
    inbox=_inbox,
)
