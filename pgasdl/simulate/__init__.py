"""Plans event by event on modelled machines, to thousands of ranks and without any network."""

from __future__ import annotations

from pgasdl.simulate.machine import MACHINES, Level, Machine, fat_tree, flat, numa_nodes, supernodes
from pgasdl.simulate.program import Exchange
from pgasdl.simulate.run import Compute, Join, Outcome, Start, simulate

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
