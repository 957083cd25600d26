"""The executions of a group's calls, bound at their first use, and their memory.

Every execution has a number: the generation that its notifications carry. Their tag says what is
executed. Each plan has its own region of notifications. A call that waits looks at all regions, so
it notices at once a rank that executes something else under the same number.

The notifications are those of the workspace on the host, wherever a plan works.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from pgasdl import _native
from pgasdl._native import BufferAccess
from pgasdl.buffers import ALIGNMENT
from pgasdl.collectives import pairwise
from pgasdl.collectives.bound import (
    ArrayAccess,
    Place,
    PlanBuffer,
    Tags,
    bind,
    build,
    kind_of,
    on_gpu,
    options_for,
    piece_bytes,
    reduction_of,
    works_anywhere,
)
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.state import CollectiveState
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, spec_of
from pgasdl.plans.pieces import ArrayPlan, inbox_of, pieces_of
from pgasdl.segment import Segment, SegmentTable

# Workspaces on the host of arrays on GPUs: those that are copied there, and those that GPUs stage
# there, piece by piece. Others are named by the GPU; None: that of the host.
COPIES, STAGED = -1, -2
# Notifications of a plan, and the plans of a group.
REGION = 1 << 12
REGIONS = 16
MOST_BOUND = 1024  # executions, with some 7 KB for two ranks, 27 KB for four


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
        return COPIES if self.access == BufferAccess.COPIED else STAGED

    @property
    def whole(self) -> bool:
        """One execution reduces it all where it lies, in a segment."""
        mapped = PLANS[self.choice.plan].works_on == "mapped"
        return mapped and self.access != BufferAccess.COPIED

    @property
    def in_pool(self) -> bool:
        """It is looked up in the pool."""
        return self.whole and self.access == BufferAccess.REBASED


class Workspace:
    """A segment with inboxes, room for a copy, and the rank's entry in the group's directory.

    Making it is collective. The first calls touch its pages; a temporary would have new pages in
    each call.

    ``device`` : the GPU that it lies on; None: the host
    ``copied`` : bytes of an execution whose array is copied from a GPU and back; 0: of others
    ``staged`` : bytes of an inbox for GPUs that stage arrays; then the workspace has nothing else

    Offsets in it: ``copy``, ``inbox`` (of plans that have none of their own), ``pairwise_inbox``
    and the ``entry`` in the directory; and ``inboxes``, by plan, of those that work on arrays
    wherever they lie: peers may still read them when an execution is over.
    """

    def __init__(
        self,
        segments: SegmentTable,
        group: Group,
        device: int | None,
        notifications: int,
        timeout: float,
        copied: int = 0,
        staged: int = 0,
        *,
        with_pairwise: bool = False,
    ) -> None:
        piece = max(piece_bytes(group.topology, device), copied // 4)
        self.inboxes: dict[str, int] = {}
        self.copy = 0
        if staged:
            self.inboxes["staged"] = 0
            self.segment = segments.make(group, staged, notifications, timeout, workspace=True)
            return
        for name, spec in PLANS.items() if device is None and not copied else ():
            private = spec.works_on == "private" and spec.mapped == group.mapped
            if private and works_anywhere(name, group.members):
                self.inboxes[name] = self.copy
                self.copy += spec.inbox_pieces * piece
        # A plan without an inbox, as in a GPU's memory, has no other limit than that of the copy.
        self.inbox_bytes = 4 * piece
        self.copy_bytes = 4 * piece if device is None else 8 * piece
        self.inbox = self.copy + self.copy_bytes
        self.pairwise_inbox = self.inbox + self.inbox_bytes
        self.entry = self.pairwise_inbox + (pairwise.inbox_bytes(group) if with_pairwise else 0)
        nbytes = self.entry + ALIGNMENT
        self.segment = segments.make(group, nbytes, notifications, timeout, device, workspace=True)


class Executions:
    """The executions of one group's calls, and the directories by which they find arrays.

    ``workspaces`` are known by :attr:`AllreduceRequest.room`; from ``first`` on lie the regions.
    """

    def __init__(
        self,
        state: CollectiveState,
        group: Group,
        workspaces: dict[int | None, Workspace],
        numbers: _native.Numbering,
        calls: _native.AllreduceCalls,
        first: int,
    ) -> None:
        self._state, self._group, self._workspaces = state, group, workspaces
        self._numbers, self._calls, self._first = numbers, calls, first
        # By the ids of the pool's segments.
        self._directories: dict[tuple[int, ...], _native.Directory] = {}
        self.regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], _native.Execution] = {}
        # The segments in which the arrays of such executions lie.
        self._homes: dict[tuple[Any, ...], weakref.ref[Segment]] = {}
        self._longests: dict[tuple[Any, ...], int] = {}

    def __len__(self) -> int:
        return len(self._bound)

    def parts(self, request: AllreduceRequest) -> list[tuple[_native.Execution, int]]:
        """Return the executions that make a call, one after another, and the bytes of each."""
        memory, name = request.place.memory, request.choice.plan
        here = options_for(self._group, name, memory.native_dtype, device=request.place.device)
        options = {**here, **dict(request.choice.options)}
        longest = memory.count if request.whole else self._longest(request, options)
        parts = []
        for begin in range(0, memory.count, max(1, longest)):
            count = min(longest, memory.count - begin)
            execution = self.execution(request, count, options)
            parts.append((execution, count * memory.dtype.itemsize))
        return parts

    def _longest(self, request: AllreduceRequest, options: dict[str, Any]) -> int:
        """Return the elements of one execution, as ids or memory admit."""
        spec, item = PLANS[request.choice.plan], request.place.memory.dtype.itemsize
        if spec.longest is not None and request.access == BufferAccess.REBASED:
            return spec.longest(int(options["piece"]), self._group.size, REGION)
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
        name, kind = request.choice.plan, kind_of(request.op)
        pieces = pieces_of(spec_of(name), kind, count, self._piece(request) or count)
        return inbox_of(name, self._group.members, pieces, kind=kind, **options)

    def _piece(self, request: AllreduceRequest) -> int:
        """Return the elements of a piece of an array that is copied from a GPU; 0: it is not."""
        item = request.place.memory.dtype.itemsize
        return self._state.gpu_piece // item if request.room == COPIES else 0

    def _build(self, request: AllreduceRequest, count: int, options: dict[str, Any]) -> ArrayPlan:
        """Build the plan for ``count`` elements, in the pieces in which they are copied.

        They stay whole where pieces would take more notifications than a plan has here.
        """
        name, kind = request.choice.plan, kind_of(request.op)
        for piece in (self._piece(request), 0):
            plan = build(self._group, name, kind, count, options, piece)
            needed = plan.first.notifications
            if needed <= REGION:
                return plan
        raise PlanError(f"plan {name} needs {needed} notifications; use a handle")

    def execution(
        self, request: AllreduceRequest, count: int, options: dict[str, Any], what: str = ""
    ) -> _native.Execution:
        """Return the execution for ``count`` elements of the array, bound at its first use."""
        place, name, access = request.place, request.choice.plan, request.access
        memory, home = place.memory, None
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
            home, offset = place.homes[self._group.rank]
            key = *key, home.id, offset
        found = self._bound.get((memory.device, *key))
        if found is not None:
            return found
        region = self.regions.get(name, len(self.regions))
        if region >= REGIONS:
            raise PlanError(f"ctx.allreduce takes {REGIONS} different plans; use a handle")
        plan = self._build(request, count, options)
        workspace, dtype = self._workspaces[request.room], memory.native_dtype
        own, directory = workspace.inboxes.get(name), None
        if request.in_pool:
            directory = self._directory(place.pool)
        copy, nbytes = (workspace.segment, workspace.copy), count * memory.dtype.itemsize
        inbox = workspace.inbox if own is None else own
        part = "" if count == memory.count else f", {count} at a time"
        signature = f"allreduce {dtype} x {memory.count} {request.op}{part}, plan {name}"
        for each in key[5:]:
            signature += ", " + (" ".join(map(str, each)) if isinstance(each, tuple) else str(each))
        execution = bind(
            self._group,
            plan,
            {
                "data": place.data(access, self._group, nbytes, copy, directory),
                "inbox": PlanBuffer(workspace.segment, inbox, dtype),
            },
            Tags(self._numbers, self._first + region * REGION, signature),
            ArrayAccess(access, device=on_gpu(memory)),
            reduction_of(request.op),
        )
        self.regions[name] = region
        self._make_place()
        self._bound[memory.device, *key] = execution
        if home is not None:
            self._homes[memory.device, *key] = weakref.ref(home)
        return execution

    def _make_place(self) -> None:
        """Drop the older half of many executions: ever new sizes must not fill the memory."""
        if len(self._bound) >= MOST_BOUND:
            self._calls.forget()
            for key in list(self._bound)[: MOST_BOUND // 2]:
                del self._bound[key]
                self._homes.pop(key, None)

    def _directory(self, pool: tuple[Segment, ...]) -> _native.Directory:
        """Return where members announce where in the pool their arrays are."""
        homes = tuple(segment.id for segment in pool)
        if homes not in self._directories:
            workspace = self._workspaces[None]
            made = _native.Directory(workspace.segment, workspace.entry, list(pool))
            self._directories[homes] = made
        return self._directories[homes]

    def forget(self) -> None:
        """Forget where arrays lie; drop executions of deleted segments, whose memory they keep."""
        self._calls.forget()
        for key, home in list(self._homes.items()):
            segment = home()
            if segment is None or segment.deleted:
                self._homes.pop(key, None)
                self._bound.pop(key, None)

    def close(self) -> None:
        """Drop all executions."""
        self._calls.forget()
        self._bound.clear()
        self._directories.clear()
