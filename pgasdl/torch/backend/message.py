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
    """One message to be sent or received."""

    peer: int | None  # the other member's place in the group; None: any, until it is known
    tag: int
    memory: Bytes
    moved: int = 0  # bytes so far
    over: bool = False  # all bytes were moved, or never will be: the caller may use the memory
    error: Exception | None = None  # why they never will be
    ended: Callable[[], None] | None = None  # called when the message is over

    def end(self, error: Exception | None = None) -> None:
        """Note that it is done, or, with an error, that it never will be."""
        if not self.over:
            self.error, self.over = error, True
            ended, self.ended = self.ended, None  # it holds what holds this message
            if ended is not None:
                ended()


@dataclass(eq=False, slots=True)
class Arrival:
    """A message that comes in."""

    tag: int
    memory: Bytes  # the receiver's, or a copy if no receive has asked for the message yet
    moved: int = 0
    receiver: Message | None = None  # the receive that asked for it


@dataclass(eq=False, slots=True)
class Peer:
    """The direction to a member, and the direction from it."""

    sending: deque[Message] = field(default_factory=deque)  # in the order of the calls
    n_sent: int = 0  # slots filled so far
    free: set[int] = field(default_factory=lambda: set(range(SLOTS)))  # their credits have come
    n_taken: int = 0  # slots emptied so far
    raised: set[int] = field(default_factory=set)  # full slots
    arrivals: list[Arrival] = field(default_factory=list)  # begun, and not received yet
