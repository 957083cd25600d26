"""Run plans event by event on modelled machines, as ``pgasdl sim`` does.

>>> from pgasdl import simulate
>>> machine = simulate.flat(64, latency=1e-6, bandwidth=10e9)
>>> times = {}
>>> for plan in ("ring", "halving-doubling"):
...     exchange = simulate.Exchange(plan, count=1000)
...     times[plan] = simulate.simulate(machine, [exchange]).seconds
>>> times["halving-doubling"] < times["ring"]
True
"""

from pgasdl.simulate.machine import (
    MACHINES,
    Level,
    Machine,
    fat_tree,
    flat,
    numa_nodes,
    supernodes,
)
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
