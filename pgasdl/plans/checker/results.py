"""The result of each kind of plan: what each rank ends with, and whether it has that.

All ranks must have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

from pgasdl.plans.algorithms.blocks import blocks, scale_of
from pgasdl.plans.algorithms.remap import Moves
from pgasdl.plans.checker.symbols import Expr, Piece, SymbolicMemory, Symbols
from pgasdl.plans.plan import EXCHANGES, Plan, is_wire


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a rank's result."""

    # First element, and number of elements.
    begin: int
    n: int
    # Rank that they come from; None: the sum over all ranks (the mean, in kinds ``average`` and
    # ``update``).
    source: int | None
    origin: int  # their first element in the ``data`` that they come from


def regions(kind: str, rank: int, size: int, count: int, root: int = 0) -> list[Region]:
    """List the parts of a rank's result. Other elements may hold anything.

    average, sum    every rank has the mean, or the sum
    update          the same, of the gradients; the result is in ``weights``
    reduce          ``root`` has the sum
    broadcast       every rank has the elements of ``root``
    reduce-scatter  rank r has block r of the sum, blocks being :func:`pgasdl.plans.blocks`
    all-gather      every rank has block r of rank r, for every r
    all-to-all      rank r has block r of every rank, in order of rank, blocks being of
                    count div size elements; the elements behind the blocks stay
    """
    found = []
    if kind in EXCHANGES or (kind == "reduce" and rank == root):
        found = [Region(0, count, None, 0)]
    elif kind == "broadcast":
        found = [Region(0, count, root, 0)]
    elif kind == "reduce-scatter":
        begin, n = blocks(count, size)[rank]
        found = [Region(begin, n, None, begin)]
    elif kind == "all-gather":
        found = [Region(begin, n, r, begin) for r, (begin, n) in enumerate(blocks(count, size))]
    elif kind == "all-to-all":
        n = count // size
        found = [Region(r * n, n, r, rank * n) for r in range(size)]
        found.append(Region(size * n, count - size * n, rank, size * n))
    return [region for region in found if region.n]


def moved(moves: Moves) -> list[Region]:
    """List the parts of a rank's ``result`` after a remap: every row that it receives."""
    return [
        Region(rows.dst + i * rows.dst_step, rows.n, sender, rows.src + i * rows.src_step)
        for sender, received in enumerate(moves.receives)
        for rows in received
        for i in range(rows.rows)
    ]


class Verdict:
    """Judges the results, in ``buffer``, of all ranks, layers and iterations of one run."""

    def __init__(
        self,
        plans: Sequence[Plan],
        kind: str,
        symbols: Symbols,
        root: int = 0,
        results: Sequence[Sequence[Region]] | None = None,
    ) -> None:
        self.buffer = "weights" if kind == "update" else "data"
        if "result" in plans[0].buffers:
            self.buffer = "result"
        self._size = len(plans)
        count = plans[0].count
        self._regions: Sequence[Sequence[Region]] = results or [
            regions(kind, p.rank, self._size, count, root) for p in plans
        ]
        self._wire = any(map(is_wire, plans[0].buffers))
        self._scale = scale_of(kind, self._size)
        self._kind = kind
        self._symbols = symbols
        self._first: dict[tuple[int, int, int, int], tuple[int, tuple[Piece, ...]]] = {}
        self._right: set[tuple[int, int, int]] = set()

    def fault(self, layer: int, rank: int, iteration: int, memory: SymbolicMemory) -> str | None:
        """Return the fault in a rank's result of an iteration, or None."""
        for region in self._regions[rank]:
            fault = self._fault_in(region, layer, rank, iteration, memory)
            if fault is not None:
                return fault
        return None

    def _fault_in(
        self, region: Region, layer: int, rank: int, iteration: int, memory: SymbolicMemory
    ) -> str | None:
        pieces = memory.whole(region.begin, region.n)
        key = layer, iteration, region.begin, region.n
        first, agreed = self._first.setdefault(key, (rank, pieces))
        if region.source is None and first != rank and pieces == agreed:
            return None
        start, origin = region.begin, region.origin
        for n, held, value in pieces:
            if region.source is None:
                fault = self._fault_of(layer, iteration, value)
            else:
                fault = self._no_copy(region.source, iteration, value)
            if fault is None and held != origin:
                fault = f"holds what belongs to [{held}:{held + n}], not [{origin}:{origin + n}]"
            if fault is not None:
                return f"[{start}:{start + n}]: {fault}"
            start += n
            origin += n
        if region.source is None and pieces != agreed:
            return f"not the bits that rank {first} has"
        return None

    def _no_copy(self, source: int, iteration: int, value: Expr) -> str | None:
        right = self._symbols.gradient(source, iteration)
        if value.fault or value is right or (self._wire and value is self._symbols.rounded(right)):
            return value.fault
        return f"not what rank {source} had in iteration {iteration}, unchanged"

    def _fault_of(self, layer: int, iteration: int, value: Expr) -> str | None:
        if (layer, iteration, id(value)) in self._right:
            return None
        fault = value.fault or self._wrong_terms(iteration, value)
        if fault is None and self._kind == "update":
            fault = self._wrong_weights(layer, iteration, value)
        if fault is None:
            self._right.add((layer, iteration, id(value)))
        return fault

    def _wrong_terms(self, iteration: int, value: Expr) -> str | None:
        seen: dict[int, int] = {}
        for rank, when, weight in value.terms:
            if when != iteration:
                return f"contains rank {rank}'s contribution to iteration {when}"
            if not isclose(weight, self._scale, rel_tol=1e-9):
                return f"contains rank {rank}'s contribution times {weight}, not {self._scale}"
            seen[rank] = seen.get(rank, 0) + 1
        missing = [rank for rank in range(self._size) if rank not in seen]
        if missing:
            return f"contributions of ranks {missing} are missing"
        twice = [rank for rank, times in seen.items() if times > 1]
        return f"contributions of ranks {twice} more than once" if twice else None

    def _wrong_weights(self, layer: int, iteration: int, value: Expr) -> str | None:
        if value.key[0] != "update":
            return "not the weights that an update made"
        before = value.parts[0]
        if iteration == 0:
            right = before is self._symbols.weights()
        else:
            right = (
                before.key[0] == "touch"
                and (layer, iteration - 1, id(before.parts[0])) in self._right
            )
        return None if right else "an update of weights that are not those of the last iteration"
