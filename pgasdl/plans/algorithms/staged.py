"""Staged: arrays that peers cannot reach go piece by piece through memory that they map.

Paper
    MiMatrix's GDRAA for large arrays; for small ones the exchange of all with all that every MPI
    has. Only the staging is new here: ``data`` is private memory, which no peer ever touches.

Steps, on rank r of P, for the pieces k = 0..n-1 of ``data``; all reduce all (``owners=0``)
    1. Copy piece k + 1 into a slot of own ``inbox`` and flag it to all (piece 0 before all else).
    2. Wait for everybody's flag of piece k; one Reduce over piece k of all ranks, always in rank
       order 0..P-1, peers' from their slots and own from ``data``, into own ``data``.
With ``owners=1`` each piece is cut in P blocks, and rank r owns block r
    1. Copy piece k + 1, but for the own block, which nobody else needs, into a slot (piece 0 before
       all else, flagged to all).
    2. Wait for everybody's flag k; one Reduce over block r of piece k of all ranks, in rank order,
       into own ``data`` and into the slots that it was loaded from.
    3. Flag k + 1 to all: my block of piece k is reduced, and my piece k + 1 is staged.
    4. Copy the others' blocks of piece k - 1 from the own slot, where they have stored them. At the
       end, wait for everybody's flag n and copy those of piece n - 1.

Cost
    1 latency, P + 1 loads per element; with owners 2 latencies and less than 3 loads, whatever P,
    and a rank writes only what it has just read or written: with two ranks on two cores of a Xeon
    0.65 to 0.8 of the time from 4 KB to 4 MB.
    One synchronization per piece, and a last one with owners; copies hide its latency.

Phases
    No message ends an execution: peers may still load from my slots after my plan has ended. So
    executions alternate between two phases, which share neither slots nor notifications. (With
    owners one would do, but they take turns with executions without.) For n pieces, of at most
    ``piece`` elements and about equal, s = min(n, 4), or with owners min(n, 3):
    slot of piece k in phase f      ((k mod s) * 2 + f) * piece
    flag k of rank i in phase f     (k * 2 + f) * P + i
    The inbox ends with phase 1's last slot: at most 2 s pieces. Which places are whose phase's
    depends on ``piece`` and P alone: arrays of different counts may take turns on one inbox and
    one set of notifications, as long as the phases alternate.

Which message proves a buffer free
    my slot of piece k + 1      peers' flags k - 1, raised when they were done with piece k - 3: 4
                                slots, and 3 are too few
    with owners                 peers' flags k - 1: they reduced piece k - 2. 3 slots, and 2 are too
                                few. Since then they leave the slot alone, and its results were
                                copied in the step before
    peers' blocks r in slot k   their flags k: they have staged them, and wait for mine
    my slots of this phase      any flag of the last execution: raised when the one before was over
    my ``data``                 nobody else's; own steps are in order

Example: P = 3, 40 elements, piece 16: [0:16] [16:32] [32:40], slots 0, 32, 64. Rank 1, phase 0
    Reduce inbox[0:16] = data[0:16];    Put nothing -> rank 2, notify 1;   the same -> rank 0
    Reduce inbox[32:48] = data[16:32];  Put nothing -> rank 2, notify 7;   the same -> rank 0
    Wait 0;  Wait 2;    Reduce data[0:16] = 1/3 * (rank 0 inbox[0:16] + data + rank 2 inbox[0:16])
    Reduce inbox[64:72] = data[32:40];  Put nothing -> rank 2, notify 13;  the same -> rank 0
    Wait 6;  Wait 8;    Reduce data[16:32], likewise, from inbox[32:48]
    Wait 12;  Wait 14;  Reduce data[32:40], likewise, from inbox[64:72]
"""

from __future__ import annotations

from collections.abc import Iterator

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import (
    blocks,
    equal_pieces,
    flag,
    padded,
    peers_after,
    scale_of,
)
from pgasdl.plans.plan import Case, Members, Plan, PlanSpec, Put, Reduce, Span, Step, Wait

PHASES = 2
SLOTS = 4
SLOTS_WITH_OWNERS = 3
# 256 KiB of float32: a piece hides a latency, and the slots stay in the cache.
PIECE = 65536
# With P > 2 ranks owners save (P - 1)(P - 2) / P loads per element, and add a synchronization,
# whose cost grows with P: they pay off above P * P / ((P - 1)(P - 2)) times this count. Measured
# with 3, 4 and 8 ranks on two cores (EPYC): equal at 64 to 192, 48 to 64 and 32 KB of float32.
OWNERS_COUNT = 5120
# Two ranks have owners above so many elements. Measured on a Xeon: 0.7 of the time at 16 KB, 0.8 at
# 4 KB, 1.1 at 1 KB. (Where they share a core, a turn of the scheduler makes it 5 us longer up to
# 256 KB.)
PAIR_COUNT = 512
# Where ranks share cores, an array in a segment is staged, too, up to so many bytes: each round of
# flags is a turn of every rank, and loading in place takes two. Measured with four ranks on two
# cores (EPYC): 0.75 of the time at 8 bytes, 0.6 at 1 KiB, the same at 16 KiB.
_CROWDED_BYTES = 4096


def build(
    rank: int,
    size: int,
    count: int,
    *,
    kind: str = "average",
    wire: bool = False,
    piece: int = PIECE,
    owners: int | None = None,
    phase: int = 0,
) -> Plan:
    """Return rank's plan in ``phase``; ``piece`` is rounded up to whole cache lines.

    ``owners`` : 1: each rank reduces its block, 0: all reduce all, None: by :func:`owners_of`.
    """
    if wire:
        raise PlanError("plan staged: loads peers' memory as it is, in no wire precision")
    if kind == "update":
        raise PlanError("plan staged: no kind 'update', since it has no owners of weights")
    if piece < 1:
        raise PlanError(f"plan staged: piece is {piece}, at least one element is needed")
    if owners not in (None, 0, 1):
        raise PlanError(
            f"plan staged: owners is {owners}; 1: each rank reduces its block, 0: all reduce all"
        )
    if size == 1 or not count:
        return Plan("staged", rank, size, count, (), {"data": count}, 0, mapped=True)
    way = owners_of(size, count) if owners is None else owners
    exchange = _Exchange(rank, size, count, kind, padded(piece), owners=way, phase=phase)
    buffers = {"data": count, "inbox": _inbox(size, count, piece, way)}
    steps = exchange.by_owners() if exchange.owners else exchange.by_all()
    flags = exchange.notifications()
    return Plan("staged", rank, size, count, (tuple(steps),), buffers, flags, mapped=True)


def owners_of(size: int, count: int) -> int:
    """Return option ``owners`` by default, for ``count`` elements of ``size`` ranks."""
    if size == 2:
        return int(count > PAIR_COUNT)
    return int(count * (size - 1) * (size - 2) > OWNERS_COUNT * size * size)


def _inbox(size: int, count: int, piece: int = PIECE, owners: int | None = None) -> int:
    """Return the elements in the slots of both phases."""
    cut, pieces = equal_pieces(count, padded(piece))
    way = owners_of(size, count) if owners is None else owners
    slots = min(SLOTS_WITH_OWNERS if way else SLOTS, len(pieces))
    return (PHASES * slots - 1) * padded(piece) + cut


class _Exchange:
    """One rank's side of an exchange of at least one element between at least two ranks."""

    def __init__(
        self,
        rank: int,
        size: int,
        count: int,
        kind: str,
        piece: int,
        *,
        owners: int,
        phase: int,
    ) -> None:
        self.rank, self.size, self.piece, self.phase = rank, size, piece, phase
        self.scale = scale_of(kind, size)
        self.peers = peers_after(rank, size)
        self.cut, self.pieces = equal_pieces(count, piece)
        self.last = len(self.pieces) - 1
        self.owners = owners
        self.slots = min(SLOTS_WITH_OWNERS if self.owners else SLOTS, len(self.pieces))

    def notifications(self) -> int:
        """Notifications of both phases."""
        return PHASES * self.size * (len(self.pieces) + self.owners)

    def by_all(self) -> Iterator[Step]:
        """Every rank reduces everything."""
        yield from self.stage(0)
        yield from self.raise_all(0)
        for k, (_, n) in enumerate(self.pieces):
            if k < self.last:
                yield from self.stage(k + 1)
                yield from self.raise_all(k + 1)
            yield from self.wait_all(k)
            yield Reduce((self.data(k),), self.contributions(k), n, self.scale)

    def by_owners(self) -> Iterator[Step]:
        """Every rank reduces its block of each piece and copies the others'."""
        yield from self.stage(0)
        yield from self.raise_all(0)
        for k in range(len(self.pieces)):
            if k < self.last:
                yield from self.stage(k + 1)
            yield from self.wait_all(k)
            begin, n = self.block(k, self.rank)
            if n:
                everywhere = self.contributions(k, begin)
                yield Reduce(everywhere, everywhere, n, self.scale)
            yield from self.raise_all(k + 1)
            if k:
                yield from self.collect(k - 1)
        yield from self.wait_all(self.last + 1)
        yield from self.collect(self.last)

    def stage(self, k: int) -> Iterator[Step]:
        """Copy the elements of piece ``k`` that others need into its slot."""
        n = self.pieces[k][1]
        runs = [(0, n)]
        if self.owners:
            begin, own = self.block(k, self.rank)
            runs = [(0, begin), (begin + own, n - begin - own)]
        for begin, length in runs:
            if length:
                yield Reduce((self.slot(k, begin),), (self.data(k, begin),), length)

    def collect(self, k: int) -> Iterator[Step]:
        """Copy the other owners' blocks of piece ``k``, which they have stored here."""
        for owner in reversed(self.peers):
            begin, n = self.block(k, owner)
            if n:
                yield Reduce((self.data(k, begin),), (self.slot(k, begin),), n)

    def block(self, k: int, owner: int) -> tuple[int, int]:
        """Return offset and length of a rank's block of piece ``k``; a short piece cuts it off."""
        begin, n = blocks(self.cut, self.size)[owner]
        end = self.pieces[k][1]
        return min(begin, end), max(0, min(n, end - begin))

    def contributions(self, k: int, begin: int = 0) -> tuple[Span, ...]:
        """Return piece ``k`` of all ranks from element ``begin`` on, in rank order."""
        return tuple(
            self.data(k, begin) if rank == self.rank else self.slot(k, begin, rank)
            for rank in range(self.size)
        )

    def data(self, k: int, begin: int = 0) -> Span:
        """Return piece ``k`` of the array, from element ``begin`` on."""
        return Span("data", self.pieces[k][0] + begin)

    def slot(self, k: int, begin: int = 0, rank: int | None = None) -> Span:
        """Return where a rank stages piece ``k``, from element ``begin`` on."""
        return Span("inbox", self.piece * (k % self.slots * PHASES + self.phase) + begin, rank)

    def raise_all(self, number: int) -> list[Put]:
        """Raise flag ``number`` at all others."""
        return [flag(peer, self.notification(number, self.rank)) for peer in self.peers]

    def wait_all(self, number: int) -> list[Wait]:
        """Wait for flag ``number`` of all others."""
        return [Wait(self.notification(number, peer), peer) for peer in reversed(self.peers)]

    def notification(self, number: int, rank: int) -> int:
        """Return the notification of a rank's flag ``number``."""
        return (number * PHASES + self.phase) * self.size + rank


def _options_of(members: Members, piece: int) -> dict[str, int]:
    del members
    return {"piece": piece}


def _suits(case: Case) -> bool:
    few = case.members.oversubscribed and case.nbytes < _CROWDED_BYTES
    return few or not case.in_segments


def _longest(piece: int, size: int, notifications: int) -> int:
    return (notifications // (PHASES * size) - 1) * piece


SPEC = PlanSpec(
    "staged",
    build,
    "mapped staging for arrays that are not: one latency per piece, or two and few loads",
    kinds=("average", "sum"),
    wire=False,
    mapped=True,
    works_on="private",
    suits=_suits,
    options=("piece", "owners"),
    phases=PHASES,
    options_of=_options_of,
    shares=True,
    inbox_pieces=PHASES * SLOTS,
    longest=_longest,
    inbox=_inbox,
)
