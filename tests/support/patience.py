"""Waits that only a hang exceeds; and times beside their goals: reported, never asserted."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

# Seconds; of a test that has more time than that.
PATIENCE = 100.0

_taken: list[tuple[str, float, float]] = []  # what, how long, goal


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for a condition; False if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def took(what: str, seconds: float, goal: float) -> None:
    """Keep the time that something took, for the summary of the run."""
    _taken.append((what, seconds, goal))


def taken() -> list[tuple[str, float, float]]:
    """All times that were kept in this process."""
    return _taken


def keep(more: Iterable[tuple[str, float, float]]) -> None:
    """Keep the times of another process of the same run, too."""
    _taken.extend(more)


def summary() -> list[str]:
    """Return a line for each goal."""
    times: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    for what, seconds, goal in _taken:
        times[what, goal].append(seconds)
    return [
        f"{what}: goal {goal:g} s, {len(all_of)} times, median {statistics.median(all_of):.2g} s, "
        f"longest {max(all_of):.2g} s, {sum(seconds > goal for seconds in all_of)} over the goal"
        for (what, goal), all_of in sorted(times.items())
    ]
