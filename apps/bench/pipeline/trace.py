"""What each rank does when, for a picture and for Perfetto (https://ui.perfetto.dev).

Moments are those of CLOCK_MONOTONIC, which all ranks of one machine share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took time.

    ``track``: "forward" or "backward" of a layer, "host" for what the rank's processor does for the
    exchange, or "exchange", from the moment when it began to when this rank saw that it had ended.
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
            for row, span in _rows(spans):
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


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """Yield each span and its row; spans of one row do not overlap, exchanges need several."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if span.track != "exchange":
            yield ("compute" if span.track in ("forward", "backward") else span.track), span
            continue
        row = next((row for row, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        yield f"exchange {row + 1}", span


def _place(span: Span) -> int:
    return {"forward": 1, "backward": 1, "host": 2, "exchange": 3}[span.track] * 100


def _metadata(process: int, thread: int, of: str, name: str, index: int) -> list[dict[str, Any]]:
    at = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**at, "name": f"{of}_name", "args": {"name": name}},
        {**at, "name": f"{of}_sort_index", "args": {"sort_index": index}},
    ]
