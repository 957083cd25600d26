"""What every bootstrap store offers, and the one for ranks that share a process."""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from typing import Self

from pgasdl.bootstrap.channel import pack_key
from pgasdl.errors import BootstrapError, ClosedError, PeerLost, RankError, Timeout


class RankState(enum.IntEnum):
    """What a store knows of a rank's connection."""

    ABSENT = 0
    CONNECTED = 1
    CLOSED = 2
    LOST = 3


class Store(ABC):
    """A small key-value exchange between the ranks of a job, for start-up and rare events.

    Any thread may call. Keys belong to one generation of a context: after close and a new init
    on every rank, the old keys are not seen.
    """

    rank: int
    size: int
    timeout: float

    @abstractmethod
    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key``; whoever waits for it gets it. At most 64 KiB with the key."""

    @abstractmethod
    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        """Wait until ``key`` is there and return its value.

        Parameters
        ----------
        timeout : seconds; None: the store's own, 0: one try
        owner : the rank that will put it; once that rank is gone the wait ends

        Raises
        ------
        Timeout    the key is not there; names it, and the ranks that are not connected
        PeerLost   ``owner`` ended without putting it
        """

    @abstractmethod
    def delete(self, key: str, timeout: float | None = None) -> None:
        """Forget ``key``; nothing happens when it is not there."""

    @abstractmethod
    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        """The state of every rank's connection."""

    @abstractmethod
    def close(self, *, drain: float = 5.0) -> None:
        """Leave the exchange; idempotent. A rank that serves waits ``drain`` s for the others."""

    def exchange(self, key: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Give ``value`` and get every rank's, in rank order (``key`` must be new each time)."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.put(f"{key}/{self.rank}", value, timeout)
        values = []
        for peer in range(self.size):
            remaining = max(0.0, deadline - time.monotonic())
            values.append(
                value if peer == self.rank else self.get(f"{key}/{peer}", remaining, owner=peer)
            )
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def describe_missing(states: tuple[RankState, ...]) -> str:
    """The end of a Timeout's message: which ranks are not connected, and how they left."""
    parts = []
    for state, words in (
        (RankState.ABSENT, "not connected"),
        (RankState.LOST, "lost"),
        (RankState.CLOSED, "closed"),
    ):
        ranks = [str(rank) for rank, other in enumerate(states) if other is state]
        if ranks:
            more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
            parts.append(f"{words}: rank {', '.join(ranks[:16])}{more}")
    return "; " + "; ".join(parts) if parts else ""


class _Table:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.states = [RankState.CONNECTED] * size


class LocalStore(Store):
    """The store of ranks that are threads of one process, or of a single rank."""

    def __init__(
        self, rank: int = 0, size: int = 1, timeout: float = 60.0, table: _Table | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise RankError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._table = table or _Table(size)

    @classmethod
    def world(cls, size: int, timeout: float = 60.0) -> list[LocalStore]:
        """One store per rank over one table."""
        table = _Table(size)
        return [cls(rank, size, timeout, table) for rank in range(size)]

    def _check(self) -> None:
        if self._table.states[self.rank] is not RankState.CONNECTED:
            raise ClosedError(f"rank {self.rank}: the store is closed")

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        _fitting(key, value)
        with self._table.changed:
            self._check()
            self._table.values[key] = bytes(value)
            self._table.changed.notify_all()

    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        _fitting(key)
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        table = self._table
        with table.changed:
            while True:
                self._check()
                if key in table.values:
                    return table.values[key]
                if owner is not None and table.states[owner] is not RankState.CONNECTED:
                    raise PeerLost(f"rank {owner} ended before it gave {key!r}", owner)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise Timeout(
                        f"rank {self.rank}: {key!r} was not there within {limit:g} s"
                        + describe_missing(tuple(table.states))
                    )
                table.changed.wait(remaining)

    def delete(self, key: str, timeout: float | None = None) -> None:
        with self._table.changed:
            self._check()
            self._table.values.pop(key, None)

    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        with self._table.changed:
            return tuple(self._table.states)

    def close(self, *, drain: float = 5.0) -> None:
        self._leave(RankState.CLOSED)

    def lose(self) -> None:
        """End as a killed rank would, so that a test sees its peers' errors."""
        self._leave(RankState.LOST)

    def _leave(self, state: RankState) -> None:
        with self._table.changed:
            if self._table.states[self.rank] is RankState.CONNECTED:
                self._table.states[self.rank] = state
                self._table.changed.notify_all()

    def __repr__(self) -> str:
        return f"LocalStore(rank={self.rank}, size={self.size})"


def _fitting(key: str, value: bytes = b"") -> None:
    try:
        pack_key(key, value)
    except ValueError as error:
        raise BootstrapError(str(error)) from None
