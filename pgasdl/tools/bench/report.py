"""A table, printed row by row, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pgasdl.tools.bench.output import Output


class Table:
    """Prints rows as they come; ``columns``: headings, and the width of each."""

    def __init__(self, output: Output, columns: Mapping[str, int]) -> None:
        self._output, self._columns = output, columns
        self.rows: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Print the headings."""
        self._print(list(self._columns))

    def add(self, row: dict[str, Any], cells: Sequence[str]) -> None:
        """Keep a row for JSON, and print its cells."""
        self.rows.append(row)
        self._print(cells)

    def close(self) -> None:
        """Write the rows as JSON, if asked for."""
        self._output.write(self.rows)

    def _print(self, cells: Sequence[str]) -> None:
        pairs = zip(cells, self._columns.values(), strict=True)
        self._output.say(" ".join(cell.rjust(width) for cell, width in pairs).rstrip())


def short(us: float) -> str:
    """Format a figure with three or four digits."""
    if us >= 1000:
        return f"{us:.0f}"
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}" if us >= 10 else f"{us:.3f}"


def ratio(us: float, floor_us: float) -> str:
    """Format a figure as a multiple of the floor; "-" without one."""
    return f"{us / floor_us:.2f}" if floor_us > 0 else "-"
