"""Settings of a context, from the arguments of ``init``, ``PGASDL_*`` variables and defaults.

Nothing is read at import. An unknown variable or a wrong value raises
:class:`~pgasdl.errors.ConfigError`, which names it, what is accepted, and the nearest known name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pgasdl.errors import ConfigError
from pgasdl.settings.parsers import Address
from pgasdl.settings.variables import (
    BY_FIELD,
    BY_NAME,
    PREFIX,
    VARIABLES,
    format_value,
    listing,
    nearest,
)

__all__ = ["VARIABLES", "Address", "Config", "Limits", "format_value", "listing"]

PASSIVE_BYTES = 65536
OVERSUBSCRIBED_YIELD_US = 20_000
_LEAST_HEARTBEATS = 3  # within stopped_after; the native layer has the same limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a context.

    Attributes
    ----------
    notifications : int
        Notifications of a segment, by default; any segment may have up to 2**28.
    queues, queue_depth : int
        Queues at once; requests in one queue between two waits.
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
    """Settings of a context: each field from an argument, else its variable, else its default."""

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
    gpu: str
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
            Variables; None: ``os.environ``.
        **arguments : object
            Fields by name; None means "not given".

        Raises
        ------
        ConfigError
            An unknown variable or argument, or a wrong value.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {variable.field: variable.default for variable in VARIABLES}
        for name, text in sorted(environ.items()):
            if name.startswith(PREFIX):
                if name not in BY_NAME:
                    raise ConfigError(
                        f"unknown variable {name}: did you mean {nearest(name, BY_NAME)}? "
                        "`pgasdl env` lists them all"
                    )
                values[BY_NAME[name].field] = BY_NAME[name].parse(text)
        given = {field: value for field, value in arguments.items() if value is not None}
        for field, value in given.items():
            if field not in BY_FIELD:
                raise ConfigError(
                    f"unknown argument {field!r}: did you mean {nearest(field, BY_FIELD)!r}?"
                )
            given[field] = BY_FIELD[field].check(value)
        if "rank" in given or "size" in given:
            # The caller gives the place in the job: do not mix the launcher's into it.
            for field in ("rank", "size", "local_rank", "local_size"):
                values[field] = None
        return cls(**{**values, **given})

    @property
    def limits(self) -> Limits:
        """Limits of a context with these settings."""
        return Limits(self.notifications, self.queues, self.queue_depth)

    def core_options(self, *, oversubscribed: bool) -> dict[str, Any]:
        """Return the core's options.

        With fewer cores than ranks, a rank that spins keeps the rank it waits for from running,
        and a rank that sleeps wakes late. So a wait yields its core again and again.
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
        checked = {field: BY_FIELD[field].check(value) for field, value in changes.items()}
        return dataclasses.replace(self, **checked)  # type: ignore[arg-type]
