"""Counters of one rank: its traffic, its waits and its losses since it joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Self


class _Sums:
    """Fields that are added up, one by one."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*(a - b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(sums: _Sums) -> tuple[float, ...]:
    return astuple(sums)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class Traffic(_Sums):
    """The traffic that one rank has caused with one peer, or with all.

    Attributes
    ----------
    bytes_written, messages_written : int
        Written to the peer's memory. Each transfer of a list is a message, and so is each span of
        the peer's memory in which a plan stores a result. An atomic is a message without bytes.
    bytes_read, messages_read : int
        Read from the peer's memory, by reads and by plans that load from there.
    notifications : int
        Raised at the peer, or added to.
    """

    bytes_written: int = 0
    messages_written: int = 0
    bytes_read: int = 0
    messages_read: int = 0
    notifications: int = 0


@dataclass(frozen=True, slots=True)
class Waits(_Sums):
    """The waits of one rank for one cause that have ended, except those that ended at once.

    Attributes
    ----------
    number : int
        How many. A call with ``timeout=0`` is none; a collective may wait in each of its rounds.
        A wait that the first few hundred polls end, most often within a microsecond, does not
        count.
    seconds : float
        In all of them, over all threads.
    """

    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTimes(_Sums):
    """The cost of one layer of a gradient exchange, on this rank.

    Attributes
    ----------
    exchanges : int
        How often its gradient was exchanged.
    computing : float
        Seconds that the program spent on its own before ``ready(layer)`` and ``wait(layer)``, since
        its call before, for any layer: with ``waiting``, all layers' sum is the time of the loop.
        The layer that is ready first in the backward pass has what lies before it, too.
    queued : float
        Seconds from its gradient being ready to the beginning of its bucket's exchange: for the
        other layers of the bucket, and on a GPU for the stream that computes the gradient.
    exchanging : float
        Seconds from there until this rank saw that the exchange had ended.
    waiting : float
        Seconds in ``wait(layer)``.
    """

    exchanges: int = 0
    computing: float = 0.0
    queued: float = 0.0
    exchanging: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one rank since it joined, or between two moments.

    Attributes
    ----------
    peers : tuple of Traffic
        By rank. The own rank's entry has one-sided operations on this rank's own memory.
    registrations : int
        How often memory was registered with the transport: segments made or bound here, those of
        the library among them. It stays the same in a loop that only moves data.
    waits : Mapping of str to Waits
        By cause: "notification"; "queue", for requests to complete; "queue_full", for the transport
        to take one, or to connect; "barrier"; "collective", of a group and without a plan, such as
        the making of a segment; "plan", for collectives and layers that plans exchange; "passive";
        "atomic".
    losses : int
        Peers whose loss this rank has noticed: they died, stopped or failed.
    layers : Mapping of (int, int) to LayerTimes
        By exchange, numbered in the order in which this context made them, and by layer. An
        exchange that was closed has no entries.
    """

    peers: tuple[Traffic, ...]
    registrations: int
    waits: Mapping[str, Waits] = field(default_factory=dict)
    losses: int = 0
    layers: Mapping[tuple[int, int], LayerTimes] = field(default_factory=dict)

    @property
    def total(self) -> Traffic:
        """The traffic with all ranks."""
        return sum(self.peers, Traffic())

    def __sub__(self, before: Counters) -> Counters:
        """Return what was counted after ``before``, of the same context."""
        return Counters(
            tuple(a - b for a, b in zip(self.peers, before.peers, strict=True)),
            self.registrations - before.registrations,
            {cause: each - before.waits.get(cause, Waits()) for cause, each in self.waits.items()},
            self.losses - before.losses,
            {at: each - before.layers.get(at, LayerTimes()) for at, each in self.layers.items()},
        )

    def __str__(self) -> str:
        total = self.total
        waits = sum(self.waits.values(), Waits())
        return (
            f"written: {total.bytes_written} bytes in {total.messages_written} messages; read: "
            f"{total.bytes_read} bytes in {total.messages_read}; notifications: "
            f"{total.notifications}; registrations: {self.registrations}; waits: {waits.number} "
            f"in {waits.seconds:.3g} s; losses: {self.losses}"
        )
