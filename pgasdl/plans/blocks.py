"""Arithmetic that several plans share: who owns which elements, and in which order peers come."""

from __future__ import annotations

from itertools import pairwise

from pgasdl.plans.plan import Put, Reduce, Span

# 16 float32 fill a cache line: two owners never write to the same one.
ALIGN = 16


def blocks(count: int, size: int, align: int = ALIGN) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``size`` blocks, as equal as whole multiples of ``align`` allow.

    Returns ``(offset, n)`` per rank. Every offset below ``count`` is a multiple of ``align``, the
    first block is the largest, and ranks left without elements come last, with ``n = 0``.

    >>> blocks(100, 3)
    [(0, 48), (48, 32), (80, 20)]
    >>> blocks(5, 3)
    [(0, 5), (5, 0), (5, 0)]
    """
    quotient, more = divmod(-(-count // align), size)
    cuts = [min(count, align * (rank * quotient + min(rank, more))) for rank in range(size + 1)]
    return [(low, high - low) for low, high in pairwise(cuts)]


def padded(count: int, align: int = ALIGN) -> int:
    """Round ``count`` up to whole multiples of ``align``."""
    return -(-count // align) * align


def peers_after(rank: int, size: int) -> list[int]:
    """List the other ranks, starting behind ``rank``, so that no two ranks send to the same first.

    >>> peers_after(1, 4)
    [2, 3, 0]
    """
    return [(rank + step) % size for step in range(1, size)]


def scale_of(kind: str, size: int) -> float:
    """Factor of the sum of all contributions: updates are made with the mean gradient."""
    return 1.0 if kind == "sum" else 1.0 / size


def flag(peer: int, notification: int) -> Put:
    """Raise a notification at ``peer``, and send nothing."""
    return Put(Span("data", 0), 0, peer, Span("data", 0), notification)


def cast(source: str, target: str, offset: int, n: int) -> Reduce:
    """Copy own elements between two buffers, whatever their dtypes."""
    return Reduce((Span(target, offset),), (Span(source, offset),), n)
