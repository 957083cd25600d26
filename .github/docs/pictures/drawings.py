"""Draw the pictures of the pages, as SVG: ``python .github/docs/pictures/drawings.py``.

They are 400 units wide with text of 13, so that a phone shows it at 12 pixels or more. Colours
follow the reader's light or dark theme; a background of their own keeps them readable in any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
WIDTH = 400

# Name: in a light theme, in a dark one.
COLOURS = {
    "paper": ("#ffffff", "#161b22"),
    "ink": ("#1b1f24", "#e6edf3"),
    "dim": ("#57606a", "#9da7b3"),
    "line": ("#8c959f", "#6e7681"),
    "one": ("#dbe9fb", "#1d3a5f"),
    "two": ("#fdebd3", "#553a1a"),
    "backward": ("#2f5d9b", "#5b8fd6"),
    "forward": ("#9bb7dc", "#b3cbea"),
    "exchange": ("#e0862a", "#f0a04b"),
    "waiting": ("#cc2936", "#ff6b74"),
}


def _style() -> str:
    light, dark = (
        "".join(f"--{name}:{both[theme]};" for name, both in COLOURS.items()) for theme in (0, 1)
    )
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in COLOURS)
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{fills}text{{font:13px system-ui,sans-serif;paint-order:stroke;stroke:var(--paper);"
        "stroke-width:3px}.bare{stroke:none}.bold{font-weight:600}.middle{text-anchor:middle}"
        ".end{text-anchor:end}path{stroke:var(--line);fill:none}"
        "path.dotted{stroke-dasharray:2 3}marker path{fill:var(--line)}"
    )


class Picture:
    """Boxes, lines and words, from the top down."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []
        self.bottom = 0.0

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> Self:
        """Add a filled rectangle."""
        self.bottom = max(self.bottom, y + height)
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} rx="3" class="{kind}"/>')
        return self

    def words(self, x: float, y: float, text: str, kind: str = "ink") -> Self:
        """Add a line of text whose foot is at ``y``."""
        self.bottom = max(self.bottom, y + 4)
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')
        return self

    def line(self, x: float, y: float, to_x: float, to_y: float, *, kind: str = "arrow") -> Self:
        """Add a line: an "arrow", or one that is "plain" or "dotted"."""
        self.bottom = max(self.bottom, y, to_y)
        head = ' marker-end="url(#head)"' if kind == "arrow" else ""
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}"{head}/>')
        return self

    def svg(self) -> str:
        """Return the document."""
        height = self.bottom + 10
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'role="img"><title>{escape(self.title)}</title><style>{_style()}</style>'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
            f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="paper"/>'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])


# --- the layers

# From the top down: rooms, and what they are for. tests/unit/test_layers.py compares the order.
PYTHON = (
    ("tools simulate loopback", "commands; modelled machines; ranks as threads"),
    ("jobs torch.backend", "the job server; torch.distributed"),
    ("runtime", "launchers, meeting, the way to each peer"),
    ("torch matrix", "attach, windows; matrices in blocks"),
    ("training input checkpoint", "gradients, data sets, states"),
    ("context collectives", "the one-sided calls; plans bound to memory"),
    ("segment group pool", "memory that peers reach; ranks"),
    ("plans", "steps, algorithms, checker, cost"),
    ("topology config settings", "place; variables"),
    ("device transports errors", "GPUs; the table of transports"),
)
NATIVE = (
    ("python", "bindings, no logic"),
    ("executor", "runs plans; the schedule of layers"),
    ("pgas", "segments, queues, notifications, liveness"),
    ("transport", "one interface; a router over"),
    ("reduce", "additions, for each instruction set"),
    ("memory", "mappings, memory of GPUs"),
    ("sys", "clock, wake words, processes, errors"),
)
TRANSPORTS = ("shm", "verbs", "mpi", "tcp", "loopback")


def layers() -> Picture:
    """Draw the rooms of pgasdl/ and native/."""
    picture = Picture("The rooms of pgasdl/ and native/: each imports only what is below it")
    y = 24.0
    for folder, kind, bands in (("pgasdl/", "one", PYTHON), ("native/", "two", NATIVE)):
        picture.words(36, y, folder, "ink bold")
        y += 8
        top = y
        for names, purpose in bands:
            rooms = " · ".join(names.split())
            picture.box(36, y, 356, 38, kind)
            picture.words(44, y + 16, rooms, "ink bold bare").words(44, y + 32, purpose, "ink bare")
            y += 42
            if names == "transport":
                for place, name in enumerate(TRANSPORTS):
                    picture.box(44 + 70 * place, y, 66, 24, kind)
                    picture.words(77 + 70 * place, y + 16, name, "ink bare middle")
                y += 28
        picture.line(20, top, 20, y - 6)
        y += 22
    picture.words(36, y - 8, "measure, simulate and formats stand beside native/'s.", "dim")
    return picture.words(36, y + 8, "An arrow points to what is imported or included.", "dim")


# --- a write_notify

LIFELINES = {"program": 46.0, "carrier": 152.0, "memory": 250.0, "peer": 350.0}
WAYS = (
    (
        "shm: both ranks on one machine",
        "",
        (
            ("program", "memory", "1  my processor copies the bytes"),
            ("program", "memory", "2  then it stores flag 7; the call returns"),
            ("memory", "peer", "3  a wait sees 7, so it sees the bytes"),
        ),
    ),
    (
        "verbs: RDMA between machines",
        "adapters",
        (
            ("program", "carrier", "1  posts one message; the call returns"),
            ("carrier", "memory", "2  the adapters copy the bytes"),
            ("carrier", "peer", "3  a number comes behind the bytes"),
            ("peer", "memory", "4  whoever polls here raises flag 7"),
            ("carrier", "program", "5  a completion: ctx.wait returns"),
        ),
    ),
    (
        "tcp: only Ethernet between machines",
        "kernels",
        (
            ("program", "carrier", "1  sends a frame and the bytes"),
            ("carrier", "peer", "2  a wait or a thread here receives,"),
            ("peer", "memory", "3  copies into the segment,"),
            ("peer", "memory", "4  and then raises flag 7"),
            ("peer", "program", "5  acknowledges: ctx.wait returns"),
        ),
    ),
)


def write_notify() -> Picture:
    """Draw who copies, and when the flag rises."""
    picture = Picture("ctx.write_notify over shm, verbs, tcp: who copies, when the flag rises")
    picture.words(10, 24, "ctx.write_notify(mine, 1, theirs, 7)", "ink bold")
    picture.words(10, 42, "Rank 1's program calls nothing until it waits for flag 7.", "dim")
    y = 72.0
    for title, carrier, steps in WAYS:
        picture.words(10, y, title, "ink bold")
        heads = {"program": "rank 0", "carrier": carrier, "memory": "segment", "peer": "rank 1"}
        foot = y + 42 + 34 * len(steps)
        for name, head in heads.items():
            if head:
                at = LIFELINES[name]
                picture.line(at, y + 34, at, foot, kind="dotted")
                picture.box(at - 38, y + 10, 76, 24, "two" if name == "carrier" else "one")
                picture.words(at, y + 26, head, "ink bare middle")
        for number, (start, end, text) in enumerate(steps):
            at, to = LIFELINES[start], LIFELINES[end]
            level = y + 68 + 34 * number
            picture.line(at, level, to, level)
            right = "ink end" if max(at, to) > 300 else "ink"
            picture.words(392 if "end" in right else min(at, to) + 6, level - 6, text, right)
        y = foot + 34
    return picture


# --- an exchange beside backward

LEFT, RIGHT = 62, 388
Spans = Mapping[str, list[list[float]]]  # of each kind, by layer: when it began and ended


def overlap(measured: Mapping[str, Any]) -> Picture:
    """Draw one iteration of every rank that ``overlap_run.py`` has measured."""
    picture = Picture("One iteration: each layer's exchange lies beside others' backward")
    picture.words(10, 24, f"One iteration, {measured['layers']}", "ink bold")
    picture.words(10, 42, measured["where"], "dim")
    names = {"backward": "backward", "exchange": "exchange", "forward": "next forward"}
    x = 10.0
    for kind, name in {**names, "waiting": "waiting"}.items():
        picture.box(x, 54, 12, 12, kind).words(x + 17, 65, name)
        x += 30 + 7.8 * len(name)
    end = max(to for rank in measured["ranks"] for each in rank.values() for _, to in each)
    scale = (RIGHT - LEFT) / end  # units in a millisecond
    y = 92.0
    for number, rank in enumerate(measured["ranks"]):
        share = hidden(rank)
        picture.words(10, y, f"rank {number}: {share:.0%} of the exchange is hidden", "ink bold")
        y = _rows(picture, rank, y + 10, scale)
    for milliseconds in range(0, int(end) + 1, _step(end)):
        at = LEFT + scale * milliseconds
        picture.line(at, 98, at, y - 18, kind="dotted")
        picture.words(at, y, f"{milliseconds}", "dim middle")
    return picture.words(RIGHT, y + 16, "milliseconds since backward began", "dim end")


def _rows(picture: Picture, rank: Spans, y: float, scale: float) -> float:
    """Draw a row for each layer, the last one first, as backward goes; return where it ends."""
    for layer in reversed(range(len(rank["backward"]))):
        picture.words(10, y + 14, f"layer {layer}")
        for kind, top in (("backward", 0), ("forward", 0), ("waiting", 0), ("exchange", 9)):
            begin, end = rank[kind][layer]
            width = max(scale * (end - begin), 0.5)
            if end > begin:
                picture.box(LEFT + scale * begin, y + 2 + top, width, 8, kind)
        y += 23
    return y + 22


def _step(end: float) -> int:
    """Return how many milliseconds lie between two marks."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if end / step <= 8)


def hidden(rank: Spans) -> float:
    """Return the share of the time with an exchange under way in which the rank did not wait."""
    under_way = _joined(rank["exchange"])
    waits = sum(
        max(0.0, min(end, to) - max(begin, since))
        for begin, end in under_way
        for since, to in rank["waiting"]
    )
    return 1 - waits / sum(end - begin for begin, end in under_way)


def _joined(spans: Iterable[list[float]]) -> list[list[float]]:
    """Return spans that cover the same moments, and do not overlap."""
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def all_pictures() -> dict[str, str]:
    """Return each file's name and text."""
    measured = json.loads((HERE / "overlap.json").read_text())
    drawn = {"layers": layers(), "write_notify": write_notify(), "overlap": overlap(measured)}
    return {f"{name}.svg": picture.svg() for name, picture in drawn.items()}


if __name__ == "__main__":
    for name, text in all_pictures().items():
        (HERE / name).write_text(text)
