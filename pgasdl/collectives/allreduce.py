"""The implementation of ``ctx.allreduce``: which plan a call runs, and where it is known already.

Where the array lies decides:

- in a segment that every rank maps: ``gdraa-direct`` reduces it in place; one of the pool may lie
  at another place on each rank, which tells it in each call, or that it lies elsewhere: then none
  is reduced in place;
- elsewhere: ``gdraa-read`` copies from the arrays as they are, where ranks can read each other's
  memory and it is faster; else ``staged`` passes pieces through a mapped workspace and writes the
  result straight into the array; where nothing is mapped but any memory is sent from, ``one-shot``
  (two ranks, few bytes) and ``gdraa-private`` do;
- any other plan: it is copied into the workspace and back.

Arrays on a GPU that lie elsewhere are copied into a workspace there, and back; where peers do not
reach a GPU into the workspace on the host. Where no host has a part in it, a stream makes it, and
nobody waits: see native/exchange/stream_steps.cpp. Else the call waits. All calls of a group are
numbered together: a rank that comes with an array on the host, and another with one on a GPU,
notice it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pgasdl import _native
from pgasdl.buffers import Memory
from pgasdl.collectives.handle import checked, kind_of, reduction_of
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.reading import agree_on_reading
from pgasdl.collectives.resources import Resources, Steps
from pgasdl.collectives.selection import select, works_anywhere
from pgasdl.collectives.sequence import Reduction, Sequence
from pgasdl.device.streams import stream_handle
from pgasdl.errors import BufferRefused, MismatchError, PlanError
from pgasdl.group import Group
from pgasdl.plans import spec_of

_Allreduce = TypeVar("_Allreduce", bound=Callable[..., Any])


def repeated(allreduce: _Allreduce) -> _Allreduce:
    """Decorate ``Context.allreduce``: a call that was made before does not come to it."""
    made: Any = _native.repeated(allreduce)
    return cast(_Allreduce, functools.wraps(allreduce)(made))


class AllreduceCache:
    """For each group its sequence of calls of ``ctx.allreduce``, with their executions."""

    def __init__(self, resources: Resources, world: Group) -> None:
        self._resources = resources
        self._sequences: dict[Group, Sequence] = {}
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
        sequence = self._sequences.get(group)
        if sequence is not None and sequence.calls.run(array, op, plan, timeout):
            return
        # A closed or fenced-off context is reported before anything else.
        core = self._resources.core
        core._require_peer(core.rank, "allreduce")
        limit = core._seconds(timeout)
        memory = checked(array, kind_of(op), reduction_of(op))
        deadline = time.monotonic() + limit
        if sequence is not None and sequence.calls.take_declined():
            sequence.decline(sequence.calls.last)
        if memory.device is None and stream is not None:
            raise BufferRefused("a stream orders an allreduce on a GPU; this array is the host's")
        wanted = self._reduction(memory, op, group, plan)
        handle = None if memory.device is None else stream_handle(stream, memory.device)
        has_room = sequence is not None and sequence.has_room(wanted)
        if memory.device is not None and handle is not None and not has_room:
            _native.refuse_capture(memory.device, handle)  # before anything is made
        if sequence is None:
            call = (
                f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {op}, plan {plan}"
            )
            sequence = self._begin(group, call, limit)
            # Whether peers can read the array is known now.
            wanted = self._reduction(memory, op, group, plan)
        if not sequence.run(array, wanted, plan, limit, handle):
            left = max(0.0, deadline - time.monotonic())
            sequence.run(array, self._reduction(memory, op, group, plan), plan, left, handle)

    def _reduction(self, memory: Memory, op: str, group: Group, plan: str | None) -> Reduction:
        """Choose the plan, and refuse one that cannot run here."""
        segment, offset = self._resources.segments.at(memory)
        shared = segment is not None and not segment.pooled  # it lies there on all ranks
        in_place = segment is not None and group.mapped
        if plan is None and not shared and group in self._sequences:
            in_place = group.mapped and self._sequences[group].in_pool(memory, segment)
        if memory.device is not None and not self._resources.maps_gpus:
            return self._from_host(memory, op, plan)
        if plan is None:
            choice = select(
                self._resources.policy,
                group,
                kind_of(op),
                memory.nbytes,
                in_place=in_place or (memory.device is not None and group.mapped),
                readable=not shared and memory.device is None and group.unreadable == "",
                shares=True,
            )
        else:
            choice = Choice(plan)
        name = choice.plan
        spec = spec_of(name)
        if kind_of(op) not in spec.kinds:
            raise PlanError(f"plan {name} offers {', '.join(spec.kinds)}, no {kind_of(op)}")
        if not spec.shares:
            raise PlanError(
                f"plan {name} cannot share its inbox between arrays: use a handle, "
                "ctx.allreduce_handle"
            )
        private = spec.works_on == "private"
        if spec.works_on == "mapped" and not in_place and memory.device is None:
            raise PlanError(f"plan {name} needs an array in a segment that peers can map")
        if private and memory.device is not None:
            raise PlanError(f"plan {name} is for arrays of the host: use gdraa-direct, or a handle")
        if private and not works_anywhere(name, group.members):
            raise PlanError(
                f"plan {name} is for transports that map nothing and send from any memory: use "
                "gdraa, or a handle"
            )
        if spec.works_on == "readable":
            self._require_readable(name, group, memory)
        if spec.mapped and not group.mapped:
            raise PlanError(f"plan {name} loads and stores peers' memory, which is not mapped here")
        home = segment if in_place else None
        return Reduction(memory, op, choice, home, offset, memory.device)

    def _require_readable(self, name: str, group: Group, memory: Memory) -> None:
        """Refuse an array that peers cannot read where it lies."""
        why = "this array is on a GPU" if memory.device is not None else group.unreadable
        if why:
            raise PlanError(f"plan {name} reads peers' arrays where they lie: {why}")

    def _from_host(self, memory: Memory, op: str, plan: str | None) -> Reduction:
        """Choose the plan for an array on a GPU that works on a copy of it on the host."""
        name = "gdraa" if plan is None else plan
        spec = spec_of(name)
        if kind_of(op) not in spec.kinds or not spec.shares or spec.mapped:
            raise PlanError(
                f"plan {name} cannot work on a copy in the workspace, which an array on a GPU "
                "needs on this transport: use gdraa, or a handle"
            )
        return Reduction(memory, op, Choice(name), None, 0, None)

    def _begin(self, group: Group, call: str, limit: float) -> Sequence:
        """Make a group's workspace, in its first call. Collective."""
        if group in self._beginning:
            raise MismatchError(
                f"two threads of this rank are in ctx.allreduce of {group} at once: the second was "
                "refused; give each thread a group of its own"
            )
        self._beginning.add(group)
        try:
            if group not in self._sequences:
                with Steps(self._resources.unfinished, group, call, limit) as steps:
                    agree_on_reading(group, steps)
                    made = steps(lambda: Sequence(self._resources, group, steps.left))
                self._sequences[group] = made
                if group is self._world:
                    made.calls.serve(self._resources.core)
            return self._sequences[group]
        finally:
            self._beginning.discard(group)

    def forget(self) -> None:
        """Forget where arrays lie: segments were made or deleted."""
        for sequence in list(self._sequences.values()):
            sequence.forget()

    def drop(self, group: Group) -> None:
        """Give up a group's executions and their memory: the group is deleted."""
        sequence = self._sequences.pop(group, None)
        self._resources.unfinished.pop(group, None)
        if sequence is not None:
            sequence.close()

    def clear(self) -> None:
        """Give up all executions and their memory: the context is closed."""
        for sequence in self._sequences.values():
            sequence.calls.forget()
        self._sequences.clear()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(sequence.workspace_bytes for sequence in self._sequences.values())

    def describe(self) -> list[str]:
        """One line per group."""
        return [sequence.describe() for sequence in self._sequences.values()]
