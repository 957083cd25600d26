"""The interface of every bootstrap store, and the store of ranks that share a process."""

from __future__ import annotations

import enum
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Self

from pgasdl.errors import BootstrapError, ClosedError, PeerLostError, PgasTimeoutError, RankError
from pgasdl.runtime.bootstrap.channel import TOKEN_BYTES, pack_key

REASON = "failed"  # "failed/RANK" is the error that ends a rank, for the launcher
LOOK_SECONDS = 0.1  # between two calls of ``look`` during a wait


class RankState(enum.IntEnum):
    """The state of a rank's connection, as a store knows it."""

    ABSENT = 0
    CONNECTED = 1
    CLOSED = 2
    LOST = 3


class Store(ABC):
    """A small key-value exchange between the ranks of a job, for start-up and rare events.

    Any thread may call. Keys belong to one generation of a context: after close and a new init on
    every rank, the old keys are not seen. ``token`` is 16 bytes that only the ranks of this
    generation know; it never travels.
    """

    rank: int
    size: int
    timeout: float
    token: bytes

    @abstractmethod
    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key``; ranks that wait for it get it. At most 64 KiB with the key."""

    @abstractmethod
    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        """Wait until ``key`` is there and return its value.

        ``timeout`` 0 is one try. ``owner`` is the rank that puts the key: PeerLostError if that
        rank ended before. PgasTimeoutError names the key, and the ranks that are not connected.
        """

    @abstractmethod
    def gather(
        self,
        key: str,
        ranks: Sequence[int],
        timeout: float | None = None,
        *,
        look: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Wait until each of ``ranks`` has put ``key/RANK``, and return the values in that order.

        It is one request, however many ranks there are; they are in ascending order, without
        repetition. ``look`` is called ten times a second during the wait; its exception ends the
        wait. PgasTimeoutError names a rank whose value is missing, and the ranks that are not
        connected. PeerLostError: one of ``ranks`` ended without putting its value.
        """

    @abstractmethod
    def delete(self, key: str, timeout: float | None = None) -> None:
        """Delete ``key``, if it exists."""

    @abstractmethod
    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        """Return the state of every rank's connection."""

    @abstractmethod
    def close(self, *, drain: float = 5.0) -> None:
        """Leave the store. Idempotent. A rank that serves waits ``drain`` s for the others."""

    def go_on_without(  # noqa: B027 - most stores are not served by a rank
        self, lost: Collection[int], timeout: float, look: Callable[[], None]
    ) -> None:
        """Let another rank serve the store if one of ``lost`` did. Collective over those left.

        ``lost`` is the same on all of them. After a timeout the same call continues. ``look`` is
        called ten times a second during the wait; its exception ends the wait.
        """

    def exchange(self, key: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Give ``value`` and get every rank's, in rank order (``key`` must be new each time)."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        self.put(f"{key}/{self.rank}", value, limit)
        return self.gather(key, range(self.size), max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def bitmap(ranks: Sequence[int], size: int) -> bytes:
    """Return a bit for each of ``size`` ranks, the lowest first; those of ``ranks`` are set."""
    bits = bytearray((size + 7) // 8)
    for rank in ranks:
        bits[rank >> 3] |= 1 << (rank & 7)
    return bytes(bits)


def describe_missing(states: tuple[RankState, ...]) -> str:
    """Say which ranks are not connected, and how they left: the end of a timeout's message."""
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
    """The table that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.values: dict[str, bytes] = {}
        self.states = [RankState.CONNECTED] * size


class LocalStore(Store):
    """A store for ranks that are threads of one process, or for a single rank."""

    def __init__(
        self, rank: int = 0, size: int = 1, timeout: float = 60.0, table: _Table | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise RankError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._table = table or _Table(size)
        self.token = self._table.token

    @classmethod
    def world(cls, size: int, timeout: float = 60.0) -> list[LocalStore]:
        """One store per rank over one table."""
        table = _Table(size)
        return [cls(rank, size, timeout, table) for rank in range(size)]

    def _check(self) -> None:
        if self._table.states[self.rank] is not RankState.CONNECTED:
            raise ClosedError(f"rank {self.rank}: the store is closed")

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Put a value; see :meth:`Store.put`."""
        _fitting(key, value)
        with self._table.changed:
            self._check()
            self._table.values[key] = bytes(value)
            self._table.changed.notify_all()

    def get(self, key: str, timeout: float | None = None, *, owner: int | None = None) -> bytes:
        """Get a value; see :meth:`Store.get`."""
        _fitting(key)
        limit = self.timeout if timeout is None else timeout
        return self._wait(key, owner, limit, time.monotonic() + limit, None)

    def gather(
        self,
        key: str,
        ranks: Sequence[int],
        timeout: float | None = None,
        *,
        look: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Get a value of each rank; see :meth:`Store.gather`."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        return [self._wait(f"{key}/{rank}", rank, limit, deadline, look) for rank in ranks]

    def _wait(
        self,
        key: str,
        owner: int | None,
        limit: float,
        deadline: float,
        look: Callable[[], None] | None,
    ) -> bytes:
        table = self._table
        while True:
            with table.changed:
                self._check()
                if key in table.values:
                    return table.values[key]
                if owner is not None and table.states[owner] is not RankState.CONNECTED:
                    raise PeerLostError(f"rank {owner} ended before it gave {key!r}", owner)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise PgasTimeoutError(
                        f"rank {self.rank}: {key!r} was not there within {limit:g} s"
                        + describe_missing(tuple(table.states))
                    )
                table.changed.wait(remaining if look is None else min(remaining, LOOK_SECONDS))
            if look is not None:
                look()

    def delete(self, key: str, timeout: float | None = None) -> None:
        """Delete a value; see :meth:`Store.delete`."""
        with self._table.changed:
            self._check()
            self._table.values.pop(key, None)

    def states(self, timeout: float | None = None) -> tuple[RankState, ...]:
        """Return every rank's state; see :meth:`Store.states`."""
        with self._table.changed:
            return tuple(self._table.states)

    def close(self, *, drain: float = 5.0) -> None:
        """Leave the store; see :meth:`Store.close`."""
        self._leave(RankState.CLOSED)

    def lose(self) -> None:
        """End like a killed rank, so that a test sees the errors of its peers."""
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
