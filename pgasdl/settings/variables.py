"""The table of every ``PGASDL_*`` variable."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgasdl.errors import ConfigError
from pgasdl.settings.parsers import (
    HostPort,
    Integer,
    IntegerOf,
    OneOf,
    Parser,
    PartitionKey,
    PortList,
    Seconds,
    Text,
)
from pgasdl.transports import AUTO, SETTINGS

PREFIX = "PGASDL_"


@dataclass(frozen=True)
class Variable:
    """One row of the table: a variable, the field of :class:`Config` it fills, and its meaning."""

    name: str
    parser: Parser
    default: Any
    doc: str

    @property
    def field(self) -> str:
        """Its field of :class:`Config`."""
        return self.name.removeprefix(PREFIX).lower()

    def parse(self, text: str) -> object:
        """Turn its text into a value; ConfigError names it."""
        try:
            return self.parser.parse(text)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{self.name}={text[:200]!r} is refused: it must be {self.parser.accepted}"
            ) from None

    def check(self, value: object) -> object:
        """Turn an argument into a value; ConfigError names it."""
        try:
            return self.parser.check(value)
        except (ValueError, TypeError):
            raise ConfigError(
                f"argument {self.field}={value!r:.200} is refused: "
                f"it must be {self.parser.accepted}"
            ) from None


LOG_LEVELS = ("debug", "info", "warning", "error")
_LEAST_HEARTBEATS = 3  # within stopped_after; the native layer has the same limit
_RANKS = 2**20
_RANK = Integer(0, _RANKS - 1)
_SIZE = Integer(1, _RANKS)
_PATH = Text(r"[^\0]{1,4095}", "a path")

VARIABLES: tuple[Variable, ...] = (
    Variable("PGASDL_RANK", _RANK, None, "rank of this process; with PGASDL_SIZE"),
    Variable("PGASDL_SIZE", _SIZE, None, "number of ranks in the job"),
    Variable("PGASDL_LOCAL_RANK", _RANK, None, "rank among those on this machine"),
    Variable("PGASDL_LOCAL_SIZE", _SIZE, None, "number of ranks on this machine"),
    Variable(
        "PGASDL_JOB_ID",
        Text(r"[A-Za-z0-9._:@+-]{1,128}", "1 to 128 letters, digits or any of . _ : @ + -"),
        None,
        "name of the job; every rank must give the same",
    ),
    Variable("PGASDL_STORE", HostPort(), None, "where the ranks meet at start-up"),
    Variable(
        "PGASDL_SECRET_FD",
        Integer(3, 2**20),
        None,
        "inherited descriptor that holds the job's 32-byte secret (set by `pgasdl run`)",
    ),
    Variable(
        "PGASDL_SECRET_FILE",
        _PATH,
        None,
        "file with the job's secret, at least 32 random bytes, mode 0600, owned by you",
    ),
    Variable("PGASDL_TRANSPORT", OneOf(SETTINGS), AUTO, "how bytes reach the peers"),
    Variable(
        "PGASDL_VERBS_DEVICE",
        PortList(),
        None,
        "RDMA devices that transport verbs may use; a rank takes the nearest of the best, by turns "
        "with other ranks, as `pgasdl topo` shows; unset: all",
    ),
    Variable(
        "PGASDL_VERBS_GID",
        Integer(0, 255),
        None,
        "GID index; unset: the best, RoCE v2 before v1, an IP address before one of the link",
    ),
    Variable(
        "PGASDL_VERBS_PKEY",
        PartitionKey(),
        None,
        "partition, which all ranks must share; unset: the first of the port's table",
    ),
    Variable(
        "PGASDL_VERBS_MTU",
        IntegerOf((256, 512, 1024, 2048, 4096)),
        None,
        "bytes of a packet at most, and of two ranks' the smaller; unset: the port's MTU",
    ),
    Variable(
        "PGASDL_VERBS_SL",
        Integer(0, 15),
        0,
        "service level; on Ethernet the priority in a VLAN's tag",
    ),
    Variable(
        "PGASDL_VERBS_TC",
        Integer(0, 255),
        0,
        "traffic class of RoCE v2 and of InfiniBand's global routes: four times the DSCP",
    ),
    Variable(
        "PGASDL_VERBS_GRH",
        OneOf(("auto", "always")),
        "auto",
        "global routes: on Ethernet, to other subnets and where a port needs them; or always",
    ),
    Variable(
        "PGASDL_VERBS_RETRY_COUNT",
        Integer(0, 7),
        6,
        "how often a request that is not acknowledged is sent again (soft-RoCE: 7 is without end)",
    ),
    Variable(
        "PGASDL_VERBS_RNR_RETRY_COUNT",
        Integer(0, 7),
        6,
        "how often a request is sent again to a peer that is not ready; 7: without end",
    ),
    Variable(
        "PGASDL_VERBS_ACK_TIMEOUT",
        Integer(1, 31),
        None,
        "time for an acknowledgement, 4.096 us times 2 to this power; unset: so that all attempts "
        "last PGASDL_STOPPED_AFTER, with several rails a third of it",
    ),
    Variable(
        "PGASDL_VERBS_INLINE",
        Integer(16, 4096),
        64,
        "bytes that are copied into a request instead of read from memory, at most; fewer where "
        "the device takes fewer",
    ),
    Variable(
        "PGASDL_VERBS_ORDER",
        OneOf(("auto", "kept", "completion")),
        "auto",
        "a flag follows its data at once where the fabric keeps the order of a connection's "
        "writes, or waits for their completion; auto: as the device says",
    ),
    Variable(
        "PGASDL_VERBS_RAILS",
        Integer(1, 8),
        1,
        "devices or ports that share the work, at most: the best; one that fails is dropped, and "
        "the others go on",
    ),
    Variable(
        "PGASDL_VERBS_STRIPE",
        Integer(4096, 2**30),
        2**20,
        "bytes, with several rails: longer writes and reads are cut in stripes of this length, "
        "which go round over the rails; all else goes by the first",
    ),
    Variable(
        "PGASDL_MPI_WINDOWS",
        OneOf(("allocated", "created")),
        "allocated",
        "windows of transport mpi: memory of MPI's own, or made over ours (no /dev/shm needed)",
    ),
    Variable(
        "PGASDL_GPU",
        OneOf(("auto", "staged")),
        "auto",
        "memory on a GPU: mapped by peers where their transport can, or always by way of the host",
    ),
    Variable(
        "PGASDL_GPU_PIECE",
        Integer(64, 2**30),
        1 << 20,
        "bytes of a piece that is copied from a GPU to the host, or back, while others travel",
    ),
    Variable(
        "PGASDL_TIMEOUT",
        Seconds(0.001, 1e7),
        60.0,
        "default deadline of every call, also of init",
    ),
    Variable(
        "PGASDL_QUEUE_DEPTH", Integer(1, 2**20), 1024, "requests in a queue between two waits"
    ),
    Variable("PGASDL_QUEUES", Integer(1, 4096), 16, "most queues of a context at once"),
    Variable(
        "PGASDL_PASSIVE_BYTES",
        Integer(8, 2**24),
        None,
        "longest passive message; unset: 65536, or, with more than 128 ranks, as many as let all "
        "mailboxes of a rank take 16 MiB",
    ),
    Variable(
        "PGASDL_NOTIFICATIONS",
        Integer(1, 2**28),
        65536,
        "default number of notifications of a segment",
    ),
    Variable("PGASDL_SPIN_US", Integer(0, 10**6), 20, "microseconds a wait spins before it yields"),
    Variable("PGASDL_YIELD_US", Integer(0, 10**7), 1000, "microseconds it yields before it sleeps"),
    Variable(
        "PGASDL_POLICY",
        Text(r".{0,65535}", "a policy such as allreduce:0-64k:tree#64k-inf:gdraa, or @FILE"),
        None,
        "plans by size, as `pgasdl tune` writes them; unset: chosen automatically",
    ),
    Variable(
        "PGASDL_PLAN_MODULES",
        Text(r"[^\0]{0,65535}", "modules or .py files, by commas"),
        None,
        "modules that register more plans; init imports them before it reads the policy",
    ),
    Variable(
        "PGASDL_SUPERNODE",
        _SIZE,
        1,
        "ranks under one switch, neighbours in the order of ranks, where links between switches "
        "are slower: halving-doubling keeps its large exchanges inside; the same on all ranks",
    ),
    Variable(
        "PGASDL_PROGRESS",
        OneOf(("turn", "thread")),
        "turn",
        "who advances exchanges: the training loop's calls, or a thread of their own",
    ),
    Variable(
        "PGASDL_HEARTBEAT_MS", Integer(10, 60_000), 200, "milliseconds between two heartbeats"
    ),
    Variable(
        "PGASDL_STOPPED_AFTER",
        Seconds(0.1, 86_400),
        3.0,
        "silence after which the next heartbeat of another rank finds this one stopped",
    ),
    Variable(
        "PGASDL_JOB_FOLDER",
        _PATH,
        None,
        "folder of a job that a job server runs, the same each time it is started again: for "
        "checkpoints (set by the job server)",
    ),
    Variable(
        "PGASDL_JOB_LINK",
        _PATH,
        None,
        "file that tells a job how to reach the job server that started it (set by the job server)",
    ),
    Variable(
        "PGASDL_JOB_SERVER",
        Text(r"[^\0]{1,4095}", "a URL, or the path of the server's file"),
        None,
        "job server of `pgasdl job`; unset: the one whose file is in the user's state folder",
    ),
    Variable("PGASDL_LOG", OneOf(LOG_LEVELS), "info", "lowest level that is logged"),
    Variable("PGASDL_TRACE", _PATH, None, "directory of flight records; unset: standard error"),
)

BY_NAME = {variable.name: variable for variable in VARIABLES}
BY_FIELD = {variable.field: variable for variable in VARIABLES}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like ``name``."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def format_value(value: object) -> str:
    """Return a field's value as the text of its variable."""
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def too_few_heartbeats(heartbeat_ms: int, stopped_after: float) -> str:
    """Return why a heartbeat and PGASDL_STOPPED_AFTER exclude each other; "" if they do not."""
    if stopped_after * 1e3 >= _LEAST_HEARTBEATS * heartbeat_ms:
        return ""
    return (
        f"PGASDL_HEARTBEAT_MS={heartbeat_ms} and PGASDL_STOPPED_AFTER={stopped_after:g}: a stopped "
        f"rank would never be noticed; at least {_LEAST_HEARTBEATS} heartbeats have to fit in, so "
        f"ask for one at least every {int(stopped_after * 1e3 / _LEAST_HEARTBEATS)} ms, or wait "
        f"for longer than {_LEAST_HEARTBEATS * heartbeat_ms / 1e3:g} s"
    )


def listing(
    environ: Mapping[str, str] | None = None,
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return rows ``(name, value, doc)`` of the table, and a message for each refused setting."""
    environ = os.environ if environ is None else environ
    rows: list[tuple[str, str, str]] = []
    problems: list[str] = []
    values: dict[str, Any] = {}  # without refused ones
    for variable in VARIABLES:
        text = environ.get(variable.name)
        value = format_value(variable.default) if text is None else text
        doc = f"{variable.doc} ({variable.parser.accepted}"
        doc += ")" if text is None else f"; default {format_value(variable.default)})"
        rows.append((variable.name, value, doc))
        try:
            values[variable.name] = variable.default if text is None else variable.parse(text)
        except ConfigError as error:
            problems.append(str(error))
    beat, limit = values.get("PGASDL_HEARTBEAT_MS"), values.get("PGASDL_STOPPED_AFTER")
    if beat is not None and limit is not None and (words := too_few_heartbeats(beat, limit)):
        problems.append(words)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in BY_NAME:
            problems.append(f"unknown variable {name}: did you mean {nearest(name, BY_NAME)}?")
    return rows, problems
