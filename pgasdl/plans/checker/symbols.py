"""Symbolic values: the contributions in an element, and the order of their addition.

Equal expressions are one object, so "the same bits on every rank" is an identity. All elements of
a region with one history are one piece, so the cost does not depend on the count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

# One contribution: (rank, iteration, weight).
Term = tuple[int, int, float]


class Expr:
    """An expression over the ranks' contributions. Only :class:`Symbols` makes them."""

    __slots__ = ("fault", "key", "parts", "terms")

    def __init__(
        self,
        key: tuple[object, ...],
        parts: tuple[Expr, ...] = (),
        terms: tuple[Term, ...] = (),
        fault: str | None = None,
    ) -> None:
        self.key = key
        self.parts = parts
        self.terms = terms
        self.fault = fault


class Symbols:
    """Makes expressions; equal ones are the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Expr] = {}

    def gradient(self, rank: int, iteration: int) -> Expr:
        """Return the gradient of a rank's backward pass in an iteration."""
        terms = ((rank, iteration, 1.0),)
        return self._make(Expr(("gradient", rank, iteration), terms=terms))

    def weights(self) -> Expr:
        """Return the initial weights, the same on every rank."""
        return self._make(Expr(("weights",)))

    def garbage(self, text: str) -> Expr:
        """Return a meaningless value; ``text`` says why."""
        return self._make(Expr(("garbage", text), fault=text))

    def add(self, parts: Sequence[Expr], scale: float) -> Expr:
        """Return the sum in the given order, times ``scale``."""
        if len(parts) == 1 and scale == 1.0:
            return parts[0]
        fault = next((part.fault for part in parts if part.fault), None)
        terms = tuple((r, i, w * scale) for part in parts for r, i, w in part.terms)
        if fault is None and any(part.key[0] in ("weights", "update", "touch") for part in parts):
            fault = "weights among the summands"
        return self._make(Expr(("add", *map(id, parts), scale), tuple(parts), terms, fault))

    def rounded(self, value: Expr) -> Expr:
        """Return the value after a cast to the wire's dtype; a second cast changes nothing."""
        if value.key[0] == "rounded":
            return value
        return self._make(Expr(("rounded", id(value)), (value,), value.terms, value.fault))

    def update(self, weights: Expr, gradient: Expr) -> Expr:
        """Return the weights after the owner's update."""
        fault = weights.fault or gradient.fault
        parts = (weights, gradient)
        return self._make(Expr(("update", *map(id, parts)), parts, gradient.terms, fault))

    def touch(self, weights: Expr) -> Expr:
        """Return the weights after the application's own change, the same on every rank."""
        return self._make(Expr(("touch", id(weights)), (weights,), (), weights.fault))

    def _make(self, value: Expr) -> Expr:
        return self._known.setdefault(value.key, value)


# n elements with one history that come from a given index of ``data`` or ``weights``.
Piece = tuple[int, int, Expr]


class SymbolicMemory:
    """One buffer of one rank, in pieces."""

    __slots__ = ("_pieces", "_starts")

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._starts = list(accumulate((length for length, _, _ in pieces[:-1]), initial=0))

    def read(self, offset: int, n: int) -> list[Piece]:
        """List the pieces of ``[offset, offset + n)``."""
        found: list[Piece] = []
        index = bisect_right(self._starts, offset) - 1
        end = offset + n
        while n and index < len(self._starts):
            start = self._starts[index]
            if start >= end:
                break
            length, origin, value = self._pieces[index]
            low, high = max(start, offset), min(start + length, end)
            if low < high:
                found.append((high - low, origin + low - start, value))
            index += 1
        return found

    def write(self, offset: int, pieces: Sequence[Piece]) -> None:
        """Replace the elements from ``offset`` on."""
        n = sum(length for length, _, _ in pieces)
        if not n:
            return
        index = bisect_right(self._starts, offset) - 1
        stop = index
        while stop < len(self._starts) and self._starts[stop] < offset + n:
            stop += 1
        first = self._starts[index]
        last = self._starts[stop - 1]
        head = self.read(first, offset - first)
        tail = self.read(offset + n, last + self._pieces[stop - 1][0] - offset - n)
        replaced = [*head, *pieces, *tail]
        lengths = (length for length, _, _ in replaced[:-1])
        self._starts[index:stop] = accumulate(lengths, initial=first)
        self._pieces[index:stop] = replaced

    def whole(self, offset: int, n: int) -> tuple[Piece, ...]:
        """Return the pieces, neighbours of one history joined: equal contents compare equal."""
        joined: list[Piece] = []
        for length, origin, value in self.read(offset, n):
            if joined:
                before, start, same = joined[-1]
                if same is value and start + before == origin:
                    joined[-1] = (before + length, start, value)
                    continue
            joined.append((length, origin, value))
        return tuple(joined)


def combine(
    symbols: Symbols, sources: Sequence[Sequence[Piece]], make: Callable[[list[Expr]], Expr]
) -> list[Piece]:
    """Apply ``make`` to equally long lists of pieces, element by element."""
    ends = {end for pieces in sources for end in accumulate(length for length, _, _ in pieces)}
    if len(ends) == 1:
        return [_combined(symbols, [pieces[0] for pieces in sources], make)]
    views = [SymbolicMemory(list(pieces)) for pieces in sources]
    result = []
    begin = 0
    for end in sorted(ends):
        parts = [view.read(begin, end - begin)[0] for view in views]
        result.append(_combined(symbols, parts, make))
        begin = end
    return result


def _combined(
    symbols: Symbols, parts: Sequence[Piece], make: Callable[[list[Expr]], Expr]
) -> Piece:
    length, origin, _ = parts[0]
    values = [value for _, _, value in parts]
    if any(other != origin and value.fault is None for _, other, value in parts):
        return length, origin, symbols.garbage("elements of different places were combined")
    return length, origin, make(values)
