"""The table of transports: one row each, read by the settings, the routes and the doctor.

The core has the same names in the same order (``native/transport/table.cpp``); a test compares
them. This table needs the standard library only, not the core. Its order is that of preference:
where several rows would do, ranks take the first.
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
    # It opens devices, which takes time: it is looked for only where it may be needed.
    devices: bool = False
    # It is a library of MPI's: ranks meet through a communicator, windows map memory, and it
    # carries the bytes to all ranks or to none.
    by_mpi: bool = False


TRANSPORTS = {
    row.name: row
    for row in (
        Transport("shm", "memory mapped inside a machine", between_hosts=False, maps=True),
        Transport(
            "verbs", "RDMA adapters", between_hosts=True, maps=False, registers=True, devices=True
        ),
        Transport("mpi", "windows of an MPI library", True, maps=False, by_mpi=True),
        Transport("tcp", "TCP connections", between_hosts=True, maps=False),
        Transport("loopback", "threads of one process", False, maps=True, processes=False),
    )
}
AUTO = (
    "auto"  # shm inside a machine; between machines verbs, else MPI where ranks met by it, else tcp
)
SETTINGS = (AUTO, *TRANSPORTS)
# Ranks choose between these, the best first.
WAYS = tuple(row for row in TRANSPORTS.values() if row.processes)
OFFERED = (AUTO, *(row.name for row in WAYS))
OF_THREADS = next(row.name for row in TRANSPORTS.values() if not row.processes)


def is_by_mpi(setting: str) -> bool:
    """Whether ranks with this setting meet through MPI."""
    return setting in TRANSPORTS and TRANSPORTS[setting].by_mpi
