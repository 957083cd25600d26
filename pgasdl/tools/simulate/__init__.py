"""The simulator: plans event by event on modelled machines, up to thousands of ranks."""

from __future__ import annotations

from pgasdl.tools.simulate.machine import (
    MACHINES,
    Level,
    Machine,
    fat_tree,
    flat,
    numa_nodes,
    supernodes,
)
from pgasdl.tools.simulate.program import Exchange
from pgasdl.tools.simulate.run import Compute, Join, Outcome, Start, simulate

__all__ = [
    "MACHINES",
    "Compute",
    "Exchange",
    "Join",
    "Level",
    "Machine",
    "Outcome",
    "Start",
    "fat_tree",
    "flat",
    "numa_nodes",
    "simulate",
    "supernodes",
]
