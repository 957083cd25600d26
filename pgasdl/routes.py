"""Which transport carries bytes to which rank, and why: the same answer on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from pgasdl import _native
from pgasdl.errors import MismatchError, UnavailableError

if TYPE_CHECKING:
    from pgasdl.config import Config
    from pgasdl.launch.detect import Launch

OFFERED = ("auto", "shm", "verbs", "mpi")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, as all ranks are told at init.

    Attributes
    ----------
    host : equal for ranks that can map each other's memory
    asked : its ``transport`` setting
    crowded : there are more ranks on its machine than cores it may use
    no_verbs : why it has no verbs transport; "" if it has
    policy : its policy, as text
    plans : names of its plans from outside the package
    mpi : it came through an MPI communicator
    created : it wants no memory of MPI's own
    """

    host: str
    asked: str
    crowded: bool
    no_verbs: str
    policy: str = ""
    plans: str = ""
    mpi: bool = False
    created: bool = False

    @classmethod
    def here(
        cls, launch: Launch, config: Config, asked: str, policy: str, plans: str, mpi: bool
    ) -> Self:
        """This rank's."""
        crowded = launch.local_size > len(os.sched_getaffinity(0))
        if asked == "verbs" or not launch.one_machine:
            wanted = config.verbs_device, config.verbs_port, config.verbs_gid
            missing = _native.verbs_missing(*wanted)
        else:
            missing = "not looked for: all ranks are on one machine"  # opening devices takes time
        created = config.mpi_windows == "created"
        return cls(_native.host_identity(), asked, crowded, missing, policy, plans, mpi, created)

    def encoded(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, words: bytes) -> Self:
        """What :meth:`encoded` made."""
        return cls(**json.loads(words))


@dataclass(frozen=True, slots=True)
class Routes:
    """The transport to every rank, this one included."""

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        kinds = sorted(set(self.names))
        if len(kinds) == 1:
            return f"{kinds[0]} to all ranks ({self.reason})"
        to = ", ".join(
            f"{kind} to ranks {[rank for rank, name in enumerate(self.names) if name == kind]}"
            for kind in kinds
        )
        return f"{to} ({self.reason})"


def node_size(hosts: Sequence[str]) -> int:
    """How many neighbours share a host: as many as the first ones; 1 if ranks do not lie so.

    >>> node_size("AABBC"), node_size("AAABBB"), node_size("ABAB"), node_size("AAABBC")
    (2, 3, 1, 1)
    """
    size = hosts.count(hosts[0])
    regular = all(host == hosts[rank - rank % size] for rank, host in enumerate(hosts))
    return size if regular else 1


def require_one_choice(rank: int, places: Sequence[Place]) -> None:
    """Raise MismatchError if ranks have different policies, or plans of their own to choose from:
    they would run different plans."""
    mine = places[rank]
    for other, place in enumerate(places):
        if place.policy != mine.policy:
            raise MismatchError(
                f'rank {rank} has the policy "{mine.policy:.500}", '
                f'rank {other} "{place.policy:.500}": '
                "give all ranks the same PGASDL_POLICY, and the same file"
            )
        if place.plans != mine.plans:
            raise MismatchError(
                f'rank {rank} has registered the plans "{mine.plans:.500}", '
                f'rank {other} "{place.plans:.500}": '
                "give all ranks the same PGASDL_PLAN_MODULES, and register the same before init"
            )


def choose(rank: int, places: Sequence[Place]) -> Routes:
    """Decide how this rank reaches every other.

    Raises
    ------
    MismatchError      ranks ask for different transports
    UnavailableError   what was asked for, or is needed between machines, cannot be had; says why
    """
    asked = places[rank].asked
    for other, place in enumerate(places):
        if place.asked != asked:
            raise MismatchError(
                f'rank {rank} asks for transport "{asked}", rank {other} for "{place.asked}": '
                "give all ranks the same"
            )
    size = len(places)
    away = [other for other in range(size) if places[other].host != places[rank].host]
    everywhere = len({place.host for place in places}) == 1
    if asked == "shm":
        if away:
            raise UnavailableError(
                f"rank {rank} cannot map the memory of ranks {away}, which run on other machines "
                'or in other containers: transport "shm" serves one machine, use "verbs" or "auto"'
            )
        return Routes(("shm",) * size, "asked for")
    if asked == "mpi":
        return Routes(("mpi",) * size, "asked for")
    if asked == "verbs" or not everywhere:
        for other, place in enumerate(places):
            if place.no_verbs and asked == "auto" and all(place.mpi for place in places):
                reason = f"rank {other} has no verbs: {place.no_verbs}"
                return Routes(("mpi",) * size, f"several machines, joined through MPI; {reason}")
            if place.no_verbs:
                why = "asked for" if asked == "verbs" else "the ranks run on several machines"
                raise UnavailableError(
                    f"transport verbs ({why}) is not to be had on rank {other}: {place.no_verbs}; "
                    "`pgasdl doctor` tells more"
                )
    if asked == "verbs":
        return Routes(("verbs",) * size, "asked for")
    names = tuple("verbs" if other in away else "shm" for other in range(size))
    if size == 1:
        return Routes(names, "the only one")
    reason = "all on this machine; no RDMA needed" if everywhere else "shm inside a machine"
    return Routes(names, reason)
