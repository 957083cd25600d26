"""The routes: which transport carries bytes to which rank, and why; the same on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from pgasdl import _native, numa
from pgasdl.config import Config
from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.topology import Launch, Routes, Topology
from pgasdl.transports import AUTO, TRANSPORTS


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's words about itself to all others at init.

    Attributes
    ----------
    host : str
        Equal for ranks that can map each other's memory.
    asked : str
        Its ``transport`` setting.
    oversubscribed : bool
        There are more ranks on its machine than cores it may use.
    no_verbs : str
        Why it has no transport verbs; "" if it has.
    policy : str
        Its policy, as text.
    plans : str
        Names of the plans that it registered from outside the package.
    mpi : bool
        It came through an MPI communicator.
    created : bool
        It wants windows over its own memory.
    supernode : int
        Ranks under one switch, as it was told.
    nodes : str
        Numbers of the NUMA nodes that it may run on.
    """

    host: str
    asked: str
    oversubscribed: bool
    no_verbs: str
    policy: str = ""
    plans: str = ""
    mpi: bool = False
    created: bool = False
    supernode: int = 1
    nodes: str = ""

    @classmethod
    def here(
        cls, launch: Launch, config: Config, asked: str, policy: str, plans: str, mpi: bool
    ) -> Self:
        """Describe this rank."""
        oversubscribed = launch.local_size > len(os.sched_getaffinity(0))
        if asked == "verbs" or not launch.one_machine:
            missing = _native.verbs_missing(_native.VerbsOptions(**config.verbs_options()))
        else:
            missing = "not looked for: all ranks are on one machine"  # opening devices takes time
        created = config.mpi_windows == "created"
        return cls(
            _native.host_identity(),
            asked,
            oversubscribed,
            missing,
            policy,
            plans,
            mpi,
            created,
            config.supernode,
            ",".join(map(str, numa.own_nodes())),
        )

    def encoded(self) -> bytes:
        """Return the text that the store carries."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, words: bytes) -> Self:
        """Return what :meth:`encoded` made.

        Raises
        ------
        MismatchError
            The text is of another version, or no such text.
        """
        try:
            info = cls(**json.loads(words))
        except (ValueError, TypeError, RecursionError):
            info = None
        kinds = {"str": str, "bool": bool, "int": int}
        if info is None or not all(
            isinstance(getattr(info, field.name), kinds[str(field.type)]) for field in fields(cls)
        ):
            raise MismatchError(
                f"a rank says of itself {words[:200]!r}, which is not known here: all ranks need "
                "the same version of pgasdl"
            )
        return info


def require_one_selection(rank: int, ranks: Sequence[RankInfo]) -> None:
    """Raise MismatchError if ranks would choose between plans by different policies or tables."""
    mine = ranks[rank]
    for other, info in enumerate(ranks):
        if info.policy != mine.policy:
            raise MismatchError(
                f'rank {rank} has the policy "{mine.policy:.500}", '
                f'rank {other} "{info.policy:.500}": '
                "give all ranks the same PGASDL_POLICY, and the same file"
            )
        if info.plans != mine.plans:
            raise MismatchError(
                f'rank {rank} has registered the plans "{mine.plans:.500}", '
                f'rank {other} "{info.plans:.500}": '
                "give all ranks the same PGASDL_PLAN_MODULES, and register the same before init"
            )
        if info.supernode != mine.supernode:
            raise MismatchError(
                f"rank {rank} has supernodes of {mine.supernode} ranks, rank {other} of "
                f"{info.supernode}: give all ranks the same PGASDL_SUPERNODE"
            )


def decide(rank: int, ranks: Sequence[RankInfo]) -> Routes:
    """Decide how one rank reaches every other.

    Raises
    ------
    MismatchError
        Ranks ask for different transports.
    UnavailableError
        A transport that was asked for, or is needed between machines, is not available; says why.
    """
    asked = ranks[rank].asked
    for other, info in enumerate(ranks):
        if info.asked != asked:
            raise MismatchError(
                f'rank {rank} asks for transport "{asked}", rank {other} for "{info.asked}": '
                "give all ranks the same"
            )
    size = len(ranks)
    away = [other for other in range(size) if ranks[other].host != ranks[rank].host]
    one_host = len({info.host for info in ranks}) == 1
    if asked == "verbs" or (asked == AUTO and not one_host):
        for other, info in enumerate(ranks):
            if info.no_verbs and asked == AUTO and all(each.mpi for each in ranks):
                reason = f"rank {other} has no verbs: {info.no_verbs}"
                return Routes(("mpi",) * size, f"several machines, joined through MPI; {reason}")
            if info.no_verbs:
                why = "asked for" if asked == "verbs" else "the ranks run on several machines"
                raise UnavailableError(
                    f"transport verbs ({why}) is not available on rank {other}: {info.no_verbs}; "
                    "`pgasdl doctor` tells more"
                )
    if asked != AUTO:
        row = TRANSPORTS[asked]
        if away and not row.between_hosts:
            raise UnavailableError(
                f"rank {rank} cannot map the memory of ranks {away}, which run on other machines "
                f'or in other containers: transport "{asked}" serves one machine, use "verbs" or '
                f'"{AUTO}"'
            )
        return Routes((asked,) * size, "asked for" if row.processes else row.summary)
    names = tuple("verbs" if other in away else "shm" for other in range(size))
    if size == 1:
        return Routes(names, "the only one")
    return Routes(
        names, "all on this machine; no RDMA needed" if one_host else "shm inside a machine"
    )


def topology_of(
    launch: Launch, ranks: Sequence[RankInfo], *, mapped: bool, near: frozenset[int]
) -> Topology:
    """Derive the topology from what all ranks told. Raises what :func:`decide` raises.

    Parameters
    ----------
    launch : Launch
        The place of this rank in the job.
    ranks : Sequence[RankInfo]
        The words of all ranks, by rank.
    mapped : bool
        False: threads do not map each other's memory.
    near : frozenset[int]
        Ranks whose windows MPI can share with this one's.
    """
    routes = decide(launch.rank, ranks)
    own = routes.names[launch.rank]
    created = any(info.created for info in ranks)
    mine = ranks[launch.rank]
    alike = [(info.host, info.nodes) == (mine.host, mine.nodes) for info in ranks]
    return Topology(
        launch,
        tuple(info.host for info in ranks),
        routes,
        mapped_on_host=TRANSPORTS[own].maps and mapped,
        shared_windows=(frozenset() if created else near) if own == "mpi" else None,
        oversubscribed=any(info.oversubscribed for info in ranks),
        supernode=mine.supernode,
        turn=sum(alike[: launch.rank]),
    )
