"""The table of every ``PGASDL_*`` variable, as the fields of a dataclass."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pgasdl.errors import ConfigError
from pgasdl.settings.parsers import (
    Address,
    HostPort,
    Integer,
    IntegerOf,
    OneOf,
    Parser,
    PartitionKey,
    PortList,
    PortRange,
    Ports,
    Seconds,
    Text,
)
from pgasdl.transports import AUTO, SETTINGS

PREFIX = "PGASDL_"
_T = TypeVar("_T")


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


def _row(parser: Parser, default: _T, doc: str) -> _T:
    """Return a dataclass's field; to a type checker it has the type of its default."""
    row: _T = field(default=default, metadata={"parser": parser, "doc": doc})
    return row


LOG_LEVELS = ("debug", "info", "warning", "error")
_LEAST_HEARTBEATS = 3  # within stopped_after; the native layer has the same limit
_RANKS = 2**20
_RANK = Integer(0, _RANKS - 1)
_SIZE = Integer(1, _RANKS)
_PATH = Text(r"[^\0]{1,4095}", "a path")


@dataclass(frozen=True, slots=True)
class Variables:
    """A row for each variable: its field and type, its parser, its default and its meaning."""

    rank: int | None = _row(_RANK, None, "rank of this process; with PGASDL_SIZE")
    size: int | None = _row(_SIZE, None, "number of ranks in the job")
    local_rank: int | None = _row(_RANK, None, "rank among those on this machine")
    local_size: int | None = _row(_SIZE, None, "number of ranks on this machine")
    job_id: str | None = _row(
        Text(r"[A-Za-z0-9._:@+-]{1,128}", "1 to 128 letters, digits or any of . _ : @ + -"),
        None,
        "name of the job; every rank must give the same",
    )
    store: Address | None = _row(HostPort(), None, "where the ranks meet at start-up")  # noqa: RUF009
    secret_fd: int | None = _row(
        Integer(3, 2**20),
        None,
        "inherited descriptor that holds the job's 32-byte secret (set by `pgasdl run`)",
    )
    keep_going: int = _row(
        Integer(0, 1),
        1,
        "0: a loss ends all ranks, so no error advises ctx.survivors() (set by `pgasdl run`)",
    )
    secret_file: str | None = _row(
        _PATH, None, "file with the job's secret, at least 32 random bytes, mode 0600, owned by you"
    )
    transport: str = _row(OneOf(SETTINGS), AUTO, "how bytes reach the peers")
    verbs_device: Ports | None = _row(  # noqa: RUF009
        PortList(),
        None,
        "RDMA devices that transport verbs may use; a rank takes the nearest of the best, by turns "
        "with other ranks, as `pgasdl topo` shows; unset: all",
    )
    verbs_gid: int | None = _row(
        Integer(0, 255),
        None,
        "GID index; unset: the best, RoCE v2 before v1, an IP address before one of the link",
    )
    verbs_pkey: int | None = _row(
        PartitionKey(),
        None,
        "partition, which all ranks must share; unset: the first of the port's table",
    )
    verbs_mtu: int | None = _row(
        IntegerOf((256, 512, 1024, 2048, 4096)),
        None,
        "bytes of a packet at most, and of two ranks' the smaller; unset: the port's MTU",
    )
    verbs_sl: int = _row(
        Integer(0, 15), 0, "service level; on Ethernet the priority in a VLAN's tag"
    )
    verbs_tc: int = _row(
        Integer(0, 255),
        0,
        "traffic class of RoCE v2 and of InfiniBand's global routes: four times the DSCP",
    )
    verbs_grh: str = _row(
        OneOf(("auto", "always")),
        "auto",
        "global routes: on Ethernet, to other subnets and where a port needs them; or always",
    )
    verbs_retry_count: int = _row(
        Integer(0, 7),
        6,
        "how often a request that is not acknowledged is sent again (soft-RoCE: 7 is without end)",
    )
    verbs_rnr_retry_count: int = _row(
        Integer(0, 7),
        6,
        "how often a request is sent again to a peer that is not ready; 7: without end",
    )
    verbs_ack_timeout: int | None = _row(
        Integer(1, 31),
        None,
        "time for an acknowledgement, 4.096 us times 2 to this power; unset: so that all attempts "
        "last PGASDL_STOPPED_AFTER, with several rails a third of it",
    )
    verbs_inline: int = _row(
        Integer(16, 4096),
        64,
        "bytes that are copied into a request instead of read from memory, at most; fewer where "
        "the device takes fewer",
    )
    verbs_order: str = _row(
        OneOf(("auto", "kept", "completion")),
        "auto",
        "a flag follows its data at once where the fabric keeps the order of a connection's "
        "writes, or waits for their completion; auto: as the device says",
    )
    verbs_rails: int = _row(
        Integer(1, 8),
        1,
        "devices or ports that share the work, at most: the best; one that fails is dropped, and "
        "the others go on",
    )
    verbs_stripe: int = _row(
        Integer(4096, 2**30),
        2**20,
        "bytes, with several rails: longer writes and reads are cut in stripes of this length, "
        "which go round over the rails; all else goes by the first",
    )
    mpi_windows: str = _row(
        OneOf(("allocated", "created")),
        "allocated",
        "windows of transport mpi: memory of MPI's own, or made over ours (no /dev/shm needed)",
    )
    tcp_interface: str | None = _row(
        Text(
            r"[A-Za-z0-9_.@-]{1,15}(,[A-Za-z0-9_.@-]{1,15}){0,63}",
            "names of network interfaces, as `ip address` lists them, by commas",
        ),
        None,
        "network interfaces whose addresses transport tcp gives to peers; unset: all",
    )
    tcp_ports: tuple[int, int] | None = _row(
        PortRange(),
        None,
        "ports on which ranks listen for transport tcp, one each; unset: any free one",
    )
    gpu: str = _row(
        OneOf(("auto", "staged")),
        "auto",
        "memory on a GPU: mapped by peers where their transport can, or always by way of the host",
    )
    gpu_piece: int = _row(
        Integer(64, 2**30),
        1 << 20,
        "bytes of a piece that is copied from a GPU to the host, or back, while others travel",
    )
    timeout: float = _row(Seconds(0.001, 1e7), 60.0, "default deadline of every call, also of init")
    queue_depth: int = _row(Integer(1, 2**20), 1024, "requests in a queue between two waits")
    queues: int = _row(Integer(1, 4096), 16, "most queues of a context at once")
    passive_bytes: int | None = _row(
        Integer(8, 2**24),
        None,
        "longest passive message; unset: 65536, or, with more than 128 ranks, as many as let all "
        "mailboxes of a rank take 16 MiB",
    )
    notifications: int = _row(
        Integer(1, 2**28), 65536, "default number of notifications of a segment"
    )
    spin_us: int = _row(Integer(0, 10**6), 20, "microseconds a wait spins before it yields")
    yield_us: int = _row(Integer(0, 10**7), 1000, "microseconds it yields before it sleeps")
    policy: str | None = _row(
        Text(r".{0,65535}", "a policy such as allreduce:0-64k:tree#64k-inf:gdraa, or @FILE"),
        None,
        "plans by size, as `pgasdl tune` writes them; unset: chosen automatically",
    )
    plan_modules: str | None = _row(
        Text(r"[^\0]{0,65535}", "modules or .py files, by commas"),
        None,
        "modules that register more plans; init imports them before it reads the policy",
    )
    supernode: int = _row(
        _SIZE,
        1,
        "ranks under one switch, neighbours in the order of ranks, where links between switches "
        "are slower: halving-doubling keeps its large exchanges inside; the same on all ranks",
    )
    progress: str = _row(
        OneOf(("turn", "thread")),
        "turn",
        "who advances exchanges: the training loop's calls, or a thread of their own",
    )
    heartbeat_ms: int = _row(Integer(10, 60_000), 200, "milliseconds between two heartbeats")
    stopped_after: float = _row(
        Seconds(0.1, 86_400),
        3.0,
        "silence after which the next heartbeat of another rank finds this one stopped",
    )
    job_folder: str | None = _row(
        _PATH,
        None,
        "folder of a job that a job server runs, the same each time it is started again: for "
        "checkpoints (set by the job server)",
    )
    job_link: str | None = _row(
        _PATH,
        None,
        "file that tells a job how to reach the job server that started it (set by the job server)",
    )
    job_server: str | None = _row(
        Text(r"[^\0]{1,4095}", "a URL, or the path of the server's file"),
        None,
        "job server of `pgasdl job`; unset: the one whose file is in the user's state folder",
    )
    log: str = _row(OneOf(LOG_LEVELS), "info", "lowest level that is logged")
    trace: str | None = _row(
        _PATH,
        None,
        "directory of flight records; unset: the temporary folder, on SIGUSR1 standard error",
    )


VARIABLES = tuple(
    Variable(PREFIX + row.name.upper(), default=row.default, **row.metadata)
    for row in fields(Variables)
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
