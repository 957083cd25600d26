"""One-shot: every rank sends all of its elements to every other, and reduces everything itself.

Paper
    Every MPI does this for few elements. The pieces, and the phases in place of a closing
    handshake, are those of ``staged``; the slots lie at the receiver, so nothing has to be mapped.

Steps, on rank r of P, for the pieces k = 0..n-1 of ``data``
    1. Put piece k + 1 into r's slot at all others (piece 0 before all else).
    2. Wait for everybody's piece k; Flush, since the Reduce writes where the Put reads; one Reduce
       over piece k of all ranks, always in rank order 0..P-1, into ``data``.

Cost
    1 latency; (P-1) S sent and received per rank. With two ranks that is as much as GDRAA sends,
    in half as many messages; with more it is for few elements.

Phases
    No message ends an execution: peers may still read my pieces from their slots after my plan has
    ended. So executions alternate between two phases, which share neither slots nor notifications.
    For n pieces, of at most ``piece`` elements and about equal, s = min(n, 4):
    slot of piece k in phase f, of the rank that is i-th among the others
                                    (((k mod s) * 2 + f) * (P - 1) + i) * piece
    flag k of rank i in phase f     (k * 2 + f) * P + i
    Which places are whose phase's depends on ``piece`` and P alone: arrays of different counts may
    take turns on one inbox and one set of notifications, as long as the phases alternate.

Which message proves a buffer free
    a peer's slot for my piece k + 1    its piece k - 1, which it sent when it had reduced piece
                                        k - 3: 4 slots, and 3 are too few
    a peer's slots of this phase        any piece of the last execution: sent when the one before
                                        was over
    my ``data``                         nobody answers it: Flush

Example: P = 3, 40 elements, piece 16: [0:16] [16:32] [32:40]. Rank 1, phase 0, runs
    Put data[0:16] -> rank 2 inbox[16:32], notify 1;  the same -> rank 0 inbox[0:16]
    Put data[16:32] -> rank 2 inbox[80:96], notify 7;  the same -> rank 0 inbox[64:80]
    Wait 0;  Wait 2;  Flush;  Reduce data[0:16] = 1/3 * (inbox[0:16] + data + inbox[16:32])
    Put data[32:40] -> rank 2 inbox[144:152], notify 13;  the same -> rank 0 inbox[128:136]
    Wait 6;  Wait 8;  Flush;  Reduce data[16:32], likewise, from inbox[64:80] and inbox[80:96]
    Wait 12;  Wait 14;  Flush;  Reduce data[32:40], likewise, from inbox[128:] and inbox[144:]
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.plans.algorithms.blocks import ALIGN, equal_pieces, padded, peers_after
from pgasdl.plans.algorithms.rank_view import RankView
from pgasdl.plans.plan import Case, Flush, Members, Plan, PlanSpec, Put, Reduce, Span, Step, Wait

PHASES = 2
SLOTS = 4
# 256 KiB of float32: the slots stay in the cache.
PIECE = 65536
# The inbox for arrays anywhere, in pieces of staged arrays.
INBOX_PIECES = 2
# Two ranks send as much as by gdraa, in half as many messages; with more bytes the Reduce, which is
# twice as long, costs more than a latency. Measured over MPI.
_PAIR_BYTES = 16 << 10


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    piece: int = PIECE,
    phase: int = 0,
) -> Plan:
    """Return rank's plan in ``phase``; ``piece`` is rounded up to whole cache lines."""
    view = RankView("one-shot", rank, size, count, kind, wire)
    view.require("piece", piece, 1)
    if view.idle:
        return view.plan()
    exchange = _Exchange(view, padded(piece), phase)
    flags = PHASES * size * len(exchange.pieces)
    return view.plan([exchange.steps()], flags, _inbox(size, count, piece))


def _inbox(size: int, count: int, piece: int = PIECE) -> int:
    """Return the elements in the slots of both phases."""
    cut, pieces = equal_pieces(count, padded(piece))
    slots = PHASES * min(SLOTS, len(pieces)) * (size - 1)
    return (slots - 1) * padded(piece) + cut


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(self, view: RankView, piece: int, phase: int) -> None:
        self.rank, self.size, self.scale = view.rank, view.size, view.scale
        self.piece, self.phase = piece, phase
        self.peers = peers_after(view.rank, view.size)
        self.cut, self.pieces = equal_pieces(view.count, piece)
        self.slots = min(SLOTS, len(self.pieces))

    def steps(self) -> Iterator[Step]:
        """All steps of this rank."""
        yield from self.send(0)
        for k, (begin, n) in enumerate(self.pieces):
            if k + 1 < len(self.pieces):
                yield from self.send(k + 1)
            # Rank - 1 sent here first.
            for peer in reversed(self.peers):
                yield Wait(self.notification(k, peer), peer)
            yield Flush()
            own = Span("data", begin)
            srcs = tuple(
                own if sender == self.rank else self.slot(k, sender, self.rank)
                for sender in range(self.size)
            )
            yield Reduce((own,), srcs, n, self.scale)

    def send(self, k: int) -> Iterator[Step]:
        """Yield the Puts of piece ``k``."""
        begin, n = self.pieces[k]
        for peer in self.peers:
            slot = self.slot(k, self.rank, peer)
            yield Put(Span("data", begin), n, peer, slot, self.notification(k, self.rank))

    def slot(self, k: int, sender: int, at: int) -> Span:
        """Return where piece ``k`` of ``sender`` goes at rank ``at``, which has none for itself."""
        number = k % self.slots * PHASES + self.phase
        place = sender if sender < at else sender - 1
        return Span("inbox", self.piece * (number * (self.size - 1) + place))

    def notification(self, k: int, rank: int) -> int:
        """Return the notification of a rank's piece ``k``."""
        return (k * PHASES + self.phase) * self.size + rank


def _options_of(members: Members, piece: int) -> dict[str, int]:
    """Return the longest piece whose slots fit in ``INBOX_PIECES`` of ``piece``.

    >>> _options_of(Members(2), 32768)
    {'piece': 8192}
    """
    slots = PHASES * SLOTS * max(1, members.size - 1)
    return {"piece": max(ALIGN, INBOX_PIECES * piece // slots // ALIGN * ALIGN)}


def _longest(piece: int, size: int, notifications: int) -> int:
    return notifications // (PHASES * size) * piece


def _suits(case: Case) -> bool:
    members = case.members
    few = members.size == 2 and case.nbytes <= _PAIR_BYTES
    return few and not members.mapped and not members.registers


SPEC = PlanSpec(
    "one-shot",
    build,
    "all elements to all ranks: 1 latency per piece, (P-1) S per rank, inbox of 8 (P-1) pieces",
    kinds=("average", "sum"),
    wire=False,
    works_on="private",
    suits=_suits,
    options=("piece",),
    phases=PHASES,
    options_of=_options_of,
    shares=True,
    inbox_pieces=INBOX_PIECES,
    longest=_longest,
    inbox=_inbox,
)
