"""A picture of one network: the parts of each variant's iteration, and timelines of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.pipeline.figures import Row
from bench.timeline import COLOURS, Bar, Span, draw_bars, lanes, legend, new_figure

_NAMES = {"host": "the host's part (turns, waits)"}


def draw(
    path: str,
    title: str,
    rows: Sequence[Row],
    timelines: Sequence[tuple[str, Sequence[Span]]],
) -> None:
    """Write the picture; the ending of ``path`` says the format.

    ``timelines``: names of variants, and the spans of their rank 0.
    """
    n_rows = max(1, len(timelines))
    figure = new_figure(13, 1 + max(2.5 * n_rows, 0.45 * len(rows)))
    grid = figure.add_gridspec(n_rows, 2, width_ratios=(1, 1.7))
    _draw_rows(figure.add_subplot(grid[:, 0]), rows)
    longest = max((_length(spans) for _, spans in timelines), default=0.0)
    for place, (name, spans) in enumerate(timelines):
        axes = figure.add_subplot(grid[place, 1])
        _draw_timeline(axes, name, spans)
        axes.set_xlim(0, 1e3 * longest)
        if place + 1 == n_rows:
            axes.set_xlabel("milliseconds")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.savefig(path, dpi=130)


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    end = max(row.iteration for row in rows)
    for place, row in enumerate(rows):
        compute = min(row.compute, row.iteration) if row.hidden is not None else row.iteration
        axes.barh(place, compute, height=0.62, color=COLOURS["backward"])
        if row.hidden is None:
            continue
        axes.barh(
            place, row.iteration - compute, left=compute, height=0.62, color=COLOURS["exposed"]
        )
        axes.barh(place + 0.39, row.exchange, height=0.14, color=COLOURS["exchange"])
        axes.annotate(
            f"{row.hidden:.0%} hidden",
            (max(row.iteration, row.exchange), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        end = max(end, row.exchange)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * end)
    axes.set_xlabel("milliseconds of an iteration")
    legend(axes, {"compute": "backward", "exposed exchange": "exposed",
                   "the exchange alone": "exchange"}, 2)  # fmt: skip


def _draw_timeline(axes: Any, name: str, spans: Sequence[Span]) -> None:
    origin = _origin(spans)
    places = {"forward": 0.0, "backward": 0.0, "host": 1.0}
    exchanges = [span for span in spans if span.track == "exchange"]
    places_of = lanes(exchanges)
    room = 3.0  # rows, for all lanes
    n_lanes = max([*places_of, 7]) + 1
    bars = [Bar(span, places[span.track] - 0.4, 0.8) for span in spans if span.track in places]
    bars += [
        Bar(span, 1.6 + room * lane / n_lanes, 0.85 * room / n_lanes)
        for span, lane in zip(exchanges, places_of, strict=True)
    ]
    draw_bars(axes, bars, origin)
    axes.set_ylim(1.6 + room, -0.6)
    axes.set_yticks([0, 1, 1.6 + room / 2], ["compute", "host", "exchanges"])
    axes.set_title(f"{name}, rank 0", loc="left", fontsize=9)
    legend(axes, {_NAMES.get(track, track): track for track in [*places, "exchange"]}, 4)


def _origin(spans: Sequence[Span]) -> float:
    """Return when the first iteration began; exchanges may have begun in the one before."""
    return min((span.begin for span in spans if span.track == "forward"), default=0.0)


def _length(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return max(span.end for span in spans) - _origin(spans)
