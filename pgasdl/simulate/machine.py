"""Modelled machines: levels of groups, nearest first, and the links that lead out of groups.

Ranks in the same group of a level meet there or below. Each rank has one port out and one port in.
Traffic between groups takes a link of one group upwards, and one of the other group downwards.
Several ranks share a link: over-subscription is a link that is slower than its ranks' ports
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pgasdl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a machine: groups of ranks, and the links that lead out of them.

    Ranks in the same group of a level meet there or below.

    Attributes
    ----------
    name : str
        Name in tables.
    group, link : Sequence[int]
        Group and link of every rank; link -1: no link, only the ports.
    link_beta : float
        Seconds per byte of a link.
    through : bool
        Traffic to farther levels takes this level's link too.
    latency, startup, port_beta : float
        Costs of messages between ranks that meet here: time from sender to receiver, time that also
        occupies the sender's port, and seconds per byte of both ports.
    """

    name: str
    group: Sequence[int]
    latency: float
    port_beta: float
    startup: float = 0.0
    link: Sequence[int] = ()
    link_beta: float = 0.0
    through: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: its levels, nearest first, and the costs of a rank's own work.

    Attributes
    ----------
    name : str
        Name in tables.
    levels : tuple[Level, ...]
        The last one has all ranks in one group.
    gamma, copy, remote, update : float
        Seconds per byte: of an addition, of a copy, of a span in a peer's memory, of a Call.
    blocking : bool
        A Put holds up its lane until it has left the sender's port.
    turns : bool
        Exchanges go on only between an application's actions, and while it waits; what they add
        and copy there holds it up.
    """

    name: str
    levels: tuple[Level, ...]
    gamma: float = 0.0
    copy: float = 0.0
    remote: float = 0.0
    update: float = 0.0
    blocking: bool = False
    turns: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.levels[-1].group)

    def native(self) -> tuple[list[Any], tuple[float, float, float, float, bool, bool]]:
        """Return the machine as the native engine takes it."""
        none = [-1] * self.size
        levels = [
            (
                list(level.group),
                list(level.link) or none,
                level.link_beta,
                level.through,
                level.latency,
                level.startup,
                level.port_beta,
            )
            for level in self.levels
        ]
        costs = self.gamma, self.copy, self.remote, self.update, self.blocking, self.turns
        return levels, costs


def flat(
    size: int,
    *,
    latency: float = 1.5e-6,
    bandwidth: float = 10e9,
    startup: float = 0.0,
    **costs: Any,
) -> Machine:
    """Make one switch that is never the bottleneck; bandwidth in bytes per second."""
    level = Level("switch", [0] * size, latency, 1 / bandwidth, startup)
    return Machine(f"flat({size})", (level,), **costs)


def supernodes(
    size: int,
    *,
    per_group: int,
    oversubscription: float,
    latency: float = 1.5e-6,
    far_latency: float | None = None,
    bandwidth: float = 10e9,
    startup: float = 0.0,
    name: str = "supernodes",
    **costs: Any,
) -> Machine:
    """Make groups of ranks with full bandwidth inside, and a link per group and direction out.

    ``oversubscription`` : bandwidth of a group's ports over that of its link, at least 1
    """
    if oversubscription < 1 or per_group < 1:
        raise ConfigError(f"{name}: {per_group} ranks a group, over-subscribed {oversubscription}")
    group = [rank // per_group for rank in range(size)]
    beta = 1 / bandwidth
    inside = Level(
        "group", group, latency, beta, startup, group, beta * oversubscription / per_group
    )
    whole = Level("machine", [0] * size, far_latency or latency, beta, startup)
    title = f"{name}({size}, {per_group} a group, {oversubscription:g}:1)"
    return Machine(title, (inside, whole), **costs)


def fat_tree(
    size: int,
    *,
    per_leaf: int = 32,
    leaves_per_pod: int = 8,
    leaf_over: float = 1.0,
    pod_over: float = 2.0,
    latency: float = 1.5e-6,
    hop: float = 0.3e-6,
    bandwidth: float = 10e9,
    startup: float = 0.0,
    **costs: Any,
) -> Machine:
    """Make three tiers: leaf switches, pods of them, and a core, with over-subscribed links up.

    ``leaf_over``, ``pod_over`` : bandwidth into a tier's switch over its bandwidth upwards
    """
    beta = 1 / bandwidth
    leaf = [rank // per_leaf for rank in range(size)]
    pod = [rank // (per_leaf * leaves_per_pod) for rank in range(size)]
    up = beta * leaf_over / per_leaf
    core = up * pod_over / leaves_per_pod
    levels = (
        Level("leaf", leaf, latency, beta, startup, leaf, up),
        Level("pod", pod, latency + 2 * hop, beta, startup, pod, core),
        Level("core", [0] * size, latency + 4 * hop, beta, startup),
    )
    return Machine(f"fat-tree({size}, {leaf_over:g}:1, {pod_over:g}:1)", levels, **costs)


def numa_nodes(
    size: int,
    *,
    per_numa: int = 4,
    numa_per_node: int = 2,
    rails: int = 2,
    memory: float = 40e9,
    socket: float = 16e9,
    rail: float = 12e9,
    near: float = 0.3e-6,
    socket_latency: float = 0.6e-6,
    latency: float = 1.5e-6,
    name: str = "numa-nodes",
    **costs: Any,
) -> Machine:
    """Make nodes of several memory domains, with rails (adapters) that their ranks share.

    Bandwidths: a port inside a domain, the bus between a node's domains, an adapter. A domain's
    ranks use the rail of the same number, modulo their number.
    """
    numa = [rank // per_numa for rank in range(size)]
    node = [domain // numa_per_node for domain in numa]
    adapter = [n * rails + d % numa_per_node % rails for n, d in zip(node, numa, strict=True)]
    levels = (
        Level("domain", numa, near, 1 / memory, 0.0, numa, 1 / socket, through=False),
        Level("node", node, socket_latency, 1 / memory, 0.0, adapter, 1 / rail),
        Level("network", [0] * size, latency, 1 / rail),
    )
    return Machine(f"{name}({size}, {rails} rails)", levels, **costs)


# The machines of `pgasdl sim --machine`, with today's usual figures; papers/ has the papers'.
MACHINES: dict[str, Callable[[int], Machine]] = {
    "flat": lambda size: flat(size, startup=2e-7, gamma=5e-11),
    "fat-tree": lambda size: fat_tree(size, startup=2e-7, gamma=5e-11),
    "supernodes": lambda size: supernodes(
        size, per_group=256, oversubscription=4, startup=2e-7, gamma=5e-11
    ),
    "numa-nodes": lambda size: numa_nodes(size, gamma=5e-11),
}
