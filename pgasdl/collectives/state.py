"""The state that all collectives of a context share: segments, unfinished calls, and answers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

from pgasdl import _native
from pgasdl.collectives.policy import Policy
from pgasdl.counters import LayerTimes
from pgasdl.errors import PlanError
from pgasdl.group import Group, Unfinished
from pgasdl.segment import SegmentTable

_Kept = TypeVar("_Kept")


class Server(Protocol):
    """Answers the calls of its plans, such as an owner's update."""

    def serve(self, call: _native.Call) -> bool:
        """Take ``call`` if it is one of its own, and answer it, now or later."""
        ...

    def describe(self) -> str:
        """Return one line for a log."""
        ...

    @property
    def number(self) -> int:
        """Its number among all that this context has made."""
        ...

    @property
    def times(self) -> list[LayerTimes]:
        """The cost of each of its layers."""
        ...


@dataclass(eq=False)
class CollectiveState:
    """The state that all collectives of a context share.

    ``policy`` : which plan for which size; may be empty
    ``gpu_piece`` : bytes of a piece that is copied while others travel
    ``unfinished`` : the steps that interrupted calls have made; :class:`Steps` keeps it
    ``servers``, ``numbers`` : gradient exchanges, which answer calls, and the next one's number
    ``abandoned`` : arrays of the pool whose handles were closed under way: others may write there
    ``belongings`` : objects that rooms above keep for groups and that ``close()`` ends, by type
    """

    core: _native.ContextCore
    segments: SegmentTable
    policy: Policy
    gpu_piece: int
    unfinished: Unfinished = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    abandoned: list[object] = field(default_factory=list)
    belongings: dict[tuple[Group, type], Any] = field(default_factory=dict)

    def place_on(self, device: int | None) -> int | None:
        """Return the GPU that plans work on for an array there; None: on the host.

        They do where peers reach its memory: mapped, or by an adapter.
        """
        return None if device is None or self.core._why_unreached(device) else device

    def belonging(self, group: Group, kind: type[_Kept], make: Callable[[], _Kept]) -> _Kept:
        """Return the object of a type that a group has; made at its first use, it ends with it."""
        if (group, kind) not in self.belongings:
            self.belongings[group, kind] = make()
        found: _Kept = self.belongings[group, kind]
        return found

    def drop(self, group: Group) -> None:
        """Release what rooms above keep for a group."""
        for key in [key for key in self.belongings if key[0] == group]:
            self.belongings.pop(key).close()

    def clear(self) -> None:
        """Forget everything: the context is closed.

        NumPy views of segments would keep it in a cycle that is never collected.
        """
        self.unfinished.clear()
        self.servers.clear()
        self.abandoned.clear()
        while self.belongings:
            self.belongings.popitem()[1].close()
        self.segments.kept.clear()


class AnswerCalls:
    """A wait calls this when an update waits for its owner. It keeps no context alive."""

    def __init__(self, state: CollectiveState) -> None:
        self._state = weakref.ref(state)

    def __call__(self) -> None:
        """Hand out every waiting call; PlanError if no server knows one."""
        state = self._state()
        if state is None:
            return
        while (call := _native.take_call(state.core)) is not None:
            if not any(server.serve(call) for server in state.servers):
                raise PlanError(f"nobody answers a call of {call.hook!r}")
