"""The calls of ``ctx.allreduce`` in one group: which executions make a call, and their memory.

Pairwise collectives, if the group makes any, share their workspace and their numbers: a rank that
makes one is told of a rank that makes the other. How far a call is, and whether one was
interrupted, the core knows: native/python/allreduce_calls.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from pgasdl import _native
from pgasdl._native import BufferAccess
from pgasdl.buffers import Memory, aligned, memory_of
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind, options_for
from pgasdl.collectives.operators import kind_of, reduction_of
from pgasdl.collectives.pairwise import PairwiseCalls, notifications
from pgasdl.collectives.placement import Place, place_of_call, staged_by_gpus, staged_bytes
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.selection import automatic, select, works_anywhere
from pgasdl.collectives.state import CollectiveState, Steps
from pgasdl.collectives.workspace import Workspace
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, Case, spec_of
from pgasdl.plans.pieces import ArrayPlan, build_array, pieces_of
from pgasdl.segment import Segment

# Runs everywhere: by it ranks notice that others do not make the same workspace.
_USUAL = "gdraa"
# Pieces of an array on a GPU in one execution.
_COPIED_AT_ONCE = 8
# Workspaces on the host of arrays on GPUs: those that are copied there, and those that GPUs stage
# there, piece by piece. Others are named by the GPU.
_COPIES, _STAGED = -1, -2


class AllreduceRequest(NamedTuple):
    """One call: the array, the operator, the plan, and how that gets at the array."""

    place: Place
    op: str
    choice: Choice
    access: BufferAccess

    @property
    def room(self) -> int | None:
        """The workspace that it needs."""
        if not self.place.by_host:
            return self.place.device
        return _COPIES if self.access == BufferAccess.COPIED else _STAGED

    @property
    def whole(self) -> bool:
        """One execution reduces it all where it lies, in a segment."""
        mapped = PLANS[self.choice.plan].works_on == "mapped"
        return mapped and self.access != BufferAccess.COPIED

    @property
    def in_pool(self) -> bool:
        """It is looked up in the pool."""
        return self.whole and self.access == BufferAccess.REBASED

    def describe(self) -> str:
        """Name the call, for messages."""
        memory, name = self.place.memory, self.choice.plan
        return f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {self.op}, {name}"


class GroupAllreduce:
    """The allreduces of one group, one after another.

    Every execution has a number: the generation that its notifications carry. Their tag says what
    is executed. Each plan has its own region of notifications. A call that waits looks at all
    regions, so it notices at once a rank that executes something else under the same number.

    The notifications are those of the workspace on the host, whatever a plan works on.

    Attributes
    ----------
    pairwise : PairwiseCalls or None
        The pairwise collectives, if the group makes any.
    """

    REGION = 1 << 12
    REGIONS = 16
    MOST_BOUND = 1024  # with some 7 KB for two ranks, 27 KB for four

    def __init__(
        self, state: CollectiveState, group: Group, *, with_pairwise: bool = False
    ) -> None:
        self.group = group
        self.pairwise: PairwiseCalls | None = None
        self._with_pairwise = with_pairwise
        self._state = state
        self._workspaces: dict[int | None, Workspace] = {}
        # By the ids of the pool's segments; of none: of arrays anywhere.
        self._directories: dict[tuple[int, ...], _native.Directory] = {}
        self._regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], _native.Execution] = {}
        # The segments of what is bound to one of their arrays.
        self._homes: dict[tuple[Any, ...], weakref.ref[Segment]] = {}
        self._longests: dict[tuple[Any, ...], int] = {}
        # Arrays that some rank had outside the pool, the same on all ranks.
        self._outside: set[tuple[int, int, int]] = set()

    def begin(self, timeout: float) -> Self:
        """Make the workspace on the host. Collective."""
        segments, group, too = self._state.segments, self.group, self._with_pairwise
        self._first = notifications(group) if too else 0  # of the regions
        flags = self._first + self.REGION * self.REGIONS
        on_host = Workspace(segments, group, None, flags + group.size, timeout, with_pairwise=too)
        self._workspaces[None] = on_host
        self._numbers = numbers = _native.Numbering(
            on_host.segment, 0, flags, exclusive=True, region=self.REGION
        )
        self.calls = _native.AllreduceCalls(numbers)
        if too:
            inbox = on_host.pairwise_inbox
            self.pairwise = PairwiseCalls(group, on_host.segment, inbox, numbers)
        return self

    def request(self, memory: Memory, op: str, plan: str | None) -> AllreduceRequest:
        """Choose the plan of a call, and refuse one that cannot run here."""
        state, group, kind = self._state, self.group, kind_of(op)
        place = place_of_call(state, group, memory, self._outside, named=plan is not None)
        staged = None
        if plan is None and place.by_host:
            item = memory.dtype.itemsize
            staged = staged_by_gpus(group, kind, memory.nbytes, item, state.gpu_piece)
        if staged is not None:
            return AllreduceRequest(place, op, staged, BufferAccess.REBASED)
        if plan is not None:
            choice = Choice(plan)
        elif place.by_host:  # the copy is for plans that map nothing and send from a segment
            members = replace(group.members, mapped=False, registers=True)
            case = Case(members, kind, memory.nbytes, in_segments=False)
            in_pieces = memory.nbytes > state.gpu_piece  # one is copied while another travels
            choice = automatic(case, shares=True, by_element=in_pieces)
        else:
            choice = select(
                state.policy,
                group,
                kind,
                memory.nbytes,
                in_place=place.reached,
                on_gpu=place.on_gpu,
                readable=place.readable and not place.homes,
                shares=True,
            )
        name, spec = choice.plan, spec_of(choice.plan)
        if kind not in spec.kinds:
            raise PlanError(f"plan {name} offers {', '.join(spec.kinds)}, no {kind}")
        if not spec.shares:
            raise PlanError(
                f"plan {name} cannot share its inbox between arrays: use a handle, "
                "ctx.allreduce_handle"
            )
        if place.by_host and spec.mapped:
            raise PlanError(
                f"plan {name} cannot work on a copy in the workspace, which an array on a GPU "
                "needs on this transport: use gdraa, or a handle"
            )
        if spec.works_on == "private" and place.on_gpu and not place.by_host:
            raise PlanError(f"plan {name} is for arrays of the host: use gdraa-direct, or a handle")
        if spec.works_on == "private" and not works_anywhere(name, group.members):
            raise PlanError(
                f"plan {name} is for transports that map nothing and send from any memory: use "
                "gdraa, or a handle"
            )
        return AllreduceRequest(place, op, choice, place.access(name, group))

    def has_room(self, request: AllreduceRequest) -> bool:
        """Whether the workspace that it needs is there."""
        return request.room in self._workspaces

    def run(
        self,
        array: Any,
        memory: Memory,
        op: str,
        plan: str | None,
        limit: float,
        stream: int | None,
    ) -> None:
        """Run a new call, or the rest of one that a Timeout or Ctrl-C interrupted.

        ``stream`` : handle of the stream that orders it, of an array on a GPU
        """
        deadline = time.monotonic() + limit
        self._numbers.enter("ctx.allreduce")
        try:
            while True:
                self._notice_declined()
                request = self.request(memory, op, plan)
                if not self.has_room(request):
                    self._make_room(request, limit)
                call = (memory.address, memory.nbytes, op, request.choice.plan, memory.count)
                self.calls.admit(call)  # binding changes what must be the same on all ranks
                parts = self._parts(request)
                if self.calls.make(array, memory.address, call, parts, limit, stream):
                    break
                limit = max(0.0, deadline - time.monotonic())
            if parts and stream is None:
                self.calls.remember(array, op, plan)
        finally:
            self._numbers.leave()

    def _notice_declined(self) -> None:
        """Look in the pool no more for arrays like that of a declined call, until it grows."""
        declined = self.calls.take_declined()
        if declined is None:
            return
        if len(self._outside) >= self.MOST_BOUND:
            self._outside.clear()
        pool = self._state.segments.pooled(self.group)
        self._outside.add((len(pool), declined[1], declined[-1]))

    def _make_room(self, request: AllreduceRequest, limit: float) -> None:
        """Make the workspace for arrays on GPUs, in the first call that needs it. Collective.

        An execution comes before it, by which a rank is noticed that has its array on the host.
        """
        state, group = self._state, self.group
        by_host = request.place.by_host
        with Steps(state.unfinished, group, request.describe(), limit) as steps:
            what = "making room for copies" if by_host else "making room on a GPU"
            steps(lambda: self._agree(what, steps.left))
            copied = staged = 0
            if request.room == _COPIES:  # several pieces, of which one is copied at a time
                copied = aligned(_COPIED_AT_ONCE * state.gpu_piece)
            elif by_host:
                staged = PLANS[request.choice.plan].inbox_pieces * staged_bytes(state.gpu_piece)
            device = request.place.device
            room = steps(
                lambda: Workspace(state.segments, group, device, 0, steps.left, copied, staged)
            )
            if by_host:
                room.segment.pin(request.place.memory.device)
            self._workspaces[request.room] = room

    def _agree(self, what: str, limit: float) -> None:
        """Run an execution of our own, by which ranks notice that others do not do ``what``."""
        scratch = np.zeros(1, np.float32)
        place = Place(memory_of(scratch), None)
        agreed = AllreduceRequest(place, "sum", Choice(_USUAL), BufferAccess.COPIED)
        options = options_for(self.group, _USUAL, "float32")
        self.calls.admit((what,))
        parts = [(self._execution(agreed, 1, options, what), scratch.nbytes)]
        self.calls.make(scratch, place.memory.address, (what,), parts, limit, None)

    def _parts(self, request: AllreduceRequest) -> list[tuple[_native.Execution, int]]:
        """Return the executions that make a call, one after another, and the bytes of each."""
        memory, name = request.place.memory, request.choice.plan
        here = options_for(self.group, name, memory.native_dtype, device=request.place.device)
        options = {**here, **dict(request.choice.options)}
        longest = memory.count if request.whole else self._longest(request, options)
        parts = []
        for begin in range(0, memory.count, max(1, longest)):
            count = min(longest, memory.count - begin)
            execution = self._execution(request, count, options)
            parts.append((execution, count * memory.dtype.itemsize))
        return parts

    def _longest(self, request: AllreduceRequest, options: dict[str, Any]) -> int:
        """Return the elements of one execution, as ids or memory admit."""
        spec, item = PLANS[request.choice.plan], request.place.memory.dtype.itemsize
        if spec.longest is not None and request.access == BufferAccess.REBASED:
            return spec.longest(int(options["piece"]), self.group.size, self.REGION)
        key = request.room, spec.name, item, *options.items()
        if key not in self._longests:
            # Reduce the count until the plan's inbox fits into its part of the workspace.
            workspace = self._workspaces[request.room]
            count = workspace.copy_bytes // item // 64 * 64
            limit = workspace.inbox_bytes // item // 64 * 64
            while (needed := self._inbox(request, count, options)) > limit and count > 64:
                count = max(64, count * limit // needed // 64 * 64)
            self._longests[key] = count
        return self._longests[key]

    def _inbox(self, request: AllreduceRequest, count: int, options: dict[str, Any]) -> int:
        """Return the elements of a plan's inbox, for ``count`` elements of an array."""
        return self._build(request, count, options).first.buffers.get("inbox", 0)

    def _build(self, request: AllreduceRequest, count: int, options: dict[str, Any]) -> ArrayPlan:
        """Build the plan for ``count`` elements, in the pieces in which they are copied.

        They stay whole where pieces would take more notifications than a plan has here.
        """
        name, kind = request.choice.plan, kind_of(request.op)
        pieces: tuple[int, ...] = (count,)
        if request.place.by_host and request.access == BufferAccess.COPIED:
            piece = self._state.gpu_piece // request.place.memory.dtype.itemsize
            pieces = pieces_of(spec_of(name), kind, count, piece)
        for each in (pieces, (count,)):
            plan = build_array(
                name, self.group.rank, self.group.members, each, kind=kind, **options
            )
            needed = plan.first.notifications
            if needed <= self.REGION:
                return plan
        raise PlanError(f"plan {name} needs {needed} notifications; use a handle")

    def _execution(
        self, request: AllreduceRequest, count: int, options: dict[str, Any], what: str = ""
    ) -> _native.Execution:
        """Return what runs ``count`` elements of the array, bound at its first use."""
        place, name = request.place, request.choice.plan
        memory = place.memory
        # The key identifies an execution. It is equal on all ranks: their tags are made of it.
        key: tuple[Any, ...] = (
            *(name, memory.native_dtype, count, request.op, memory.count),
            *options.items(),
        )
        if what:
            key = *key, what
        if place.on_gpu:
            key = *key, "GPU", self._state.gpu_piece if place.by_host else 0
        if request.in_pool:
            key = *key, "pool", len(place.pool)
        elif request.whole:
            key = *key, place.homes[self.group.rank][0].id, place.homes[self.group.rank][1]
        found = self._bound.get((memory.device, *key))
        if found is not None:
            return found
        region = self._regions.get(name, len(self._regions))
        if region >= self.REGIONS:
            raise PlanError(f"ctx.allreduce takes {self.REGIONS} different plans; use a handle")
        plan = self._build(request, count, options)
        nbytes = count * memory.dtype.itemsize
        workspace = self._workspaces[request.room]
        own = workspace.inboxes.get(name)
        directory = None
        if request.access == BufferAccess.REBASED and own is None:
            directory = self._directory(place.pool if request.in_pool else ())
        copy = workspace.segment, workspace.copy
        buffers = {
            "data": place.data(request.access, self.group, nbytes, copy, directory),
            "inbox": PlanBuffer(
                workspace.segment, workspace.inbox if own is None else own, memory.native_dtype
            ),
        }
        tags = Tags(self._numbers, self._first + region * self.REGION, str(key))
        device = -1 if memory.device is None else memory.device
        access = ArrayAccess(request.access, device=device)
        execution = bind(self.group, plan, buffers, tags, access, reduction_of(request.op))
        self._regions[name] = region
        self._make_place()
        self._bound[memory.device, *key] = execution
        if request.access == BufferAccess.IN_PLACE:
            self._homes[memory.device, *key] = weakref.ref(place.homes[self.group.rank][0])
        return execution

    def _make_place(self) -> None:
        """Give up the older half of much that is bound: ever new sizes must not fill the memory."""
        if len(self._bound) >= self.MOST_BOUND:
            self.calls.forget()
            for key in list(self._bound)[: self.MOST_BOUND // 2]:
                del self._bound[key]
                self._homes.pop(key, None)

    def _directory(self, pool: tuple[Segment, ...]) -> _native.Directory:
        """Return where members tell where their arrays are: in the pool, or, without, anywhere."""
        homes = tuple(segment.id for segment in pool)
        if homes not in self._directories:
            workspace = self._workspaces[None]
            made = _native.Directory(workspace.segment, workspace.entry, list(pool))
            self._directories[homes] = made
        return self._directories[homes]

    def forget(self) -> None:
        """Forget where arrays lie, and give up what is bound to arrays of segments that are gone.

        It would keep their memory.
        """
        self.calls.forget()
        for key, home in list(self._homes.items()):
            segment = home()
            if segment is None or segment.deleted:
                self._homes.pop(key, None)
                self._bound.pop(key, None)

    def close(self) -> None:
        """Give up the executions and, unless peers may still write there, the workspaces."""
        broken = self._numbers.under_way or self._numbers.failed
        if self.pairwise is not None:
            self.pairwise.close()
        self.calls.forget()
        self._bound.clear()
        self._directories.clear()
        if self.group.mapped or not broken:
            for workspace in self._workspaces.values():
                workspace.segment.close()

    def describe(self) -> str:
        """One line."""
        nbytes = sum(workspace.segment.nbytes for workspace in self._workspaces.values())
        n_bound, plans = len(self._bound), list(self._regions)
        if self.pairwise is not None:
            n_bound += self.pairwise.n_bound
            plans.append("pairwise")
        read = self.group.unreadable
        elsewhere = f"peers cannot read them ({read})" if read else "peers can read them"
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{n_bound} signatures, plans {', '.join(plans) or 'none'}; "
            f"workspace {nbytes} bytes; arrays outside segments: {elsewhere}"
        )
