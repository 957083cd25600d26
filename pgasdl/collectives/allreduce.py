"""``ctx.allreduce``: the calls of each group. The first call makes the group's workspace.

All calls of a group share one numbering, so a rank that brings an array on the host notices a rank
that brings one on a GPU. Where no host takes part, a stream does an allreduce on a GPU, and no call
waits: see native/executor/stream_steps.cpp. Else the call waits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import numpy as np

from pgasdl import _native
from pgasdl._native import BufferAccess
from pgasdl.buffers import Memory, aligned, memory_of
from pgasdl.collectives.bound import (
    Place,
    checked,
    choose,
    kind_of,
    on_gpu,
    options_for,
    reduction_of,
    staged_bytes,
    works_anywhere,
)
from pgasdl.collectives.pairwise import PairwiseCalls, notifications
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.state import CollectiveState
from pgasdl.collectives.workspace import (
    COPIES,
    MOST_BOUND,
    REGION,
    REGIONS,
    STAGED,
    AllreduceRequest,
    Executions,
    Workspace,
)
from pgasdl.device.streams import stream_handle
from pgasdl.errors import BufferRefusedError, MismatchError, PlanError
from pgasdl.group import Group, Steps
from pgasdl.plans import PLANS, spec_of
from pgasdl.plans.algorithms.blocks import ALIGN

# Runs everywhere: in its execution ranks notice that others make another workspace.
_USUAL = "gdraa"
# Pieces of an array on a GPU in one execution.
_COPIED_AT_ONCE = 8
# From so many bytes on an array of the pool is faster in place. Each execution announces its place.
_LEAST_IN_POOL = 4096
_Allreduce = TypeVar("_Allreduce", bound=Callable[..., Any])


def repeated(allreduce: _Allreduce) -> _Allreduce:
    """Decorate ``Context.allreduce``: the core itself runs a call that it remembers."""
    made: Any = _native.repeated(allreduce)
    return cast(_Allreduce, functools.wraps(allreduce)(made))


class GroupAllreduce:
    """The allreduces of one group, one after another: see :mod:`pgasdl.collectives.workspace`.

    The group's pairwise collectives share its workspace and its numbers: if one rank runs an
    allreduce and another a pairwise collective, both get an error. The core knows how far a call
    is, and whether one was interrupted: native/executor/repeated_calls.
    """

    def __init__(
        self, state: CollectiveState, group: Group, *, with_pairwise: bool = False
    ) -> None:
        self.group = group
        self.pairwise: PairwiseCalls | None = None
        self._with_pairwise = with_pairwise
        self._state = state
        self._workspaces: dict[int | None, Workspace] = {}
        # Arrays that some rank had outside the pool, the same on all ranks: segments of the pool,
        # bytes, elements.
        self._outside: set[tuple[int, int, int]] = set()

    @property
    def what(self) -> str:
        """The collectives that have its workspace."""
        return "pairwise collective" if self._with_pairwise else "allreduce"

    def begin(self, timeout: float) -> Self:
        """Make the workspace on the host. Collective."""
        segments, group, too = self._state.segments, self.group, self._with_pairwise
        first = notifications(group) if too else 0  # of the regions
        flags = first + REGION * REGIONS
        on_host = Workspace(segments, group, None, flags + group.size, timeout, with_pairwise=too)
        self._workspaces[None] = on_host
        self._numbers = numbers = _native.Numbering(
            on_host.segment, 0, flags, exclusive=True, region=REGION
        )
        self.calls = calls = _native.AllreduceCalls(numbers)
        self._executions = Executions(self._state, group, self._workspaces, numbers, calls, first)
        if too:
            inbox = on_host.pairwise_inbox
            self.pairwise = PairwiseCalls(group, on_host.segment, inbox, numbers)
        return self

    def place(self, memory: Memory, plan: str | None) -> Place:
        """Place the array of a call, in which members do not exchange where their arrays lie.

        An array in a segment lies there on all ranks. In the pool it may lie at another place on
        each rank, or elsewhere. If the call chooses the plan, each member reduces a block on the
        host, so each sees where all arrays lie. On a GPU nobody waits to see it.
        """
        state, group, named = self._state, self.group, plan is not None
        if memory.device is not None and state.place_on(memory.device) is None:
            return Place(memory, None)
        segment, offset = state.segments.at(memory)
        if segment is not None and not segment.pooled:
            homes = ((segment, offset),) * group.size if group.mapped else ()
            return Place(memory, memory.device, homes)
        pool = state.segments.pooled(group) if group.mapped else []
        if named or memory.device is not None:
            in_pool = segment in pool and (named or memory.nbytes >= _LEAST_IN_POOL)
        else:
            in_pool = (
                memory.nbytes >= _LEAST_IN_POOL
                and memory.count >= ALIGN * group.size
                and any(part.device == "cpu" for part in pool)
                and (len(pool), memory.nbytes, memory.count) not in self._outside
            )
        return Place(memory, memory.device, pool=tuple(pool) if in_pool else ())

    def require(self, place: Place, op: str, plan: str) -> None:
        """Raise PlanError if a plan cannot take turns here, on the array of a call."""
        kind, spec = kind_of(op), spec_of(plan)
        if kind not in spec.kinds:
            raise PlanError(f"plan {plan} offers {', '.join(spec.kinds)}, no {kind}")
        if not spec.shares:
            raise PlanError(
                f"plan {plan} cannot share its inbox between arrays: use a handle, "
                "ctx.allreduce_handle"
            )
        if place.by_host and spec.mapped:
            raise PlanError(
                f"plan {plan} cannot work on a copy in the workspace, which an array on a GPU "
                "needs on this transport: use gdraa, or a handle"
            )
        if spec.works_on == "private" and place.on_gpu and not place.by_host:
            raise PlanError(f"plan {plan} is for arrays of the host: use gdraa-direct, or a handle")
        if spec.works_on == "private" and not works_anywhere(plan, self.group.members):
            raise PlanError(
                f"plan {plan} is for transports that map nothing and send from any memory: use "
                "gdraa, or a handle"
            )

    def request(self, memory: Memory, op: str, plan: str | None) -> AllreduceRequest:
        """Choose the plan of a call, and refuse one that cannot run here."""
        place = self.place(memory, plan)
        if plan is not None:
            self.require(place, op, plan)
        state, kind = self._state, kind_of(op)
        choice, access = choose(state, self.group, kind, place, plan, shares=True)
        request = AllreduceRequest(place, op, choice, access)
        if plan is None and state.policy.rules and request.room != STAGED:  # a policy named it
            self.require(place, op, choice.plan)
        return request

    def run(
        self,
        array: Any,
        memory: Memory,
        op: str,
        plan: str | None,
        limit: float,
        stream: int | None,
    ) -> None:
        """Run a call, or the rest of an interrupted one; on a GPU ``stream`` orders it."""
        deadline = time.monotonic() + limit
        self._numbers.enter("ctx.allreduce")
        try:
            while True:
                self._notice_declined()
                request = self.request(memory, op, plan)
                if request.room not in self._workspaces:
                    if stream is not None:
                        _native.refuse_capture(on_gpu(memory), stream, "a collective")
                    self._make_room(request, limit)
                call = (memory.address, memory.nbytes, op, request.choice.plan, memory.count)
                self.calls.admit(call)  # binding changes what must be the same on all ranks
                parts = self._executions.parts(request)
                if self.calls.make(array, memory.address, call, parts, limit, stream):
                    break
                limit = max(0.0, deadline - time.monotonic())
            if parts and stream is None:
                self.calls.remember(array, op, plan)
        finally:
            self._numbers.leave()

    def enter(self, what: str) -> None:
        """Raise MismatchError if another thread is in a call of this group."""
        self._numbers.enter(what)

    def leave(self) -> None:
        """Let the next call in."""
        self._numbers.leave()

    def _notice_declined(self) -> None:
        """Stop looking in the pool for arrays like that of a declined call, until it grows."""
        declined = self.calls.take_declined()
        if declined is None:
            return
        if len(self._outside) >= MOST_BOUND:
            self._outside.clear()
        pool = self._state.segments.pooled(self.group)
        self._outside.add((len(pool), declined[1], declined[-1]))

    def _make_room(self, request: AllreduceRequest, limit: float) -> None:
        """Make the workspace for arrays on GPUs, in the first call that needs it. Collective.

        An execution runs first: it reveals a rank whose array is on the host.
        """
        state, group, place = self._state, self.group, request.place
        memory, by_host = place.memory, place.by_host
        call = (
            f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {request.op}, "
            f"{request.choice.plan}"
        )
        with Steps(state.unfinished, group, call, limit) as steps:
            what = "making room for copies" if by_host else "making room on a GPU"
            steps(lambda: self._agree(what, steps.left))
            copied = staged = 0
            if request.room == COPIES:  # several pieces; one is copied at a time
                copied = aligned(_COPIED_AT_ONCE * state.gpu_piece)
            elif by_host:
                staged = PLANS[request.choice.plan].inbox_pieces * staged_bytes(state.gpu_piece)
            room = steps(
                lambda: Workspace(
                    state.segments, group, place.device, 0, steps.left, copied, staged
                )
            )
            if by_host:
                room.segment.pin(memory.device)
            self._workspaces[request.room] = room

    def _agree(self, what: str, limit: float) -> None:
        """Run a small execution: ranks notice there that another one does not do ``what``."""
        scratch = np.zeros(1, np.float32)
        place = Place(memory_of(scratch), None)
        agreed = AllreduceRequest(place, "sum", Choice(_USUAL), BufferAccess.COPIED)
        options = options_for(self.group, _USUAL, "float32")
        self.calls.admit((what,))
        parts = [(self._executions.execution(agreed, 1, options, what), scratch.nbytes)]
        self.calls.make(scratch, place.memory.address, (what,), parts, limit, None)

    def forget(self) -> None:
        """Forget where arrays lie."""
        self._executions.forget()

    def close(self) -> None:
        """Release the executions and, unless peers may still write there, the workspaces."""
        broken = self._numbers.under_way or self._numbers.failed
        if self.pairwise is not None:
            self.pairwise.close()
        self._executions.close()
        if self.group.mapped or not broken:
            for workspace in self._workspaces.values():
                workspace.segment.close()

    def describe(self) -> str:
        """Return one line for a log."""
        nbytes = sum(workspace.segment.nbytes for workspace in self._workspaces.values())
        n_bound, plans = len(self._executions), list(self._executions.regions)
        if self.pairwise is not None:
            n_bound += self.pairwise.n_bound
            plans.append("pairwise")
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{n_bound} signatures, plans {', '.join(plans) or 'none'}; "
            f"workspace {nbytes} bytes"
        )


class Allreduces:
    """The calls of ``ctx.allreduce``, by group; the core itself looks up those of ``world``."""

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
        """Run one call. The same call continues it after an interruption."""
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
            raise BufferRefusedError(
                "a stream orders an allreduce on a GPU; this array is the host's"
            )
        handle = None if memory.device is None else stream_handle(stream, memory.device)
        made = known or GroupAllreduce(self._state, group)
        if known is None:  # a refused call makes nothing
            made.request(memory, op, plan)
            if handle is not None:
                _native.refuse_capture(on_gpu(memory), handle, "a collective")
            call = (
                f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {op}, plan {plan}"
            )
            made = self._begin(made, call, limit)
            limit = max(0.0, deadline - time.monotonic())
        made.run(array, memory, op, plan, limit, handle)

    def begin_pairwise(self, group: Group, timeout: float) -> GroupAllreduce:
        """Make the workspace of a group that makes pairwise collectives, too. Collective."""
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
                    # Members that make another workspace, or a segment, would take it for this one.
                    steps(lambda: group.allgather(f"the first {made.what}", b"", steps.left))
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
        """Release a group's executions and their memory: the group is deleted."""
        made = self._groups.pop(group, None)
        self._state.unfinished.pop(group, None)
        if made is not None:
            made.close()

    def clear(self) -> None:
        """Release all executions and their memory: the context is closed."""
        for made in self._groups.values():
            made.close()
        self._groups.clear()

    def describe(self) -> list[str]:
        """Return one line for each group."""
        return [made.describe() for made in self._groups.values()]
