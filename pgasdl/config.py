"""Settings of a context: one table of every ``PGASDL_*`` variable, parsed strictly by ``init``.

Nothing is read at import. A variable nobody knows, or a value that cannot be right, raises
:class:`~pgasdl.errors.ConfigError` naming it, what is accepted, and the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pgasdl.errors import ConfigError
from pgasdl.transports import AUTO, SETTINGS

PREFIX = "PGASDL_"

Address = tuple[str, int]

PASSIVE_BYTES = 65536


class Parser(Protocol):
    """Turns a variable's text into a value; ``check`` does the same for an argument of ``init``.

    Both raise ValueError or TypeError when the value is refused; the table adds the name.
    """

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""

    def parse(self, text: str) -> object:
        """Turn a variable's text into a value."""

    def check(self, value: object) -> object:
        """Turn an argument into a value."""


@dataclass(frozen=True)
class Integer:
    """An integer in a range, both ends included."""

    low: int
    high: int

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return f"an integer from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        """Turn a variable's text into a value."""
        # int() alone would take "1_000", " 1 " and other scripts' digits. 20 digits bound its work.
        if not re.fullmatch(r"[0-9]{1,20}", text):
            raise ValueError
        return self.check(int(text))

    def check(self, value: object) -> int:
        """Turn an argument into a value."""
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError
        number = int(value.__index__())
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class Seconds:
    """Seconds in a range, both ends included."""

    low: float
    high: float

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return f"seconds, from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        """Turn a variable's text into a value."""
        if not re.fullmatch(
            r"([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?", text
        ):
            raise ValueError
        return self.check(float(text))

    def check(self, value: object) -> float:
        """Turn an argument into a value."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError
        if not math.isfinite(value) or not self.low <= value <= self.high:
            raise ValueError
        return float(value)


@dataclass(frozen=True)
class OneOf:
    """One of several names."""

    names: tuple[str, ...]

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return "one of " + ", ".join(self.names)

    def parse(self, text: str) -> str:
        """Turn a variable's text into a value."""
        return self.check(text)

    def check(self, value: object) -> str:
        """Turn an argument into a value."""
        if not isinstance(value, str) or value not in self.names:
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """Text that a pattern matches as a whole."""

    pattern: str
    accepted: str

    def parse(self, text: str) -> str:
        """Turn a variable's text into a value."""
        return self.check(text)

    def check(self, value: object) -> str:
        """Turn an argument into a value."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise ValueError
        return value


@dataclass(frozen=True)
class HostPort:
    """A host and a port."""

    accepted: str = "HOST:PORT, or [IPV6]:PORT, with a port from 1 to 65535"

    def parse(self, text: str) -> Address:
        """Turn a variable's text into a value."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+)):([0-9]{1,5})", text, re.ASCII)
        if match is None:
            raise ValueError
        return self.check((match[1] or match[2], int(match[3])))

    def check(self, value: object) -> Address:
        """Turn an argument into a value."""
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError
        host, port = value
        if not isinstance(host, str) or not host or type(port) is not int:
            raise TypeError
        if not 1 <= port <= 65535:
            raise ValueError
        return host, port


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
        Text(r"[A-Za-z0-9_.-]{1,64}", "the name of an RDMA device, as ibv_devices lists it"),
        None,
        "RDMA device of transport verbs; unset: the best, as `pgasdl topo` shows",
    ),
    Variable("PGASDL_VERBS_PORT", Integer(1, 255), None, "port of that device; unset: the best"),
    Variable("PGASDL_VERBS_GID", Integer(0, 4095), None, "GID index; unset: the best"),
    Variable(
        "PGASDL_MPI_WINDOWS",
        OneOf(("allocated", "created")),
        "allocated",
        "windows of transport mpi: memory of MPI's own, or made over ours (no /dev/shm needed)",
    ),
    Variable(
        "PGASDL_TIMEOUT",
        Seconds(0.001, 1e7),
        60.0,
        "deadline of every call that names none, init too",
    ),
    Variable(
        "PGASDL_QUEUE_DEPTH", Integer(1, 2**20), 1024, "requests in a queue between two waits"
    ),
    Variable("PGASDL_QUEUES", Integer(1, 4096), 16, "queues a context may have at once"),
    Variable(
        "PGASDL_NOTIFICATIONS",
        Integer(1, 2**28),
        65536,
        "notifications of a segment that names none",
    ),
    Variable("PGASDL_SPIN_US", Integer(0, 10**6), 20, "microseconds a wait spins before it yields"),
    Variable("PGASDL_YIELD_US", Integer(0, 10**7), 1000, "microseconds it yields before it sleeps"),
    Variable(
        "PGASDL_POLICY",
        Text(r".{0,65535}", "a policy such as allreduce:0-64k:tree#64k-inf:gdraa, or @FILE"),
        None,
        "which plan for which size, as `pgasdl tune` writes it; unset: chosen automatically",
    ),
    Variable(
        "PGASDL_PLAN_MODULES",
        Text(r"[^\0]{0,65535}", "modules or .py files, by commas"),
        None,
        "modules that register plans of your own, imported by init, before the policy is read",
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
        "silence after which a rank counts as stopped",
    ),
    Variable("PGASDL_LOG", OneOf(LOG_LEVELS), "info", "least level that is logged"),
    Variable("PGASDL_TRACE", _PATH, None, "directory of flight records; unset: standard error"),
)

OVERSUBSCRIBED_YIELD_US = 20_000

_LEAST_HEARTBEATS = 3  # within stopped_after; the native layer has the same limit

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_BY_FIELD = {variable.field: variable for variable in VARIABLES}


def _nearest(name: str, known: Mapping[str, Variable]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a context admits.

    Attributes
    ----------
    notifications : int
        Of a segment that names no number; any segment may have up to 2**28.
    queues, queue_depth : int
        Queues at once; requests in one between two waits.
    list_elements : int
        Transfers in one list operation.
    passive_bytes : int
        Longest passive message.
    allreduce_bytes : int
        Largest piece of :meth:`Group.allreduce` that travels at once.
    """

    notifications: int
    queues: int
    queue_depth: int
    list_elements: int = 65536
    passive_bytes: int = PASSIVE_BYTES
    allreduce_bytes: int = 8192


@dataclass(frozen=True, slots=True)
class Config:
    """What a context was told, each field from an argument, else its variable, else the table."""

    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    job_id: str | None
    store: Address | None
    secret_fd: int | None
    secret_file: str | None
    transport: str
    verbs_device: str | None
    verbs_port: int | None
    verbs_gid: int | None
    mpi_windows: str
    timeout: float
    queue_depth: int
    queues: int
    notifications: int
    spin_us: int
    yield_us: int
    policy: str | None
    plan_modules: str | None
    progress: str
    heartbeat_ms: int
    stopped_after: float
    log: str
    trace: str | None

    def __post_init__(self) -> None:
        if self.stopped_after * 1e3 < _LEAST_HEARTBEATS * self.heartbeat_ms:
            raise ConfigError(
                f"PGASDL_HEARTBEAT_MS={self.heartbeat_ms} and PGASDL_STOPPED_AFTER="
                f"{self.stopped_after:g}: a stopped rank would never be noticed; at least "
                f"{_LEAST_HEARTBEATS} heartbeats have to fit in, so ask for one at least every "
                f"{int(self.stopped_after * 1e3 / _LEAST_HEARTBEATS)} ms, or wait for longer than "
                f"{_LEAST_HEARTBEATS * self.heartbeat_ms / 1e3:g} s"
            )

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **arguments: object
    ) -> Config:
        """Merge arguments, variables and defaults, in this order.

        Parameters
        ----------
        environ : Mapping[str, str], optional
            The variables; None: ``os.environ``.
        **arguments : object
            Fields by name; None means "not given".

        Raises
        ------
        ConfigError
            An unknown variable or argument, or a value that cannot be right.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {variable.field: variable.default for variable in VARIABLES}
        for name, text in sorted(environ.items()):
            if name.startswith(PREFIX):
                if name not in _BY_NAME:
                    raise ConfigError(
                        f"unknown variable {name}: did you mean {_nearest(name, _BY_NAME)}? "
                        "`pgasdl env` lists them all"
                    )
                values[_BY_NAME[name].field] = _BY_NAME[name].parse(text)
        given = {field: value for field, value in arguments.items() if value is not None}
        for field, value in given.items():
            if field not in _BY_FIELD:
                raise ConfigError(
                    f"unknown argument {field!r}: did you mean {_nearest(field, _BY_FIELD)!r}?"
                )
            given[field] = _BY_FIELD[field].check(value)
        if "rank" in given or "size" in given:
            # An explicit place in a job: the launcher's place must not be mixed into it.
            for field in ("rank", "size", "local_rank", "local_size"):
                values[field] = None
        return cls(**{**values, **given})

    @property
    def limits(self) -> Limits:
        """What a context with these settings admits."""
        return Limits(self.notifications, self.queues, self.queue_depth)

    def core_options(self, *, oversubscribed: bool) -> dict[str, Any]:
        """Return what the core is told of these settings.

        With fewer cores than ranks, whoever spins keeps the rank it waits for from running, and
        whoever sleeps is woken late: a wait gives its core away, again and again.
        """
        least_yield_us = OVERSUBSCRIBED_YIELD_US if oversubscribed else 0
        return {
            "timeout": self.timeout,
            "queue_depth": self.queue_depth,
            "queues": self.queues,
            "passive_bytes": PASSIVE_BYTES,
            "spin_us": 0 if oversubscribed else self.spin_us,
            "yield_us": max(self.yield_us, least_yield_us),
            "heartbeat_ms": self.heartbeat_ms,
            "stopped_after": self.stopped_after,
            "verbs_device": self.verbs_device,
            "verbs_port": self.verbs_port,
            "verbs_gid": self.verbs_gid,
            "mpi_created": self.mpi_windows == "created",
        }

    def replace(self, **changes: object) -> Config:
        """Return the same settings with some fields changed, checked like arguments."""
        checked = {field: _BY_FIELD[field].check(value) for field, value in changes.items()}
        return dataclasses.replace(self, **checked)  # type: ignore[arg-type]


def format_value(value: object) -> str:
    """Return a field's value the way its variable is written."""
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def listing(
    environ: Mapping[str, str] | None = None,
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Rows ``(name, value, doc)`` of the table, and one message per variable that is refused."""
    environ = os.environ if environ is None else environ
    rows: list[tuple[str, str, str]] = []
    problems: list[str] = []
    for variable in VARIABLES:
        text = environ.get(variable.name)
        value = format_value(variable.default) if text is None else text
        doc = f"{variable.doc} ({variable.parser.accepted}"
        doc += ")" if text is None else f"; default {format_value(variable.default)})"
        rows.append((variable.name, value, doc))
        if text is not None:
            try:
                variable.parse(text)
            except ConfigError as error:
                problems.append(str(error))
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in _BY_NAME:
            problems.append(f"unknown variable {name}: did you mean {_nearest(name, _BY_NAME)}?")
    return rows, problems
