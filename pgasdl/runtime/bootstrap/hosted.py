"""The store of a job that one of its ranks serves; if that rank is lost, another one serves."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from pgasdl.config import Address
from pgasdl.runtime.bootstrap.client import StoreClient
from pgasdl.runtime.bootstrap.server import StoreServer, listen
from pgasdl.runtime.bootstrap.store import RankState, Store
from pgasdl.topology import Launch


class HostedStore(Store):
    """Rank 0 serves; after its loss the first of the ranks that are left does.

    Every rank listens at an address of its own from the start, and all know these from the first
    exchange on. A rank that connects to such an address waits until the rank there serves. On rank
    0, ``server`` is the job's server, which this store closes.
    """

    def __init__(
        self,
        address: Address | Sequence[Address],
        secret: bytes,
        launch: Launch,
        job_id: str,
        timeout: float,
        *,
        server: StoreServer | None = None,
    ) -> None:
        self.rank, self.size, self.timeout = launch.rank, launch.size, timeout
        self._secret = secret
        self._job_id = job_id
        self._server = server
        self._host = 0
        self._successors: list[Address] | None = None  # where each rank would serve
        self._given: dict[str, bytes] = {}
        self._to_repeat: list[str] = []  # keys that the store of now has not got yet
        try:
            self._client = StoreClient(
                address, secret, self.rank, self.size, job_id, timeout, host=0
            )
            self._listener = listen(self._client.local_host)
        except BaseException:
            if server is not None:
                server.close()
            raise
        self.token = self._client.token
        _FORKED.add(self)

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Put a value; see :meth:`Store.put`."""
        self._given[key] = value
        self._client.put(key, value, timeout)

    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        """Get a value; see :meth:`Store.get`."""
        return self._client.get(key, timeout, owner=owner)

    def gather(
        self,
        key: str,
        ranks: Sequence[int],
        timeout: float | None = None,
        *,
        look: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Get a value of each rank; see :meth:`Store.gather`."""
        return self._client.gather(key, ranks, timeout, look=look)

    def delete(self, key: str, timeout: float | None = None) -> None:
        """Delete a value; see :meth:`Store.delete`."""
        self._given.pop(key, None)
        self._client.delete(key, timeout)

    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        """Return every rank's state; see :meth:`Store.states`."""
        return self._client.states(timeout)

    def exchange(self, key: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Exchange values; see :meth:`Store.exchange`. The first one also carries addresses."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        if self._successors is None:
            host, port = self._listener.getsockname()[:2]
            addresses = super().exchange("successor", f"{port} {host}".encode(), limit)
            words = (each.decode().split(" ", 1) for each in addresses)
            self._successors = [(host, int(port)) for port, host in words]
        return super().exchange(key, value, max(0.0, deadline - time.monotonic()))

    def go_on_without(
        self, lost: Collection[int], timeout: float, look: Callable[[], None]
    ) -> None:
        """Let another rank serve if one of ``lost`` did; see :meth:`Store.go_on_without`."""
        deadline = time.monotonic() + timeout
        if self._host in lost and self._successors is not None:
            host = min(rank for rank in range(self.size) if rank not in lost)
            if host == self.rank and self._server is None:
                self._server = StoreServer(
                    self._secret, self.size, job_id=self._job_id, listener=self._listener
                )
            client = StoreClient(
                self._successors[host],
                self._secret,
                self.rank,
                self.size,
                self._job_id,
                timeout,
                host=host,
                look=look,
            )
            client.timeout = self.timeout
            self._client.close()
            self._client, self._host = client, host
            # Another rank may not have got what the store before had from this one.
            self._to_repeat = list(self._given)
        while self._to_repeat:
            key = self._to_repeat[-1]
            self._client.put(key, self._given[key], max(0.0, deadline - time.monotonic()))
            self._to_repeat.pop()

    def close(self, *, drain: float = 5.0) -> None:
        """Leave the store, then end the server if this rank has it; see :meth:`Store.close`."""
        self._client.close()
        if self._server is not None:
            self._server.close(drain)
        self._listener.close()

    def __repr__(self) -> str:
        return f"HostedStore(rank={self.rank}, size={self.size}, host={self._host})"


_FORKED: weakref.WeakSet[HostedStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _FORKED:
        store._listener.close()


os.register_at_fork(after_in_child=_after_fork)
