"""Leftover processes: whether one is still alive, and waiting until none is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """The kernel's letter for what the process does; "X": there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rsplit(")", 1)[1].split()[0]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; False if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def gone(pids: Iterable[int], seconds: float) -> bool:
    """Wait for processes to end; False if one still runs."""
    pids = list(pids)
    return until(lambda: not any(alive(pid) for pid in pids), seconds)
