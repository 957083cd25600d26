"""The NUMA nodes of this machine, from the kernel. Needs the standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from pgasdl.kernel import read_line

NODES = Path("/sys/devices/system/node")
_FAR = 255  # the kernel's distance of a node that cannot be reached


def processors() -> dict[int, str]:
    """Return each node's processors, such as ``0-3,8``; {}: the kernel does not say."""
    numbers = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    found = {number: read_line(f"{NODES}/node{number}/cpulist") for number in numbers}
    return {number: words for number, words in found.items() if words is not None}


def own_nodes() -> list[int]:
    """Return the nodes that this process may run on."""
    allowed = os.sched_getaffinity(0)
    return [node for node, words in processors().items() if allowed & _numbers(words)]


def distances() -> list[int]:
    """Return how far each node is from this process, by number; []: the kernel does not say."""
    every, own = [*processors()], own_nodes()
    least = [_FAR] * (max(every) + 1) if own else []
    for node in own:
        words = (read_line(f"{NODES}/node{node}/distance") or "").split()
        if len(words) != len(every):
            return []
        for other, distance in zip(every, map(int, words), strict=True):
            least[other] = min(least[other], distance)
    return least


def _numbers(words: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, words.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
