"""What a context says about itself: memory, counters, a description, the flight record."""

from __future__ import annotations

from pgasdl import _native
from pgasdl.context.part import Part
from pgasdl.counters import Counters, Traffic, Waits
from pgasdl.footprint import Footprint
from pgasdl.openmetrics import exposition


class Reports(Part):
    """What a context says about itself."""

    def footprint(self) -> Footprint:
        """Return the library's own memory and connections on this rank, as they are now."""
        return Footprint(self._own_bytes, self.segments.workspace_bytes, *self._connections())

    def counters(self) -> Counters:
        """Return this rank's counters of traffic, registrations, waits and losses since it joined.

        ``ctx.counters() - before`` has the traffic of a piece of a program.

        Notes
        -----
        It counts one-sided operations once they are posted, and collectives, exchanges and
        everything else that plans make once an execution has ended, the same over all transports:
        a Put that is a copy into mapped memory counts as one that an adapter makes. It leaves out
        the library's own messages (start-up, heartbeats, barriers, small collectives of groups),
        passive messages, operations in captured graphs, and what the program itself, or ``send``
        of torch.distributed, loads from mapped memory or stores there. A wait is counted once it
        has ended, unless it was over at once. Any thread may call it.
        """
        peers = tuple(Traffic(*words) for words in self._traffic())
        waits = {cause: Waits(*words) for cause, words in self._waits().items()}
        states = enumerate(self._health())
        lost = sum(rank != self.rank and how not in ("healthy", "closed") for rank, how in states)
        layers = {
            (exchange.number, layer): times
            for exchange in list(self.state.servers)
            for layer, times in enumerate(exchange.times)
        }
        return Counters(peers, self._registrations, waits, lost, layers)

    def openmetrics(self) -> str:
        """Return the counters as text in the format of OpenMetrics 1.0, for a scrape.

        Returns
        -------
        str
            Counters with the prefix ``pgasdl_``, in bytes and seconds, each labelled with the rank:
            ``traffic_bytes`` and ``traffic_messages`` by peer and direction ("write", "read");
            ``notifications`` by peer; ``registrations``; ``waits`` and ``wait_seconds`` by cause;
            ``peers_lost``; ``layer_exchanges`` by exchange and layer, ``layer_seconds`` also by
            state ("computing", "queued", "exchanging", "waiting").

        Notes
        -----
        Five lines for each peer with which there was traffic, five for each layer, and 18 others:
        a rank of 1024 that has written to 20 has some 120.
        """
        return exposition(self.counters(), self.rank)

    def describe(self) -> str:
        """Describe this context, for a log: ranks, transport, limits, plans and inboxes."""
        lines = [
            f"rank {self.rank} of {self.size}, started by {self.launch.kind}",
            f"transport {self.topology.routes}",
            *self._nodes(),
            *self._devices(),
            f"memory on a GPU: {self._gpu_path()}",
            f"policy: {str(self.policy) or 'none, plans are chosen automatically'}",
            f"health: {', '.join(self._health())}",
            str(self.limits),
            str(self.footprint()),
            self._pool.describe(),
            *self._allreduces.describe(),
            *(exchange.describe() for exchange in self.state.servers),
        ]
        return "\n".join(lines)

    def _nodes(self) -> list[str]:
        members = self.world.members
        if not members.several_nodes:
            return []
        if isinstance(members.node_size, int):
            return [f"nodes: {members.nodes} of {members.node_size} ranks, the last may have fewer"]
        return [f"nodes: {members.nodes}, of {', '.join(map(str, members.node_size))} ranks"]

    def _devices(self) -> list[str]:
        state = self._transport_state()
        return [state] if state else []

    def _gpu_path(self) -> str:
        if missing := _native.cuda_missing():
            return missing
        if why := self._why_unreached(0):
            return f"by way of the host, in pieces of {self.config.gpu_piece} bytes ({why})"
        return "peers reach it"

    def flight_record(self) -> str:
        """Return the last operations of this rank, one a line, with microseconds before now.

        A post has the moment when it was over, a wait that when it, or its last 50 ms, began.
        """
        return self._record()

    def dump_flight_record(self, reason: str) -> None:
        """Write the flight record to ``PGASDL_TRACE``, or to standard error."""
        self._job.dump(self, reason)
