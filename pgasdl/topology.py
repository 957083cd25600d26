"""The topology of a job, made once at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pgasdl.errors import ConfigError
from pgasdl.transports import TRANSPORTS, Transport


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process in its job."""

    kind: str  # one of pgasdl, torchrun, openmpi, mpich, slurm, single, mpi, store, loopback
    # This rank's number, and the number of ranks.
    rank: int
    size: int
    # The same among the ranks of this machine.
    local_rank: int
    local_size: int
    job_id: str  # the same on every rank of the job
    master: str | None = None  # host where rank 0 runs, if torchrun or Slurm says so
    # Variables that differ between this rank's processes and its launcher's; empty where ``job_id``
    # is unique on this machine.
    signature: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        place = f"{self.kind}: rank {self.rank} of {self.size}"
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"{place}: the rank must be from 0 to {self.size - 1}")
        local = f"local rank {self.local_rank} of {self.local_size}"
        if not 0 <= self.local_rank < self.local_size:
            raise ConfigError(f"{place}, {local}: must be from 0 to {self.local_size - 1}")
        if self.local_size > self.size or self.local_rank > self.rank:
            raise ConfigError(f"{place} contradicts {local}")

    @property
    def one_machine(self) -> bool:
        """Every rank of the job runs on this machine."""
        return self.local_size == self.size


@dataclass(frozen=True, slots=True)
class Routes:
    """The transport to every rank, this one included."""

    names: tuple[str, ...]
    reason: str

    @property
    def rows(self) -> set[Transport]:
        """The transports that are used."""
        return {TRANSPORTS[name] for name in self.names}

    def __str__(self) -> str:
        kinds = sorted(set(self.names))
        if len(kinds) == 1:
            return f"{kinds[0]} to all ranks ({self.reason})"
        to = ", ".join(
            f"{kind} to ranks {[rank for rank, name in enumerate(self.names) if name == kind]}"
            for kind in kinds
        )
        return f"{to} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the ranks of a job run, and how they reach each other."""

    launch: Launch  # the place of this rank in the job
    hosts: tuple[str, ...]  # host of every rank; equal for ranks that can map each other's memory
    routes: Routes  # the transport to every rank
    # Ranks of one machine load from and store to each other's segments, in every group; the same on
    # all ranks.
    mapped_on_host: bool
    # Ranks whose windows MPI shares with this rank's; None: windows are not used.
    shared_windows: frozenset[int] | None
    # Some machine has more ranks than cores that they may use; the same on all ranks.
    oversubscribed: bool
    # Ranks under one switch, neighbours in the order of ranks; the same on all ranks.
    supernode: int = 1
    # Number of this rank among those of its machine that run on the same NUMA nodes: they share the
    # RDMA ports there by turns.
    turn: int = 0

    def maps(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks``, including this one, map their segments; the same on all."""
        if self.shared_windows is not None:  # for all members of a group, or for none
            return self.shared_windows.issuperset(ranks)
        one_host = len({self.hosts[rank] for rank in ranks}) == 1
        return one_host and self.mapped_on_host

    def registers(self, ranks: Sequence[int]) -> bool:
        """Whether some of ``ranks`` are sent to only from memory of segments."""
        return any(TRANSPORTS[self.routes.names[rank]].registers for rank in ranks)

    def machines(self, ranks: Sequence[int]) -> list[object]:
        """Return the machine of each of ``ranks``."""
        return [self.hosts[rank] for rank in ranks]

    def order(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the places of ``ranks`` by machine, as :func:`by_machine` orders them."""
        return by_machine(self.machines(ranks))

    def node_size(self, ranks: Sequence[int]) -> int | tuple[int, ...]:
        """Return the ranks of a node: neighbours in :meth:`order` that share a machine."""
        machines = self.machines(ranks)
        return node_size([machines[place] for place in self.order(ranks) or range(len(machines))])

    def supernode_size(self, ranks: Sequence[int]) -> int | tuple[int, ...]:
        """Return the ranks of a supernode: neighbours among ``ranks`` under one switch."""
        return node_size([rank // self.supernode for rank in ranks])


def node_size(hosts: Sequence[object]) -> int | tuple[int, ...]:
    """Count the neighbours that share a host: on each one, unless the last alone has fewer.

    >>> node_size("AABBC"), node_size("AAABBB"), node_size("ABAB"), node_size("AAABBC")
    (2, 3, 1, (3, 2, 1))
    """
    sizes = tuple(sum(1 for _ in group) for _, group in groupby(hosts))
    first = sizes[0]
    regular = all(size == first for size in sizes[:-1]) and sizes[-1] <= first
    return first if regular else sizes


def by_machine(machines: Sequence[object]) -> tuple[int, ...]:
    """Order places so that those of a machine are neighbours; (): they are already.

    >>> by_machine("ABAB"), by_machine("ABCAB"), by_machine("AABB")
    ((0, 2, 1, 3), (0, 3, 1, 4, 2), ())
    """
    first = {machine: place for place, machine in reversed(list(enumerate(machines)))}
    order = tuple(sorted(range(len(machines)), key=lambda place: first[machines[place]]))
    return () if order == tuple(range(len(machines))) else order
