"""The table, printed row by row, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.timing import Samples


@dataclass(slots=True)
class Row:
    """One figure beside its floor; times in microseconds.

    Attributes
    ----------
    op, variant : str
        The operation, and its variant: "core", "segment", "resnet50 layers" ...
    us, min_us, p90_us : float
        Median, minimum and ninth decile.
    floor_us, floor_min_us : float
        The same of raw loads and stores, measured in between.
    placement : str
        "near" or "far" for all figures of the row; "mixed" if they differ; "oversubscribed" if
        ranks share processors; "alone" for one rank.
    line_us : list[float]
        The latency of a cache line, one way, at the row's beginning and end.
    peers : dict[str, float]
        Medians by name; without peers that were never measured in the row's placement.
    """

    op: str
    variant: str
    transport: str
    plan: str
    ranks: int
    bytes: int
    dtype: str
    us: float
    min_us: float
    p90_us: float
    floor_us: float
    floor_min_us: float
    placement: str
    line_us: list[float]
    machine: str
    peers: dict[str, float] = field(default_factory=dict)


def figures(samples: Samples) -> dict[str, float]:
    """Return the times of a row."""
    return {"us": samples.median, "min_us": samples.least, "p90_us": samples.p90}


_HEADINGS = ("variant", "bytes", "plan", "us", "min", "p90", "floor", "x floor", "x min", "placed")
_WIDTHS = (24, 11, 13, 10, 10, 10, 10, 8, 8, 8)
_PEER_WIDTH = 25


class Report:
    """Prints rows as they come, of each library its best variant; :meth:`close` writes the JSON."""

    def __init__(self, peers: Sequence[str], output: Output) -> None:
        self._libraries = list(dict.fromkeys(map(_library, peers)))
        self._say, self._write = output.say, output.write
        self.rows: list[Row] = []

    def begin(self) -> None:
        """Print the table's headings."""
        cells = [text.rjust(width) for text, width in zip(_HEADINGS, _WIDTHS, strict=True)]
        cells += [name.rjust(_PEER_WIDTH) for name in self._libraries]
        if self._libraries:
            cells.append("best peer".rjust(9))
        self._say(" ".join(cells))

    def add(self, row: Row) -> None:
        """Print a row and keep it."""
        self.rows.append(row)
        values = (
            row.variant,
            str(row.bytes),
            row.plan,
            short(row.us),
            short(row.min_us),
            short(row.p90_us),
            short(row.floor_us),
            ratio(row.us, row.floor_us),
            ratio(row.min_us, row.floor_min_us),
            row.placement,
        )
        cells = [text.rjust(width) for text, width in zip(values, _WIDTHS, strict=True)]
        for library in self._libraries:
            variants = [(us, name) for name, us in row.peers.items() if _library(name) == library]
            cells.append((_best(variants) if variants else "-").rjust(_PEER_WIDTH))
        if self._libraries:
            best = min(row.peers.values(), default=None)
            cells.append(("-" if best is None else f"/ {ratio(best, row.us)}").rjust(9))
        self._say(" ".join(cells))

    def close(self) -> None:
        """Write the rows as JSON, if asked for."""
        self._write([asdict(row) for row in self.rows])


def short(us: float) -> str:
    """Format a figure with three or four digits."""
    if us >= 1000:
        return f"{us:.0f}"
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}" if us >= 10 else f"{us:.3f}"


def ratio(us: float, floor_us: float) -> str:
    """Format a figure as a multiple of the floor; "-" without one."""
    return f"{us / floor_us:.2f}" if floor_us > 0 else "-"


def _library(name: str) -> str:
    """Return the library of "library-variant what"."""
    return name.split(maxsplit=1)[0].partition("-")[0]


def _best(variants: Sequence[tuple[float, str]]) -> str:
    us, name = min(variants)
    return f"{short(us)} {name.removeprefix(_library(name)).lstrip(' -')}".rstrip()
