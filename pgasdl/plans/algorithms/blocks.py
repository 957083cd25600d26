"""Arithmetic that several plans share: owners of elements, and the order of peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from pgasdl.plans.plan import Flush, Put, Reduce, Span, Step

# 16 float32 fill a cache line; two owners never write to the same line.
ALIGN = 16
# Default pieces of a pipeline: 128 KiB of float32, and not too many.
CHUNK = 32768
MOST_CHUNKS = 32


def blocks(count: int, size: int, align: int = ALIGN) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``size`` nearly equal blocks of whole multiples of ``align``.

    Returns ``(offset, n)`` per rank. Every offset below ``count`` is a multiple of ``align``, the
    first block is the largest, and ranks left without elements come last, with ``n = 0``.

    >>> blocks(100, 3)
    [(0, 48), (48, 32), (80, 20)]
    >>> blocks(5, 3)
    [(0, 5), (5, 0), (5, 0)]
    """
    cuts = [edge(count, size, rank, align) for rank in range(size + 1)]
    return [(low, high - low) for low, high in pairwise(cuts)]


def edge(count: int, size: int, rank: int, align: int = ALIGN) -> int:
    """Return where the block of ``rank`` begins and that of the rank before it ends.

    >>> [edge(100, 3, rank) for rank in range(4)]
    [0, 48, 80, 100]
    """
    quotient, more = divmod(-(-count // align), size)
    return min(count, align * (rank * quotient + min(rank, more)))


def chunks_of(count: int, chunks: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements into at most ``chunks`` pieces, none of them empty.

    ``chunks = 0``: an estimate of how many make the hops of a pipeline overlap.
    """
    wanted = chunks or min(MOST_CHUNKS, max(1, count // CHUNK))
    return [(offset, n) for offset, n in blocks(count, wanted) if n]


def equal_pieces(count: int, piece: int) -> tuple[int, list[tuple[int, int]]]:
    """Cut ``count`` elements, at least one, into pieces of at most ``piece``, whole cache lines.

    Returns the length of all but the last, and ``(offset, n)`` of each.

    >>> equal_pieces(40, 32)
    (32, [(0, 32), (32, 8)])
    >>> equal_pieces(100, 64)
    (64, [(0, 64), (64, 36)])
    """
    n_pieces = -(-count // piece)
    cut = padded(-(-count // n_pieces))
    return cut, [(begin, min(cut, count - begin)) for begin in range(0, count, cut)]


def padded(count: int, align: int = ALIGN) -> int:
    """Round ``count`` up to whole multiples of ``align``."""
    return -(-count // align) * align


def block_slots(size: int, count: int) -> int:
    """Return the elements of an inbox with a slot for a block of each other rank.

    >>> block_slots(3, 100)
    96
    """
    return (size - 1) * padded(edge(count, size, 1))


def peers_after(rank: int, size: int) -> list[int]:
    """List the other ranks, starting behind ``rank``: each rank sends to another one first.

    >>> peers_after(1, 4)
    [2, 3, 0]
    """
    return [(rank + step) % size for step in range(1, size)]


def scale_of(kind: str, size: int) -> float:
    """Return the factor of the sum of all contributions. Updates take the mean gradient."""
    return 1.0 / size if kind in ("average", "update") else 1.0


def flag(peer: int, notification: int) -> Put:
    """Raise a notification at ``peer``, and send nothing."""
    return Put(Span("data", 0), 0, peer, Span("data", 0), notification)


def flushed(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps, then Flush if they sent anything: no message answers their Puts."""
    sent = False
    for step in steps:
        sent = sent or (isinstance(step, Put) and step.n > 0)
        yield step
    if sent:
        yield Flush()


def cast(source: str, target: str, offset: int, n: int) -> Reduce:
    """Copy own elements between two buffers; their dtypes may differ."""
    return Reduce((Span(target, offset),), (Span(source, offset),), n)
