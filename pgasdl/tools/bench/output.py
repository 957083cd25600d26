"""The output of a benchmark's rank 0: lines and rows as they come, and the JSON at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgasdl.tools.text import write_json


class Output:
    """The output of a rank; only rank 0 has any.

    ``as_json``: standard output is for the JSON document, not for lines. ``file``: for the
    document; None: standard output, or nothing without ``as_json``.
    """

    def __init__(self, rank: int = 0, *, as_json: bool = False, file: str | None = None) -> None:
        self._tells, self._as_json, self._file = rank == 0, as_json, file

    def say(self, line: str) -> None:
        """Print a line, unless standard output is for the JSON document."""
        if self._tells and not self._as_json:
            print(line, flush=True)

    def warn(self, line: str) -> None:
        """Print a line, also beside a JSON document."""
        if self._tells:
            print(line, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def write(self, document: Any) -> None:
        """Write the JSON document, if it was asked for."""
        if self._tells and (self._file is not None or self._as_json):
            write_json(document, Path(self._file) if self._file is not None else None)


class Report:
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
