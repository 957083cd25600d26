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
from pgasdl.transports import AUTO, TRANSPORTS, WAYS, Transport


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The description of a rank, which all others get at init.

    ``host`` : equal for ranks that can map each other's memory
    ``asked`` : its ``transport`` setting
    ``oversubscribed`` : there are more ranks on its machine than cores it may use
    ``missing`` : why it lacks transports, by their names
    ``policy``, ``plans`` : its policy, as text; the names of plans from outside the package
    ``created`` : it wants windows over its own memory
    ``supernode`` : its setting of the number of ranks under one switch
    ``nodes`` : the numbers of the NUMA nodes that it may run on
    """

    host: str
    asked: str
    oversubscribed: bool
    missing: dict[str, str]
    policy: str = ""
    plans: str = ""
    created: bool = False
    supernode: int = 1
    nodes: str = ""

    @classmethod
    def here(
        cls,
        launch: Launch,
        config: Config,
        asked: str,
        policy: str = "",
        plans: str = "",
        mpi: _native.MpiWorld | None = None,
    ) -> Self:
        """Describe this rank, which came through ``mpi``, if it did."""
        reasons = {row.name: _why_missing(row, launch, config, asked, mpi) for row in WAYS}
        return cls(
            _native.host_identity(),
            asked,
            launch.local_size > len(os.sched_getaffinity(0)),
            {name: why for name, why in reasons.items() if why},
            policy,
            plans,
            config.mpi_windows == "created",
            config.supernode,
            ",".join(map(str, numa.own_nodes())),
        )

    def encoded(self) -> bytes:
        """Return the text that the store carries."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, words: bytes) -> Self:
        """Return what :meth:`encoded` made; MismatchError: another version made it, or none did."""
        try:
            info = cls(**json.loads(words))
        except (ValueError, TypeError, RecursionError):
            info = None
        if info is None or not all(
            _is_a(str(field.type), getattr(info, field.name)) for field in fields(cls)
        ):
            raise MismatchError(
                f"a rank says of itself {words[:200]!r}, which is not known here: all ranks need "
                "the same version of pgasdl"
            )
        return info


def _is_a(kind: str, value: object) -> bool:
    texts = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    return kind == ("dict[str, str]" if texts else type(value).__name__)


def _why_missing(
    row: Transport, launch: Launch, config: Config, asked: str, mpi: _native.MpiWorld | None
) -> str:
    if row.devices and row.name != asked and launch.one_machine:
        return "not looked for: all ranks are on one machine"
    verbs = _native.VerbsOptions(**config.verbs_options())
    return _native.transport_missing(row.name, verbs=verbs, mpi=mpi)


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

    MismatchError: ranks ask for different transports. UnavailableError says why a transport that
    was asked for, or is needed between machines, is not available.
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
    if asked != AUTO:
        row = TRANSPORTS[asked]
        if lacking := _lacking(row, ranks):
            raise _unavailable(row, "asked for", *lacking)
        if away and not row.between_hosts:
            others = [f'"{each.name}"' for each in WAYS if each.between_hosts and not each.by_mpi]
            raise UnavailableError(
                f"rank {rank} cannot map the memory of ranks {away}, which run on other machines "
                f'or in other containers: transport "{asked}" serves one machine, use '
                f'{", ".join(others)} or "{AUTO}"'
            )
        return Routes((asked,) * size, "asked for" if row.processes else row.summary)
    near = next(row for row in WAYS if not _lacking(row, ranks))
    if size == 1:
        return Routes((near.name,), "the only one")
    if one_host:
        return Routes((near.name,) * size, "all on this machine; no RDMA needed")
    far, passed = _between_hosts(ranks)
    if far.by_mpi:
        return Routes((far.name,) * size, f"several machines, joined through MPI; {passed}")
    names = tuple(far.name if other in away else near.name for other in range(size))
    return Routes(names, "; ".join(filter(None, (f"{near.name} inside a machine", passed))))


def _lacking(row: Transport, ranks: Sequence[RankInfo]) -> tuple[int, str] | None:
    """Return the first rank that lacks a transport, and why; None if all have it."""
    lacks = ((rank, info.missing.get(row.name)) for rank, info in enumerate(ranks))
    return next(((rank, why) for rank, why in lacks if why), None)


def _between_hosts(ranks: Sequence[RankInfo]) -> tuple[Transport, str]:
    """Return the best transport between machines that all ranks have, and why no better one.

    Every rank has the last one, TCP.
    """
    words = []
    for row in WAYS:
        if row.between_hosts:
            if (lacking := _lacking(row, ranks)) is None:
                break
            words.append(f"rank {lacking[0]} has no {row.name}: {lacking[1]}")
    return row, "; ".join(words)


def _unavailable(row: Transport, needed: str, rank: int, why: str) -> UnavailableError:
    return UnavailableError(
        f"transport {row.name} ({needed}) is not available on rank {rank}: {why}; "
        "`pgasdl doctor` tells more"
    )


def topology_of(
    launch: Launch, ranks: Sequence[RankInfo], *, mapped: bool, near: frozenset[int]
) -> Topology:
    """Derive the topology from all ranks' descriptions. Raises what :func:`decide` raises.

    ``mapped`` False: threads do not map each other's memory. ``near``: the ranks whose windows MPI
    can share with this one's.
    """
    routes = decide(launch.rank, ranks)
    own = TRANSPORTS[routes.names[launch.rank]]
    created = any(info.created for info in ranks)
    mine = ranks[launch.rank]
    alike = [(info.host, info.nodes) == (mine.host, mine.nodes) for info in ranks]
    return Topology(
        launch,
        tuple(info.host for info in ranks),
        routes,
        mapped_on_host=own.maps and mapped,
        shared_windows=(frozenset() if created else near) if own.by_mpi else None,
        oversubscribed=any(info.oversubscribed for info in ranks),
        supernode=mine.supernode,
        turn=sum(alike[: launch.rank]),
    )
