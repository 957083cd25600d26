"""Spans of each rank's work, for a picture and for Perfetto (https://ui.perfetto.dev).

Moments are those of CLOCK_MONOTONIC, which all ranks of one machine share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took time.

    ``track``: "forward" or "backward" of a layer, "host" for the processor's work for the exchange,
    or "exchange", from the moment when it began to when this rank saw that it had ended.
    """

    track: str
    name: str
    begin: float
    end: float


class Recorder:
    """Keeps spans while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.spans: list[Span] = []

    def add(self, track: str, name: str, begin: float, end: float) -> None:
        """Note a span."""
        if self.on:
            self.spans.append(Span(track, name, begin, end))

    def take(self) -> list[Span]:
        """Return the spans, and forget them."""
        taken, self.spans = self.spans, []
        return taken


Recorded = Mapping[str, Sequence[Sequence[Span]]]  # of every variant, by rank


def chrome(recorded: Recorded, origin: float) -> dict[str, Any]:
    """Return a document of the Trace Event Format: a process for each variant and rank."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    process = 0
    for variant, ranks in recorded.items():
        for rank, spans in enumerate(ranks):
            process += 1
            names += _metadata(process, 0, "process", f"{variant}: rank {rank}", process)
            threads: dict[str, int] = {}
            for row, span in zip(_rows(spans), spans, strict=True):
                if row not in threads:
                    threads[row] = 10 * _place(span) + len(threads)
                    names += _metadata(process, threads[row], "thread", row, threads[row])
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.track,
                        "pid": process,
                        "tid": threads[row],
                        "ts": round(1e6 * (span.begin - origin), 3),
                        "dur": round(1e6 * (span.end - span.begin), 3),
                        "args": {"variant": variant, "rank": rank},
                    }
                )
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {"clock": "CLOCK_MONOTONIC", "origin_seconds": origin},
    }


def write(path: str, recorded: Recorded) -> None:
    """Write the document that Perfetto opens."""
    begins = [span.begin for ranks in recorded.values() for spans in ranks for span in spans]
    document = chrome(recorded, min(begins, default=0.0))
    Path(path).write_text(json.dumps(document), encoding="ascii")


def _rows(spans: Sequence[Span]) -> list[str]:
    """Return the row of each span; spans of one row do not overlap, exchanges need several."""
    lane = iter(lanes([span for span in spans if span.track == "exchange"]))
    usual = {"forward": "compute", "backward": "compute", "host": "host"}
    return [usual.get(span.track) or f"exchange {next(lane) + 1}" for span in spans]


def _place(span: Span) -> int:
    return {"forward": 1, "backward": 1, "host": 2, "exchange": 3}[span.track] * 100


def _metadata(process: int, thread: int, of: str, name: str, index: int) -> list[dict[str, Any]]:
    at = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**at, "name": f"{of}_name", "args": {"name": name}},
        {**at, "name": f"{of}_sort_index", "args": {"sort_index": index}},
    ]


# --- pictures


COLOURS = {
    "forward": "#9bb7dc",
    "backward": "#2f5d9b",
    "host": "#7a4a12",
    "turn": "#7a4a12",
    "update": "#5a9a5a",
    "exchange": "#f0a04b",
    "exposed": "#cc2936",
    "waiting": "#cc2936",
}


class Bar(NamedTuple):
    """A span's box in a picture: where it begins from top to bottom, and its height."""

    span: Span
    top: float
    height: float


def lanes(spans: Sequence[Span]) -> list[int]:
    """Return a lane for each; those of one lane do not overlap."""
    ends: list[float] = []
    found = {}
    for place, span in sorted(enumerate(spans), key=lambda each: each[1].begin):
        lane = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[lane : lane + 1] = [span.end]
        found[place] = lane
    return [found[place] for place in range(len(spans))]


def draw_bars(axes: Any, bars: Iterable[Bar], origin: float) -> None:
    """Draw a timeline, in milliseconds after ``origin``; spans that began before are cut."""
    for span, top, height in bars:
        begin = max(span.begin, origin)
        if span.end > begin:
            axes.broken_barh(
                [(1e3 * (begin - origin), 1e3 * (span.end - begin))],
                (top, height),
                facecolor=COLOURS[span.track],
                edgecolor="white",
                linewidth=0.15,
            )


def legend(axes: Any, labels: Mapping[str, str], columns: int, bottom: float = 1.0) -> None:
    """Explain colours by names of tracks: above the axes, or from ``bottom`` of their height on."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=COLOURS[track], label=label) for label, track in labels.items()],
        loc="lower right",
        bbox_to_anchor=(1.0, bottom),
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        handlelength=1.0,
        columnspacing=1.0,
    )


def new_figure(width: float, height: float) -> Any:
    """Return an empty picture, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return plt.figure(figsize=(width, height), layout="constrained")
