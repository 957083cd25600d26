"""The parts of a reproduction: tables with the paper's figures beside ours, and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pgasdl.tools.chart import Chart, draw


class Printed(float):
    """A figure of a paper, shown with the digits that the paper prints."""

    def __init__(self, text: str) -> None:
        self.text = str(text)


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Rows of text; ``notes`` say where ours differs, and why."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        texts = [[_text(cell) for cell in row] for row in self.rows]
        widths = [
            max(len(column), *(len(row[at]) for row in texts))
            for at, column in enumerate(self.columns)
        ]

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) + " |"

        ruled = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
        lines = [f"## {self.title}", "", line(list(self.columns)), ruled, *map(line, texts), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Study:
    """A paper's reproduction."""

    paper: str
    source: str
    machine: str
    tables: Sequence[PaperTable]
    charts: Sequence[Chart] = field(default=())

    def __str__(self) -> str:
        head = [f"# {self.paper}", "", f"Figures of: {self.source}", f"Simulated: {self.machine}"]
        return "\n\n".join(["\n".join(head), *map(str, self.tables)]) + "\n"

    def write(self, folder: Path) -> list[str]:
        """Write the tables, and the charts where matplotlib is installed; return the messages."""
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / f"{self.paper}.md"
        text.write_text(str(self), encoding="utf-8")
        said = [f"wrote {text}"]
        return said + [draw(chart, folder) for chart in self.charts]


def names(text: str) -> list[str]:
    """Return the names of a table's columns, as one line has them."""
    return text.split(" | ")


def figures(paper: str) -> dict[str, Any]:
    """Return the figures that the paper printed, and their source."""
    text = resources.files(__package__).joinpath("figures.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_float=Printed)[paper]
    return found


def _text(cell: object) -> str:
    if isinstance(cell, Printed):
        return cell.text
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"
    return str(cell)
