"""The table of transports: one row each, read by the settings, the routes and the doctor.

The core has the same names in the same order (``native/transport/table.cpp``); a test compares
them. This table needs the standard library only, not the core.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transport:
    """One way for bytes to reach a peer."""

    name: str  # value of ``transport=`` and ``PGASDL_TRANSPORT``
    summary: str  # the thing that carries the bytes
    between_hosts: bool  # it reaches ranks of other machines
    maps: bool  # ranks of one machine load from and store to each other's segments
    # Its ranks are processes; else they are threads, through ``pgasdl.loopback``.
    processes: bool = True
    # It sends only from memory that it has registered, which is that of segments.
    registers: bool = False


TRANSPORTS = {
    row.name: row
    for row in (
        Transport("shm", "memory mapped inside a machine", between_hosts=False, maps=True),
        Transport("verbs", "RDMA adapters", between_hosts=True, maps=False, registers=True),
        Transport("mpi", "windows of an MPI library", between_hosts=True, maps=False),
        Transport("loopback", "threads of one process", False, maps=True, processes=False),
    )
}
AUTO = "auto"  # shm inside a machine, between machines verbs, or MPI where there is no verbs
SETTINGS = (AUTO, *TRANSPORTS)
OFFERED = (AUTO, *(row.name for row in TRANSPORTS.values() if row.processes))
