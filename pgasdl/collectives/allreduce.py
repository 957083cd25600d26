"""``ctx.allreduce``: for each group its calls, in the first of which its workspace is made.

All calls of a group are numbered together: a rank that comes with an array on the host, and another
with one on a GPU, notice it. Where no host has a part in it, a stream makes an allreduce on a GPU,
and nobody waits: see native/executor/stream_steps.cpp. Else the call waits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pgasdl import _native
from pgasdl.collectives.group_allreduce import GroupAllreduce
from pgasdl.collectives.operators import checked, kind_of, reduction_of
from pgasdl.collectives.remote_read import agree_on_reading
from pgasdl.collectives.state import CollectiveState, Steps
from pgasdl.device.streams import stream_handle
from pgasdl.errors import BufferRefused, MismatchError
from pgasdl.group import Group

_Allreduce = TypeVar("_Allreduce", bound=Callable[..., Any])


def repeated(allreduce: _Allreduce) -> _Allreduce:
    """Decorate ``Context.allreduce``: a call that was made before does not come to it."""
    made: Any = _native.repeated(allreduce)
    return cast(_Allreduce, functools.wraps(allreduce)(made))


class Allreduces:
    """The calls of ``ctx.allreduce``, by group.

    ``world`` : the group whose calls the core itself looks up; None: of none
    """

    def __init__(self, state: CollectiveState, world: Group | None) -> None:
        self._state = state
        self._groups: dict[Group, GroupAllreduce] = {}
        self._beginning: set[Group] = set()
        self._world = world

    def run(
        self,
        array: Any,
        op: str,
        group: Group,
        plan: str | None,
        timeout: float | None,
        stream: object = None,
    ) -> None:
        """Make one call. An interrupted call is continued by the same call."""
        known = self._groups.get(group)
        if known is not None and known.calls.run(array, op, plan, timeout):
            return
        # A closed or fenced-off context is reported before anything else.
        core = self._state.core
        core._require_peer(core.rank, "allreduce")
        limit = core._seconds(timeout)
        memory = checked(array, kind_of(op), reduction_of(op))
        deadline = time.monotonic() + limit
        if memory.device is None and stream is not None:
            raise BufferRefused("a stream orders an allreduce on a GPU; this array is the host's")
        handle = None if memory.device is None else stream_handle(stream, memory.device)
        made = known or GroupAllreduce(self._state, group)
        if known is None or handle is not None:  # what is refused is so before anything is made
            request = made.request(memory, op, plan)
            if memory.device is not None and handle is not None and not made.has_room(request):
                _native.refuse_capture(memory.device, handle, "a collective")
        if known is None:
            call = (
                f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {op}, plan {plan}"
            )
            made = self._begin(made, call, limit)
            limit = max(0.0, deadline - time.monotonic())
        made.run(array, memory, op, plan, limit, handle)

    def begin_pairwise(self, group: Group, timeout: float) -> GroupAllreduce:
        """Make the workspace of a group that makes pairwise collectives, too. Collective.

        No call of ``ctx.allreduce`` made one before. After a Timeout the same call continues.
        """
        made = GroupAllreduce(self._state, group, with_pairwise=True)
        return self._begin(made, "the first collective of a process group", timeout)

    def _begin(self, made: GroupAllreduce, call: str, limit: float) -> GroupAllreduce:
        """Make a group's workspace, in its first call. Collective."""
        group = made.group
        if group in self._beginning:
            raise MismatchError(
                f"two threads of this rank are in ctx.allreduce of {group} at once: the second was "
                "refused; give each thread a group of its own"
            )
        self._beginning.add(group)
        try:
            if group not in self._groups:
                with Steps(self._state.unfinished, group, call, limit) as steps:
                    agree_on_reading(group, steps)
                    made = steps(lambda: made.begin(steps.left))
                self._groups[group] = made
                if group is self._world:
                    made.calls.serve(self._state.core)
            return self._groups[group]
        finally:
            self._beginning.discard(group)

    def forget(self) -> None:
        """Forget where arrays lie: segments were made or deleted."""
        for made in list(self._groups.values()):
            made.forget()

    def drop(self, group: Group) -> None:
        """Give up a group's executions and their memory: the group is deleted."""
        made = self._groups.pop(group, None)
        self._state.unfinished.pop(group, None)
        if made is not None:
            made.close()

    def clear(self) -> None:
        """Give up all executions and their memory: the context is closed."""
        for made in self._groups.values():
            made.close()
        self._groups.clear()

    def describe(self) -> list[str]:
        """One line per group."""
        return [made.describe() for made in self._groups.values()]
