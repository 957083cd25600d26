"""A picture of one network: what each variant's iteration consists of, and timelines of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.pipeline.figures import Row
from bench.pipeline.trace import Span

_COLOURS = {
    "forward": "#9bb7dc",
    "backward": "#2f5d9b",
    "host": "#7a4a12",
    "exchange": "#f0a04b",
    "exposed": "#cc2936",
}
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    n_rows = max(1, len(timelines))
    figure = plt.figure(figsize=(13, 1 + max(2.5 * n_rows, 0.45 * len(rows))), layout="constrained")
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
    plt.close(figure)


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    end = max(row.iteration for row in rows)
    for place, row in enumerate(rows):
        compute = min(row.compute, row.iteration) if row.hidden is not None else row.iteration
        axes.barh(place, compute, height=0.62, color=_COLOURS["backward"])
        if row.hidden is None:
            continue
        axes.barh(
            place, row.iteration - compute, left=compute, height=0.62, color=_COLOURS["exposed"]
        )
        axes.barh(place + 0.39, row.exchange, height=0.14, color=_COLOURS["exchange"])
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
    _legend(axes, {"compute": "backward", "exposed exchange": "exposed",
                   "the exchange alone": "exchange"}, 2)  # fmt: skip


def _draw_timeline(axes: Any, name: str, spans: Sequence[Span]) -> None:
    origin = _origin(spans)
    places = {"forward": 0.0, "backward": 0.0, "host": 1.0}
    exchanges = [span for span in spans if span.track == "exchange"]
    lanes = _lanes(exchanges)
    room = 3.0  # rows, for all lanes
    n_lanes = max([*lanes, 7]) + 1
    boxes = [(span, places[span.track], 0.8) for span in spans if span.track in places]
    boxes += [
        (span, 1.6 + room * lane / n_lanes, 0.85 * room / n_lanes)
        for span, lane in zip(exchanges, lanes, strict=True)
    ]
    for span, top, height in boxes:
        begin = max(span.begin, origin)
        if span.end > begin:
            axes.broken_barh(
                [(1e3 * (begin - origin), 1e3 * (span.end - begin))],
                (top - (0.4 if span.track in places else 0), height),
                facecolor=_COLOURS[span.track],
                edgecolor="white",
                linewidth=0.15,
            )
    axes.set_ylim(1.6 + room, -0.6)
    axes.set_yticks([0, 1, 1.6 + room / 2], ["compute", "host", "exchanges"])
    axes.set_title(f"{name}, rank 0", loc="left", fontsize=9)
    _legend(axes, {_NAMES.get(track, track): track for track in [*places, "exchange"]}, 4)


def _lanes(exchanges: Sequence[Span]) -> list[int]:
    """Return a lane for each; those of one lane do not overlap."""
    ends: list[float] = []
    found = {}
    for span in sorted(exchanges, key=lambda span: span.begin):
        lane = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[lane : lane + 1] = [span.end]
        found[id(span)] = lane
    return [found[id(span)] for span in exchanges]


def _origin(spans: Sequence[Span]) -> float:
    """Return when the first iteration began; exchanges may have begun in the one before."""
    return min((span.begin for span in spans if span.track == "forward"), default=0.0)


def _length(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return max(span.end for span in spans) - _origin(spans)


def _legend(axes: Any, labels: dict[str, str], columns: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[key], label=label) for label, key in labels.items()]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        handlelength=1.0,
        columnspacing=1.0,
    )
