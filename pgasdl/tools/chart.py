"""Charts: data, and pictures where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLOURS = 10  # matplotlib's own; further lines are dashed


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line; the paper's points are marks."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    paper: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    log_x: bool = True
    log_y: bool = True


def draw(chart: Chart, folder: Path) -> str:
    """Draw a chart to a PNG file; return a message with the file, or why there is none."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter
    except ImportError as error:
        return f"no picture of {chart.name}: {error}; pip install 'pgasdl[apps]'"
    figure = Figure(figsize=(8.6, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for place, series in enumerate(chart.series):
        if series.paper:
            axes.plot(series.x, series.y, "D", ms=7, mfc="none", mew=1.8, label=series.label)
        else:
            line = "-" if place < _COLOURS else "--"
            axes.plot(series.x, series.y, line, marker=".", lw=1.6, label=series.label)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for series in chart.series for x in series.x}))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.tick_params(axis="x", labelsize=8, rotation=30)
    if chart.log_y:
        axes.set_yscale("log")
        plain = FuncFormatter(lambda y, _: f"{y:g}")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain if high < 20 * low else NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = folder / f"{chart.name}.png"
    figure.savefig(path)
    return f"wrote {path}"


def _short(value: float, _: object = None) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if (value > size and value % size == 0) or value == size == 1 << 20:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
