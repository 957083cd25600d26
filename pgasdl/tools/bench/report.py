"""The table, printed row by row, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

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


def figures(samples: Samples) -> dict[str, float]:
    """Return the times of a row."""
    return {"us": samples.median, "min_us": samples.least, "p90_us": samples.p90}


_HEADINGS = ("variant", "bytes", "plan", "us", "min", "p90", "floor", "x floor", "x min", "placed")
_WIDTHS = (24, 11, 13, 10, 10, 10, 10, 8, 8, 8)


class Report:
    """Prints rows as they come; :meth:`close` writes the JSON."""

    def __init__(self, output: Output) -> None:
        self._say, self._write = output.say, output.write
        self.rows: list[Row] = []

    def begin(self) -> None:
        """Print the table's headings."""
        self._say(_line(_HEADINGS))

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
        self._say(_line(values))

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


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
