"""Pairwise: ranks have blocks for each other in private memory, which no peer ever touches.

It is the plan of torch.distributed's broadcast, gather, scatter, all-gather, all-to-all, reduce and
reduce-scatter. It is not in the table of plans: it is built from the lengths of the blocks.

Paper
    The pairwise exchange of every MPI, piece by piece through slots as in ``staged``.

Steps, on rank r of P, for the pieces k = 0..K-1 of all blocks
    1. Copy piece k of the block for each receiver into its slot k mod S, once the receiver's flag
       says that it took piece k - S; ``same``: one block is for all, and has one slot. Flag the
       receivers; or, where nothing is mapped, Put it into their slots for r, and flag; ``direct``:
       without the copy, from where the block lies.
    2. For each sender: wait for its flag of piece k - 1, copy that from the sender's slot (or from
       mine for it) into the result, and flag "taken".
       ``reduce``: wait for all, and reduce their pieces and mine, in the order of the ranks.
    3. At last wait until all have taken the last S pieces.

Cost
    Two copies of each byte, one of them from a cache; 2 latencies, and no more for long blocks,
    whose pieces overlap; inbox of S pieces for each rank, of 2 S where nothing is mapped.

Notifications
    k P + s: piece k of sender s is there. (M + k) P + p: receiver p took piece k, of M at most. So
    each is raised by one rank, whatever the blocks are.

Which message proves a buffer free
    my slot                "taken" of all its receivers, before it is filled again or the plan ends
    receiver's slot for me the same
    arrays                 nobody else touches them; ``direct``: "taken" of what left from there,
                           so no block may be taken into one that is given
    So executions of any blocks take turns on one inbox and one set of notifications.

Example: P = 3, rank 0 broadcasts 10 elements in pieces of 8. Rank 0 runs
    Reduce inbox[0:8] = give0[0:8];  Put nothing -> rank 1, notify 0;  Put nothing -> rank 2, ...
    Reduce inbox[8:10] = give0[8:10];  Put nothing -> rank 1, notify 3;  Put nothing -> rank 2, ...
    Wait, M = 4, for 13, 14, 16, 17
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pgasdl.plans.algorithms.blocks import peers_after
from pgasdl.plans.plan import Plan, Put, Reduce, Span, Step, Wait

SLOTS = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one rank, in elements."""

    # How many elements this rank has for each rank, and each rank for it.
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    longest: int  # no block of any rank is longer; the same on all ranks
    # All receivers get the same block, buffer ``give0``; else ``give`` and the receiver's number.
    same: bool = False
    # Blocks received are reduced into ``take0``, with the own block ``give`` and the rank's number;
    # else they go into ``take`` and the sender's number.
    reduces: bool = False
    scale: float = 1.0  # the factor of the sum


def build(
    rank: int, blocks: Blocks, *, piece: int, most: int, mapped: bool, direct: bool = False
) -> Plan:
    """Return rank's plan; all ranks' blocks must match.

    ``piece`` : elements of a piece, and of a slot
    ``most`` : the most pieces of a block; ``blocks.longest`` has no more
    ``mapped`` : peers load from each other's inbox; else they put into it
    ``direct`` : pieces are put from anywhere, not from slots alone
    """
    size = len(blocks.sends)
    sides = Sides(rank, size, blocks, piece, most, mapped, direct=direct)
    gives = 1 if blocks.same else size
    takes = 1 if blocks.reduces else size
    names = [f"give{number}" for number in range(gives)]
    names += [f"take{number}" for number in range(takes)]
    buffers = dict.fromkeys(names, blocks.longest) | {"inbox": sides.slots * piece}
    steps = tuple(sides.steps())
    flags = notifications(size, most)
    return Plan("pairwise", rank, size, blocks.longest, (steps,), buffers, flags, mapped=mapped)


def inbox_pieces(size: int, one_side: bool) -> int:
    """Return the pieces in the inbox: where receivers load or senders need none, of one side."""
    return SLOTS * size * (1 if one_side else 2)


def notifications(size: int, most: int) -> int:
    """Return the notifications of ``most`` pieces."""
    return 2 * most * size


class Sides:
    """One rank, as a sender and as a receiver."""

    inbox = "inbox"

    def __init__(
        self,
        rank: int,
        size: int,
        blocks: Blocks,
        piece: int,
        most: int,
        mapped: bool,
        *,
        direct: bool = False,
    ) -> None:
        self.rank, self.size, self.blocks, self.piece = rank, size, blocks, piece
        self.most, self.mapped, self.direct = most, mapped, direct
        self.slots = inbox_pieces(size, mapped or direct)
        self.peers = peers_after(rank, size)
        self.pieces = -(-blocks.longest // piece)

    def steps(self) -> Iterator[Step]:
        """Yield all steps, in order."""
        for k in range(self.pieces + 1):
            if k < self.pieces:
                yield from self.give(k)
            if k > 0:
                yield from self.take(k - 1)
        for k in range(max(0, self.pieces - SLOTS), self.pieces):
            yield from self.await_taken(k)

    def give(self, k: int) -> Iterator[Step]:
        """Put piece ``k`` down for its receivers."""
        if k >= SLOTS:
            yield from self.await_taken(k - SLOTS)
        for number, peer in enumerate(self.receivers(k)):
            n = self.length(k, self.blocks.sends[peer])
            slot = self.slot(k, 0 if self.blocks.same else peer)
            if self.direct:
                slot = Span("give0" if self.blocks.same else f"give{peer}", k * self.piece)
            elif number == 0 or not self.blocks.same:
                yield from self.load(k, peer, n, slot)
            here = k * self.size + self.rank
            yield Put(slot, 0 if self.mapped else n, peer, self.landing(k, self.rank), here)

    def take(self, k: int) -> Iterator[Step]:
        """Take piece ``k`` of all senders."""
        begin = k * self.piece
        senders = [peer for peer in reversed(self.peers) if self.blocks.receives[peer] > begin]
        for peer in senders:
            yield Wait(k * self.size + peer, peer)
            if self.blocks.reduces:
                continue
            yield from self.store(k, peer, self.length(k, self.blocks.receives[peer]))
            yield self.flag(peer, self.taken(k, self.rank))
        own = self.blocks.receives[self.rank]
        if own > begin and not self.blocks.reduces:
            give = 0 if self.blocks.same else self.rank
            mine = Span(f"give{give}", begin)
            yield Reduce((Span(f"take{self.rank}", begin),), (mine,), self.length(k, own))
        if own > begin and self.blocks.reduces:
            everywhere = tuple(
                Span(f"give{peer}", begin) if peer == self.rank else self.source(k, peer)
                for peer in range(self.size)
            )
            n = self.length(k, own)
            yield Reduce((Span("take0", begin),), everywhere, n, self.blocks.scale)
            for peer in senders:
                yield self.flag(peer, self.taken(k, self.rank))

    def load(self, k: int, peer: int, n: int, slot: Span) -> Iterator[Step]:
        """Copy piece ``k`` for ``peer`` into its slot."""
        name = "give0" if self.blocks.same else f"give{peer}"
        yield Reduce((slot,), (Span(name, k * self.piece),), n)

    def store(self, k: int, peer: int, n: int) -> Iterator[Step]:
        """Copy piece ``k`` of ``peer`` from its slot into the result."""
        yield Reduce((Span(f"take{peer}", k * self.piece),), (self.source(k, peer),), n)

    def await_taken(self, k: int) -> Iterator[Step]:
        """Wait until all receivers have taken piece ``k``."""
        for peer in self.receivers(k):
            yield Wait(self.taken(k, peer), peer)

    def receivers(self, k: int) -> list[int]:
        """Return the peers whose block has a piece ``k``."""
        return [peer for peer in self.peers if self.blocks.sends[peer] > k * self.piece]

    def length(self, k: int, n: int) -> int:
        """Return the elements of piece ``k`` of a block of ``n``."""
        return min(self.piece, n - k * self.piece)

    def slot(self, k: int, peer: int, rank: int | None = None) -> Span:
        """Return where piece ``k`` for ``peer`` lies, here or on a rank."""
        return Span(self.inbox, (peer * SLOTS + k % SLOTS) * self.piece, rank)

    def landing(self, k: int, sender: int) -> Span:
        """Return where a sender puts its piece ``k``, if it puts any."""
        first = 0 if self.mapped or self.direct else self.size
        return Span(self.inbox, ((first + sender) * SLOTS + k % SLOTS) * self.piece)

    def flag(self, peer: int, notification: int) -> Put:
        """Raise a notification at ``peer``, and send nothing."""
        nothing = Span(self.inbox, 0)
        return Put(nothing, 0, peer, nothing, notification)

    def source(self, k: int, peer: int) -> Span:
        """Return where piece ``k`` of a sender is loaded from."""
        if self.mapped:
            return self.slot(k, 0 if self.blocks.same else self.rank, peer)
        return self.landing(k, peer)

    def taken(self, k: int, receiver: int) -> int:
        """Return the notification that a receiver took piece ``k``."""
        return (self.most + k) * self.size + receiver
