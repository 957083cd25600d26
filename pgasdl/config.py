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
from pgasdl.settings.parsers import Address, Ports
from pgasdl.settings.variables import (
    BY_FIELD,
    BY_NAME,
    PREFIX,
    VARIABLES,
    Variables,
    format_value,
    listing,
    nearest,
    too_few_heartbeats,
)

__all__ = ["VARIABLES", "Address", "Config", "Limits", "format_value", "listing"]

# The sizes of passive messages. A rank has two places for each rank, which adapters pin.
PASSIVE_BYTES, _MAILBOX_BYTES = 65536, 16 << 20
OVERSUBSCRIBED_YIELD_US = 20_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a context.

    Attributes
    ----------
    notifications : int
        Notifications of a segment, by default; any segment may have up to 2**28.
    queues, queue_depth : int
        Queues at once; requests in one queue between two waits.
    passive_bytes : int
        Longest passive message.
    list_elements : int
        Transfers in one list operation.
    allreduce_bytes : int
        Largest piece of :meth:`Group.combine` that travels at once.
    """

    notifications: int
    queues: int
    queue_depth: int
    passive_bytes: int
    list_elements: int = 65536
    allreduce_bytes: int = 8192


@dataclass(frozen=True, slots=True)
class Config(Variables):
    """Settings of a context: each field from an argument, else its variable, else its default."""

    def __post_init__(self) -> None:
        if words := too_few_heartbeats(self.heartbeat_ms, self.stopped_after):
            raise ConfigError(words)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **arguments: object
    ) -> Config:
        """Merge arguments, variables (by default ``os.environ``) and defaults; None is no argument.

        ConfigError: an unknown variable or argument, or a wrong value.
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

    def limits(self, size: int) -> Limits:
        """Return the limits of a context of ``size`` ranks with these settings."""
        longest = self.passive_bytes or min(PASSIVE_BYTES, _MAILBOX_BYTES // (2 * size) // 8 * 8)
        return Limits(self.notifications, self.queues, self.queue_depth, max(8, longest))

    def core_options(self, size: int, *, oversubscribed: bool) -> dict[str, Any]:
        """Return the core's options for a context of ``size`` ranks.

        With fewer cores than ranks, a rank that spins keeps the rank it waits for from running,
        and a rank that sleeps wakes late. So a wait yields its core again and again.
        """
        least_yield_us = OVERSUBSCRIBED_YIELD_US if oversubscribed else 0
        return {
            "timeout": self.timeout,
            "queue_depth": self.queue_depth,
            "queues": self.queues,
            "passive_bytes": self.limits(size).passive_bytes,
            "spin_us": 0 if oversubscribed else self.spin_us,
            "yield_us": max(self.yield_us, least_yield_us),
            "heartbeat_ms": self.heartbeat_ms,
            "stopped_after": self.stopped_after,
            "mpi_created": self.mpi_windows == "created",
            "reach_devices": self.gpu == "auto",
            "tcp_interface": self.tcp_interface or "",
            "tcp_ports": self.tcp_ports or (0, 0),
        }

    def verbs_options(self) -> dict[str, Any]:
        """Return the arguments of the core's ``VerbsOptions``."""
        ports = self.verbs_device or Ports(())
        return {
            "ports": ports.named,
            "excluded": ports.excluded,
            "gid": self.verbs_gid,
            "pkey": self.verbs_pkey,
            "mtu": self.verbs_mtu,
            "service_level": self.verbs_sl,
            "traffic_class": self.verbs_tc,
            "global_routes": self.verbs_grh == "always",
            "retry_count": self.verbs_retry_count,
            "rnr_retry_count": self.verbs_rnr_retry_count,
            "ack_timeout": self.verbs_ack_timeout,
            "inline_bytes": self.verbs_inline,
            "order": self.verbs_order,
            "rails": self.verbs_rails,
            "stripe": self.verbs_stripe,
            "warns": self.log in ("debug", "info", "warning"),
            "stopped_after": self.stopped_after,
        }

    def replace(self, **changes: object) -> Config:
        """Return the same settings with some fields changed, checked like arguments."""
        checked = {field: BY_FIELD[field].check(value) for field, value in changes.items()}
        return dataclasses.replace(self, **checked)  # type: ignore[arg-type]
