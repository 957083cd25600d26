"""Plans event by event on modelled machines: :mod:`pgasdl.tools.simulate`, for users' programs."""

from pgasdl.tools.simulate import (
    MACHINES,
    Compute,
    Exchange,
    Join,
    Level,
    Machine,
    Outcome,
    Start,
    fat_tree,
    flat,
    numa_nodes,
    simulate,
    supernodes,
)

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
