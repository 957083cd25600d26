"""A message, and another member, as they are known while messages are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SLOTS = 4  # of a ring


@dataclass(eq=False, slots=True)
class Message:
    """One message to be sent or received.

    Attributes
    ----------
    peer : int or None
        The other member's place in the group; None: any, until it is known.
    tag : int
        The tag that a receiver asks for.
    memory : ndarray
        Its bytes.
    moved : int
        How many were moved so far.
    over : bool
        All were moved, or never will be: the memory is the caller's again.
    error : Exception or None
        Why they never will be.
    ended : Callable[[], None] or None
        Called when it is over.
    """

    peer: int | None
    tag: int
    memory: Bytes
    moved: int = 0
    over: bool = False
    error: Exception | None = None
    ended: Callable[[], None] | None = None

    def end(self, error: Exception | None = None) -> None:
        """Note that it is done, or, with an error, that it never will be."""
        if not self.over:
            self.error, self.over = error, True
            if self.ended is not None:
                self.ended()


@dataclass(eq=False, slots=True)
class Arrival:
    """A message that comes in.

    Attributes
    ----------
    memory : ndarray
        Where its bytes go: the receiver's, or a copy if nobody asked for it yet.
    receiver : Message or None
        The receive that asked for it.
    """

    tag: int
    memory: Bytes
    moved: int = 0
    receiver: Message | None = None


@dataclass(eq=False, slots=True)
class Peer:
    """One direction to, and one from, a member.

    Attributes
    ----------
    sending : deque[Message]
        In their order.
    n_sent : int
        Slots filled so far.
    free : set[int]
        Slots that may be filled: their credits are here.
    n_taken : int
        Slots emptied so far.
    raised : set[int]
        Slots that are full.
    arrivals : list[Arrival]
        Messages that began to come, and were not received.
    """

    sending: deque[Message] = field(default_factory=deque)
    n_sent: int = 0
    free: set[int] = field(default_factory=lambda: set(range(SLOTS)))
    n_taken: int = 0
    raised: set[int] = field(default_factory=set)
    arrivals: list[Arrival] = field(default_factory=list)
