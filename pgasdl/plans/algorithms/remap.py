"""Remap: elements that ranks hold under one layout move to their places under another.

It is not in the table of plans: it is built from two layouts. The exchange is that of ``pairwise``,
whose docstring says which message proves a buffer free. Here a block for a peer is rows of
``data``, packed one after another, which the receiver unpacks into ``result``. A rank copies the
rows that it keeps once its first pieces are on their way.

Paper
    dMath's remaps: the same, a smaller or a larger set of workers, and another precision on the
    way.

Buffers
    data, result    private, as long on each rank as what its layout has there
    inbox           pieces, in the dtype of ``data``; ``wire_in`` if ``result`` has a narrower one

Example: P = 2, a matrix of 2 x 4 elements, by rows before and by columns after. Rank 0 runs
    Copy inbox[16:18] = data[2:4];  Put nothing -> rank 1, notify 0;  Copy result[0:2] = data[0:2]
    Wait 1;  Copy result[2:4] = rank 1 inbox[0:2];  Put nothing -> rank 1, taken;  Wait taken
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pgasdl.plans.algorithms.pairwise import Blocks, Sides, inbox_pieces, notifications
from pgasdl.plans.plan import Copy, Plan, Span, Step


@dataclass(frozen=True, slots=True)
class Rows:
    """``rows`` rows of ``n`` elements, from a rank's ``data`` to a rank's ``result``."""

    n: int
    rows: int
    # Where the first begins in ``data``, and the elements from one to the next.
    src: int
    src_step: int
    # The same in ``result``.
    dst: int
    dst_step: int

    @property
    def total(self) -> int:
        """Elements of all rows."""
        return self.n * self.rows

    def cut(self, begin: int, end: int) -> Iterator[Rows]:
        """Yield the packed elements ``begin`` to ``end``: whole rows, and parts of rows."""
        while begin < end:
            row, column = divmod(begin, self.n)
            whole = (end - begin) // self.n if column == 0 else 0
            n, rows = (self.n, whole) if whole else (min(end - begin, self.n - column), 1)
            src, dst = row * self.src_step + column, row * self.dst_step + column
            yield Rows(n, rows, self.src + src, self.src_step, self.dst + dst, self.dst_step)
            begin += n * rows


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows that one rank sends and receives."""

    # For each rank; rows that stay here are in both.
    sends: tuple[tuple[Rows, ...], ...]
    receives: tuple[tuple[Rows, ...], ...]
    # Elements of ``data`` and of ``result``.
    held: int
    wanted: int
    longest: int  # the most elements that any rank has for another; the same on all ranks


def build(
    rank: int,
    moves: Moves,
    *,
    piece: int,
    most: int,
    mapped: bool,
    narrows: bool = False,
    begin: int = 0,
) -> Plan:
    """Return rank's plan of one part; all ranks' moves must match.

    ``piece`` : elements of a piece, and of a slot
    ``most`` : pieces of one execution for each peer
    ``mapped`` : peers load from each other's inbox; else they put into it
    ``narrows`` : ``result`` has a narrower dtype, which is also that of the inbox
    ``begin`` : the elements for each peer that earlier parts move
    """
    size = len(moves.sends)
    inbox = "wire_in" if narrows else "inbox"
    steps = tuple(_Sides(rank, moves, piece, most, begin, inbox, mapped=mapped).steps())
    buffers = {"data": moves.held, "result": moves.wanted}
    buffers[inbox] = inbox_pieces(size, mapped) * piece
    return Plan(
        "remap",
        rank,
        size,
        moves.longest,
        (steps,),
        buffers,
        notifications(size, most),
        mapped=mapped,
        private=frozenset({"data", "result"}),
    )


def total(moves: Sequence[Rows]) -> int:
    """Return the elements of all rows."""
    return sum(rows.total for rows in moves)


class _Sides(Sides):
    """One rank, whose blocks are rows."""

    def __init__(
        self,
        rank: int,
        moves: Moves,
        piece: int,
        most: int,
        begin: int,
        inbox: str,
        *,
        mapped: bool,
    ) -> None:
        self.moves, self.begin, self.inbox = moves, begin, inbox
        part = most * piece

        def lengths(each: tuple[tuple[Rows, ...], ...]) -> tuple[int, ...]:
            left = (0 if peer == rank else total(rows) - begin for peer, rows in enumerate(each))
            return tuple(max(0, min(part, n)) for n in left)

        longest = max(0, min(part, moves.longest - begin))
        blocks = Blocks(lengths(moves.sends), lengths(moves.receives), longest)
        super().__init__(rank, len(moves.sends), blocks, piece, most, mapped)

    def steps(self) -> Iterator[Step]:
        """Yield all steps, in order."""
        if not self.pieces:
            yield from self.stay()
        yield from super().steps()

    def give(self, k: int) -> Iterator[Step]:
        """Put piece ``k`` down for its receivers; after the first, copy what stays here."""
        yield from super().give(k)
        if k == 0:
            yield from self.stay()

    def stay(self) -> Iterator[Step]:
        """Copy the rows that stay on this rank, in the first part."""
        for rows in self.moves.sends[self.rank] if self.begin == 0 else ():
            dst, src = Span("result", rows.dst), Span("data", rows.src)
            yield Copy(dst, src, rows.n, rows.rows, rows.dst_step, rows.src_step)

    def load(self, k: int, peer: int, n: int, slot: Span) -> Iterator[Step]:
        """Pack piece ``k`` for ``peer`` into its slot."""
        for at, rows in self.packed(self.moves.sends[peer], k, n):
            dst, src = Span(slot.buffer, slot.offset + at), Span("data", rows.src)
            yield Copy(dst, src, rows.n, rows.rows, rows.n, rows.src_step)

    def store(self, k: int, peer: int, n: int) -> Iterator[Step]:
        """Unpack piece ``k`` of ``peer``."""
        source = self.source(k, peer)
        for at, rows in self.packed(self.moves.receives[peer], k, n):
            src = Span(source.buffer, source.offset + at, source.rank)
            yield Copy(Span("result", rows.dst), src, rows.n, rows.rows, rows.dst_step, rows.n)

    def packed(self, moves: Sequence[Rows], k: int, n: int) -> Iterator[tuple[int, Rows]]:
        """Yield the rows of piece ``k``, of ``n`` elements, and where each begins in it."""
        first = self.begin + k * self.piece
        before = 0
        for rows in moves:
            low, high = max(first - before, 0), min(first + n - before, rows.total)
            at = before + low - first
            for part in rows.cut(low, high):
                yield at, part
                at += part.total
            before += rows.total
