"""Messages to any rank's thread, other ranks' health, and what is left after a loss."""

from __future__ import annotations

import logging
import operator
import os
from typing import Any

from pgasdl.context.part import Part
from pgasdl.errors import PeerLostError, RankError, UnavailableError
from pgasdl.group import Group

log = logging.getLogger("pgasdl")


class PeerCalls(Part):
    """What a context has to do with single ranks."""

    def passive_send(self, data: Any, peer: int, *, timeout: float | None = None) -> None:
        """Send a message to the thread that calls :meth:`passive_receive` on ``peer``.

        Parameters
        ----------
        data : bytes-like
            Bytes-like, at most ``limits.passive_bytes``.
        peer : int
            Rank, may be this one.
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Raises
        ------
        PgasTimeoutError
            ``peer`` has not taken this rank's previous message; nothing was sent.
        BufferRefusedError
            The message is too long.
        PeerLostError, RankError

        Notes
        -----
        GASPI: gaspi_passive_send.
        """
        self._world().passive_send(data, peer, timeout)

    def passive_receive(self, *, timeout: float | None = None) -> tuple[int, bytes]:
        """Take the next message from any rank.

        Returns
        -------
        (sender, message)
            Messages of one sender come in order, senders take turns.

        Raises
        ------
        PgasTimeoutError
            No message came.

        Notes
        -----
        GASPI: gaspi_passive_receive.
        """
        sender, message = self._world().passive_receive(timeout)
        return sender, message

    def transport_of(self, peer: int) -> str:
        """Return the name of the transport that carries bytes to ``peer``."""
        self._require_usable()
        if not 0 <= operator.index(peer) < self.size:
            raise RankError(f"rank {peer}: ranks are 0 to {self.size - 1}")
        return self.topology.routes.names[peer]

    def health(self) -> tuple[str, ...]:
        """Return every rank's state: "healthy", "died", "stopped", "failed" or "closed".

        The failure detector keeps it, even while this rank computes. GASPI: gaspi_state_vec_get.
        """
        return tuple(self._health())

    def ping(self, peer: int) -> None:
        """Raise PeerLostError if ``peer`` is known to be gone. GASPI: gaspi_proc_ping."""
        self._require_peer(peer, "ping")

    def reconnect(self, peer: int) -> None:
        """Give up the connections to ``peer``; the next request makes new ones.

        When the peer's adapter refuses a request (a deleted segment, say), the connection breaks:
        everything that is posted on it fails until this is called. Requests under way are lost.
        Where there are no connections (shm), nothing happens.

        Raises
        ------
        RankError, PeerLostError
        """
        self._reconnect(peer)

    def kill(self, peer: int) -> None:
        """Kill another rank's process (SIGKILL). GASPI: gaspi_proc_kill."""
        if peer == self.rank:
            raise RankError(f"rank {peer} is this one; end it by leaving the program")
        pid = self._pid_of(peer)
        if pid == 0:
            raise UnavailableError(f"rank {peer} is a process of another machine")
        if pid == os.getpid():
            raise UnavailableError("the ranks of this job are threads of one process")
        self._kill(peer)

    def survivors(self, *, timeout: float | None = None) -> Group:
        """Accept the losses so far and form a group of the ranks that are left. Collective.

        Before it every wait ends with PeerLostError; afterwards waits work again, among survivors,
        and nothing that a lost rank has begun to write lands in their memory any more. Over tcp and
        verbs its connections end. On one machine the process of a rank that was stopped is killed,
        for it may have been stopped within a write. Over MPI nothing can be done.

        Raises
        ------
        PeerLostError
            Another rank was lost meanwhile.
        PgasError
            A process that was stopped cannot be killed.
        """
        while True:
            for rank in self._acknowledge():
                log.warning("rank %d was stopped; its process was killed: it shared memory", rank)
            states = self._health()
            healthy = [rank for rank, state in enumerate(states) if state == "healthy"]
            self._job.accept(set(range(self.size)).difference(healthy))
            try:
                return self.group(healthy, timeout=timeout)
            except PeerLostError:
                # A peer may have reported a loss that this rank notices only now.
                if self._health() == states:
                    raise
