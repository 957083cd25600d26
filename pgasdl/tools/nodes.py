"""The machine by NUMA node: its processors, and the RDMA ports and GPUs near them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pgasdl import numa
from pgasdl.tools.gpus import Gpu
from pgasdl.tools.rdma import RdmaAddress
from pgasdl.tools.text import aligned


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, with its RDMA ports and GPUs."""

    number: int  # -1: devices whose node the kernel does not say
    processors: str  # as the kernel writes them: ``0-3,8``
    own: bool  # this process may run there
    distance: int  # from this process, by the kernel's measure; 0: unknown
    # RDMA ports such as ``mlx5_0:1``, and the ranks that use them, of those that run where this
    # process does; "": none.
    ports: dict[str, str]
    gpus: list[str]  # such as ``cuda:0``


def survey(addresses: Sequence[RdmaAddress], gpus: Sequence[Gpu]) -> list[Node]:
    """Return the nodes, with the devices at each."""
    distances = dict(enumerate(numa.distances()))
    known = numa.processors()
    ports = {f"{each.device}:{each.port}": each for each in addresses if each.port}
    users = {name: _users(ports[name], addresses) for name in sorted(ports)}
    return [
        Node(
            number,
            known.get(number, ""),
            number in numa.own_nodes(),
            distances.get(number, 0),
            {name: users[name] for name in users if _node(ports[name].numa_node, known) == number},
            [f"cuda:{gpu.ordinal}" for gpu in gpus if _node(gpu.numa_node, known) == number],
        )
        for number in (*sorted(known), -1)
    ]


def report(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the lines of a drawing."""
    for node in nodes:
        if node.number < 0 and not node.ports and not node.gpus:
            continue
        words = f"NUMA node {node.number}: CPUs {node.processors}"
        if node.number < 0:
            words = "at no known NUMA node"
        elif node.own:
            words += ", of this process"
        else:
            words += f", distance {node.distance}"
        yield words
        names = (*node.ports, *node.gpus)
        yield from (f"  {row}" for row in aligned([(n, node.ports.get(n, "")) for n in names]))


def _node(number: int, known: dict[int, str]) -> int:
    return number if number in known else -1


def _users(port: RdmaAddress, addresses: Sequence[RdmaAddress]) -> str:
    """Return which ranks of those that run here use a port, in words."""
    best = {(each.device, each.port): each for each in addresses if each.chosen or each.turn >= 0}
    found = best.get((port.device, port.port))
    n_turns = sum(each.turn >= 0 for each in best.values())
    if sum(each.chosen for each in best.values()) > 1:  # rails
        return "the first rank" if found and found.chosen else ""
    if found is None:
        return ""
    return f"ranks {found.turn}, {found.turn + n_turns} ..." if n_turns > 1 else "every rank"
