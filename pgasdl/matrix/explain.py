"""What an expression of matrices would move: bytes, messages and a predicted time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from pgasdl.matrix.choice import Way
from pgasdl.matrix.layout import Layout
from pgasdl.matrix.moves import moves_of, pairs_between
from pgasdl.plans import build_all
from pgasdl.plans.algorithms import remap
from pgasdl.plans.cost import Model, Pair, predict

# Orders of magnitude, for machines that nobody measured: memory of one host, and a network.
MAPPED = Model(Pair(1e-6, 0), copy=1e-10, remote=1e-10, gamma=2e-10)
NETWORK = Model(Pair(3e-6, 1e-10, 1e-6), copy=1e-10, remote=1e-10, gamma=2e-10)
_PIECE = 256 << 10
_MOST = 1 << 20  # pieces: all in one execution


@dataclass(frozen=True, slots=True)
class Movement:
    """One exchange, as all ranks make it together.

    Attributes
    ----------
    what : str
        The layouts, or what is reduced.
    nbytes : int
        Bytes from one rank to another, of all ranks.
    messages : int
        Pairs of ranks that send each other something.
    seconds : float
        Predicted.
    kept : int
        Bytes of a product's operands that this rank keeps, and does not read again.
    """

    what: str
    nbytes: int
    messages: int
    seconds: float
    kept: int = 0

    def __str__(self) -> str:
        micro, kept = self.seconds * 1e6, f" ({self.kept} kept here)" if self.kept else ""
        return f"{self.nbytes} bytes{kept} in {self.messages} messages, {micro:.1f} us: {self.what}"


@dataclass(slots=True)
class Explanation:
    """What an expression would move; ``print`` shows it line by line.

    Attributes
    ----------
    size : int
        Number of ranks.
    mapped : bool
        They load from each other's memory.
    model : Model
        The machine that the times are predicted for.
    movements : list[Movement]
        In order.
    """

    size: int
    mapped: bool
    model: Model
    movements: list[Movement] = field(default_factory=list)
    # Replicas that would have been filled.
    filled: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all movements."""
        return sum(each.nbytes for each in self.movements)

    @property
    def messages(self) -> int:
        """Messages of all movements."""
        return sum(each.messages for each in self.movements)

    @property
    def seconds(self) -> float:
        """Predicted seconds of all movements, one after another."""
        return sum(each.seconds for each in self.movements)

    def note_move(
        self, source: Layout, target: Layout, at: tuple[int, int] | None, item: int
    ) -> None:
        """Note a remap of elements of so many bytes."""
        size = self.size
        pairs = pairs_between(source, target, size, at)
        moved = [remap.total(rows) for (s, r), rows in pairs.items() if s != r]
        plans = [
            remap.build(
                rank,
                moves_of(pairs, rank, source, target, size),
                piece=_PIECE // item,
                most=_MOST,
                mapped=self.mapped,
            )
            for rank in range(size)
        ]
        seconds = float(predict(plans, self.model, item=item))
        what = f"{source} to {target}" + ("" if at is None else f" at {at}")
        self.movements.append(Movement(what, item * sum(moved), len(moved), seconds))

    def note_product(self, a: Layout, b: Layout, way: Way, kept: int) -> None:
        """Note a product of two matrices, of which this rank keeps so many bytes."""
        what = f"product of {a} and {b}, {way.name}"
        self.movements.append(Movement(what, way.nbytes, way.messages, way.seconds, kept))

    def note_reduction(self, array: npt.NDArray[Any]) -> None:
        """Note that all ranks' arrays are reduced, as by plan gdraa."""
        size, item = self.size, array.itemsize
        seconds = float(predict(build_all("gdraa", size, array.size), self.model, item=item))
        nbytes = 2 * (size - 1) * array.nbytes
        what = f"{array.size} numbers of {array.dtype}, reduced over all ranks"
        messages = 2 * size * (size - 1) if array.size else 0
        self.movements.append(Movement(what, nbytes, messages, seconds))

    def __str__(self) -> str:
        whole = f"{self.nbytes} bytes in {self.messages} messages, {self.seconds * 1e6:.1f} us"
        return "\n".join([*map(str, self.movements), f"together {whole}"])
