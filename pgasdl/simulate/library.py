"""The cost of the library itself for a rank, beside plans: memory, start-up, connections.

The code that lays out memory says how much it is; tests compare start-up with light clients of a
real store, and connections with real contexts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pgasdl import _native
from pgasdl.config import Config
from pgasdl.runtime.bootstrap.channel import (
    CHALLENGE,
    FRAME_BYTES,
    HELLO,
    MAC_BYTES,
    MAX_BODY,
    TOKEN_BYTES,
    WELCOME,
    pack_key,
)
from pgasdl.runtime.bootstrap.table import GATHER_OPTIONS, NUMBER
from pgasdl.runtime.routes import RankInfo
from pgasdl.topology import Launch
from pgasdl.transports import AUTO, WAYS

_MB = {
    "states": "MB: what it knows of ranks",
    "gossip": "MB: what ranks of other machines told of losses",
    "slots": "MB: places of small all-gathers",
    "mail": "MB: mailboxes of passive messages",
    "flags": "MB: flags of all these",
    "sent_bytes": "MB to the store at start-up",
    "received_bytes": "MB from the store at start-up",
}
_NUMBERS = {
    "sent": "messages to the store at start-up",
    "received": "messages from the store at start-up",
    "start-up": "connections for heartbeats",
    "barrier": "connections after a barrier",
    "segment": "connections after a collective segment, handle or small allreduce",
}
_WIDTH = 68
_LAUNCH = Launch("pgasdl", 0, 2, 0, 1, "sim")  # one of two machines


@dataclass(frozen=True, slots=True)
class Value:
    """A value that every rank puts into the store once, and gathers of all."""

    key: str  # its name, without the rank
    nbytes: int  # length on each rank
    same: bool = False  # all ranks say the same


@dataclass(frozen=True, slots=True)
class StartupTraffic:
    """Messages of one rank and the store, and their bytes; a frame is a message."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int


def memory(n_ranks: int, config: Config) -> dict[str, int]:
    """Return the bytes of a rank's memory for the library after ``init``, by purpose."""
    return _native.group_memory(n_ranks, True, config.limits(n_ranks).passive_bytes)


def startup(rank: int, n_ranks: int, values: Iterable[Value]) -> StartupTraffic:
    """Return the messages of a rank and the store during ``init``."""
    sent, received = 2, 2
    sent_bytes = HELLO.size + MAC_BYTES
    received_bytes = CHALLENGE.size + FRAME_BYTES + WELCOME.size
    for value in values:
        first = NUMBER.size + value.nbytes
        more = NUMBER.size if value.same else first
        n_answers = -(-n_ranks // (1 + (MAX_BODY - first) // more))
        sent += 1 + n_answers
        received += 1 + n_answers
        put = len(pack_key(f"{value.key}/{rank}")) + value.nbytes
        ask = GATHER_OPTIONS.size + len(pack_key(value.key)) + (n_ranks + 7) // 8
        sent_bytes += FRAME_BYTES + put + n_answers * (FRAME_BYTES + ask)
        received_bytes += FRAME_BYTES + n_answers * (FRAME_BYTES + first)
        received_bytes += (n_ranks - n_answers) * more
    return StartupTraffic(sent, sent_bytes, received, received_bytes)


def transport_here(config: Config) -> str:
    """Return the best transport between machines that this one has; TCP at the least."""
    here = RankInfo.here(_LAUNCH, config, AUTO)
    return next(row.name for row in WAYS if row.between_hosts and row.name not in here.missing)


def values_said(transport: str, config: Config) -> list[Value]:
    """Return the values that a rank of several machines sends at start-up, if it ran here."""
    own = RankInfo.here(_LAUNCH, config, AUTO, config.policy or "")
    core = _native.ContextCore(
        0, 2, [transport] * 2, bytes(TOKEN_BYTES), None, verbs=_verbs(config), mpi=None,
        survivable=True,
        **config.core_options(2, oversubscribed=False),
    )  # fmt: skip
    return [
        Value("rank", len(own.encoded())),
        Value("endpoint", len(core._endpoint())),
        Value("world", len(core._open())),
    ]


def connections(n_ranks: int) -> dict[str, int]:
    """Return how many ranks the library itself connects a rank to, if each has a machine."""
    beats = set(_native.heartbeat_distances(n_ranks))
    barrier = beats | _partners(n_ranks, barrier=True)
    segment = barrier | _partners(n_ranks, barrier=False)
    return {"start-up": len(beats), "barrier": len(barrier), "segment": len(segment)}


def _partners(n_ranks: int, *, barrier: bool) -> set[int]:
    """Return how far ahead a rank's partners are in a collective of all: both directions."""
    distances = _native.group_distances(n_ranks, barrier)
    return {sign * distance % n_ranks for distance in distances for sign in (1, -1)}


def costs(sizes: Iterable[int], config: Config) -> dict[str, Any]:
    """Return the library's costs for the last rank, by the number of ranks."""
    transport = transport_here(config)
    values = values_said(transport, config)
    ranks = {
        str(n): {
            "memory_bytes": memory(n, config),
            "startup": asdict(startup(n - 1, n, values)),
            "connections": connections(n),
        }
        for n in sizes
    }
    return {"transport": transport, "ranks": ranks}


def table(costs: dict[str, Any]) -> str:
    """Return the lines that show ``costs``."""
    ranks = costs["ranks"]
    flat = [each["memory_bytes"] | each["startup"] | each["connections"] for each in ranks.values()]
    title = f"the library itself, a rank ({costs['transport']} at start-up)"
    lines = [title.ljust(_WIDTH) + _row(f"of {n}" for n in ranks)]
    for name, words in _MB.items():
        lines.append(words.ljust(_WIDTH) + _row(f"{each[name] / 1e6:,.3f}" for each in flat))
    for name, words in _NUMBERS.items():
        lines.append(words.ljust(_WIDTH) + _row(f"{each[name]:,d}" for each in flat))
    return "\n".join(lines)


def _row(words: Iterable[str]) -> str:
    return "".join(f"{word:>12}" for word in words)


def _verbs(config: Config) -> _native.VerbsOptions:
    return _native.VerbsOptions(**config.verbs_options())
