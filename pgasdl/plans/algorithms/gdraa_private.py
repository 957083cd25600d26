"""GDRAA for private memory: pieces of arrays that no peer reaches, sent from where they lie.

Paper
    MiMatrix's GDRAA. New here: results arrive in an inbox, too, from which a Reduce copies them, so
    that ``data`` may be memory that no peer reaches, if Puts leave from any; and long arrays go
    piece by piece, so that messages of one piece and copies of another go on at once, in the cache.

Steps, on rank r of P, for the pieces k = 0..n-1 of ``data``, each cut in P blocks; r owns block r
    1. Put block j of piece k into rank j's inbox, for every other j, starting behind r.
    2. Wait for P - 1 blocks of piece k - 1; one Reduce over own block and inbox, always in rank
       order 0..P-1; Put the result into the inboxes of all others.
    3. Wait for the others' results of piece k - 2, and copy each into ``data``, before 1.
    At the end, Flush.

Cost
    2 latencies for one piece, then about half a latency for each; 2(P-1)/P S sent and received per
    rank, of which a half is copied once more. Inbox: 4 (P - 1) blocks of a piece.

Inbox and notifications
    Two pieces are under way, k and k + 1, so f = k mod 2. For a sender, i-th among the others:
    its block        slot (2 f) (P - 1) + i         notification (2 k) P + its rank
    its result       slot (2 f + 1) (P - 1) + i     notification (2 k + 1) P + its rank
    Slots are for blocks of ``piece`` elements, so arrays of different counts may take turns.

Which message proves a buffer free
    rank j's slot of my block of piece k    j's result of piece k - 2: it had reduced my block
    rank j's slot of my result of piece k   j's block of piece k: sent when it had copied my result
                                            of piece k - 2
    my ``data[j]`` (source of a block)      rank j's result: it had my block before it made it
    my ``data[r]`` (source of the result)   nobody answers it: Flush
    slots of an execution before            any message of this one: sent when that one was over

Example: P = 3, 40 elements in one piece, blocks [0:16] [16:32] [32:40], slots of 16. Rank 1 runs
    Put data[32:40] -> rank 2 inbox[16:24], notify 1
    Put data[0:16] -> rank 0 inbox[0:16], notify 1
    Wait 0; Wait 2; Reduce data[16:32] = 1/3 * (inbox[0:16] + data[16:32] + inbox[16:32])
    Put data[16:32] -> rank 2 inbox[48:64], notify 4; the same -> rank 0 inbox[32:48]
    Wait 3; data[0:16] = inbox[32:48]; Wait 5; data[32:40] = inbox[48:56]; Flush
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import (
    ALIGN,
    block_slots,
    blocks,
    equal_pieces,
    padded,
    peers_after,
)
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Case, Flush, Members, Plan, PlanSpec, Put, Reduce, Span, Step, Wait

# The slots of blocks, and of results, per sender.
SLOTS = 2
# 256 KiB of float32.
PIECE = 65536
# The inbox for arrays anywhere, in pieces of staged arrays: with two ranks, pieces of 1 MB.
INBOX_PIECES = 16


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    piece: int = PIECE,
) -> Plan:
    """Return rank's plan of the exchange that this module describes."""
    view = RankView("gdraa-private", rank, size, count, kind, wire)
    view.require("piece", piece, 1)
    if view.idle:
        return view.plan()
    exchange = _Exchange(view, padded(piece))
    return view.plan(
        [exchange.steps()], 2 * size * len(exchange.pieces), _inbox(size, count, piece)
    )


def _inbox(size: int, count: int, piece: int = PIECE) -> int:
    piece = padded(piece)
    slots = 2 * min(SLOTS, -(-count // equal_pieces(count, piece)[0]))
    return slots * block_slots(size, piece)


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView, piece: int) -> None:
        self.rank, self.size, self.scale = view.rank, view.size, view.scale
        self.peers = peers_after(view.rank, view.size)
        self.slot = padded(blocks(piece, view.size)[0][1])
        _, pieces = equal_pieces(view.count, piece)
        # Each owner's block of each piece.
        self.pieces = [
            [(begin + offset, n) for offset, n in blocks(length, view.size)]
            for begin, length in pieces
        ]

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        last = len(self.pieces)
        for k in range(last + 2):
            if k >= 2:
                yield from self.collect(k - 2)
            if k < last:
                yield from self.scatter(k)
            if 1 <= k <= last:
                yield from self.reduce(k - 1)
        if any(blocks_of[self.rank][1] for blocks_of in self.pieces):
            yield Flush()

    def scatter(self, k: int) -> Iterator[Step]:
        """Yield step 1."""
        for owner in self.peers:
            begin, n = self.pieces[k][owner]
            if n:
                target = self.inbox(2 * k, self.rank, owner)
                yield Put(Span("data", begin), n, owner, target, 2 * k * self.size + self.rank)

    def reduce(self, k: int) -> Iterator[Step]:
        """Yield step 2, for a rank that owns a block."""
        begin, n = self.pieces[k][self.rank]
        if not n:
            return
        # Rank - 1 sent here first: between equally fast ranks, blocks arrive in this order.
        for peer in reversed(self.peers):
            yield Wait(2 * k * self.size + peer, peer)
        own = Span("data", begin)
        srcs = tuple(
            own if sender == self.rank else self.inbox(2 * k, sender, self.rank)
            for sender in range(self.size)
        )
        yield Reduce((own,), srcs, n, self.scale)
        for peer in self.peers:
            target = self.inbox(2 * k + 1, self.rank, peer)
            yield Put(own, n, peer, target, (2 * k + 1) * self.size + self.rank)

    def collect(self, k: int) -> Iterator[Step]:
        """Yield step 3."""
        for owner in reversed(self.peers):
            begin, n = self.pieces[k][owner]
            if n:
                yield Wait((2 * k + 1) * self.size + owner, owner)
                yield Reduce((Span("data", begin),), (self.inbox(2 * k + 1, owner, self.rank),), n)

    def inbox(self, number: int, sender: int, at: int) -> Span:
        """Return where a sender's block (2 k) or result (2 k + 1) of piece k goes at ``at``."""
        place = sender if sender < at else sender - 1
        return Span("inbox", self.slot * (number % (2 * SLOTS) * (self.size - 1) + place))


def _options_of(members: Members, piece: int) -> dict[str, int]:
    """Return the longest piece whose slots fit in ``INBOX_PIECES`` of ``piece``.

    >>> _options_of(Members(2), 4096)
    {'piece': 32768}
    """
    slots = 2 * SLOTS * max(1, members.size - 1)
    return {"piece": members.size * max(ALIGN, INBOX_PIECES * piece // slots // ALIGN * ALIGN)}


def _suits(case: Case) -> bool:
    return not case.in_segments


def _longest(piece: int, size: int, notifications: int) -> int:
    return notifications // (2 * size) * piece


SPEC = PlanSpec(
    "gdraa-private",
    build,
    "gdraa for private memory, in pieces: 2(P-1)/P S per rank, inbox of 4(P-1) blocks",
    kinds=("average", "sum"),
    wire=False,
    works_on="private",
    suits=_suits,
    options=("piece",),
    options_of=_options_of,
    shares=True,
    inbox_pieces=INBOX_PIECES,
    longest=_longest,
    inbox=_inbox,
)
