"""The traffic of one rank since it joined, by peer."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
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

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Counters:
    """The traffic of one rank, and its registrations, since it joined or between two moments.

    Attributes
    ----------
    peers : tuple of Traffic
        By rank. The own rank's entry has one-sided operations on this rank's own memory.
    registrations : int
        How often memory was registered with the transport: segments made or bound here, those of
        the library among them. It stays the same in a loop that only moves data.
    """

    peers: tuple[Traffic, ...]
    registrations: int

    @property
    def total(self) -> Traffic:
        """The traffic with all ranks."""
        return sum(self.peers, Traffic())

    def __sub__(self, before: Counters) -> Counters:
        """Return what came after ``before``, of the same context."""
        peers = tuple(a - b for a, b in zip(self.peers, before.peers, strict=True))
        return Counters(peers, self.registrations - before.registrations)

    def __str__(self) -> str:
        total = self.total
        return (
            f"written: {total.bytes_written} bytes in {total.messages_written} messages; read: "
            f"{total.bytes_read} bytes in {total.messages_read}; notifications: "
            f"{total.notifications}; registrations: {self.registrations}"
        )
