"""The cost of one rank of a job: memory of the library's own, and connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """The holdings of one rank for the library, beside the program's own segments.

    Attributes
    ----------
    control_bytes : int
        Memory of the groups: flags, places of small collectives, mailboxes. Shared memory takes
        pages of it only once they are used; a network adapter pins all of it.
    workspace_bytes : int
        Memory of plans and messages: inboxes of gradient exchanges and handles, workspaces of
        ``ctx.allreduce``, and what process groups of PyTorch have. Pages as above.
    program_connections, own_connections, plan_connections : int
        Connections that are open, by who posts on them: the program's queues, the library itself
        (set-up, barriers, heartbeats, atomics), plans. Each is a queue pair; 0 where memory is
        mapped.
    """

    control_bytes: int
    workspace_bytes: int
    program_connections: int
    own_connections: int
    plan_connections: int

    @property
    def connections(self) -> int:
        """All connections that are open."""
        return self.program_connections + self.own_connections + self.plan_connections

    def __str__(self) -> str:
        return (
            f"memory of the library: groups {self.control_bytes} bytes, plans and messages "
            f"{self.workspace_bytes}; connections: program {self.program_connections}, library "
            f"{self.own_connections}, plans {self.plan_connections}"
        )
