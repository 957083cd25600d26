"""How gradients are cut and put together before others sum them."""

from __future__ import annotations

from collections.abc import Sequence

LAYERS, FUSED = 0, 1 << 62
DDP = 25 << 20
_DDP_FIRST = 1 << 20  # small, so that its first exchange starts early
_PIECE = 1 << 20  # elements: MPI sums large arrays faster in pieces of 4 MB


def buckets(counts: Sequence[int], nbytes: int) -> list[list[int]]:
    """Divide layers into buckets: a bucket takes layers until it has so many bytes."""
    found: list[list[int]] = []
    room = 0
    for layer, count in enumerate(counts):
        if room <= 0:
            room = _DDP_FIRST if nbytes == DDP and not found else nbytes
            found.append([])
        found[-1].append(layer)
        room -= 4 * count
    return found


def pieces(count: int) -> list[int]:
    """Cut an array into pieces of 4 MB."""
    return [min(_PIECE, count - start) for start in range(0, count, _PIECE)]
