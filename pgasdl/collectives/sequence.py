"""The sequence of a group's allreduces: its memory, and the executions that its calls run."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

import numpy as np

from pgasdl import _native
from pgasdl.buffers import ALIGNMENT, Memory, aligned, memory_of
from pgasdl.collectives.binding import (
    ArrayAccess,
    PlanBuffer,
    Tags,
    bind,
    options_for,
    piece_bytes,
)
from pgasdl.collectives.handle import kind_of, reduction_of
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.resources import Resources, Steps
from pgasdl.collectives.selection import works_anywhere
from pgasdl.errors import MismatchError, PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, spec_of
from pgasdl.plans.algorithms.blocks import ALIGN
from pgasdl.plans.pieces import ArrayPlan, build_array, pieces_of
from pgasdl.segment import Segment, SegmentTable

# Pieces of an array on a GPU in one execution.
_COPIED_AT_ONCE = 8
# From so many bytes on, an array of the pool is faster in place, where its place has to be told.
_LEAST_IN_POOL = 4096
# The workspace on the host of arrays that are copied from GPUs; others are named by the GPU.
_COPIES = -1


class Reduction(NamedTuple):
    """What one call reduces, and by which plan.

    Attributes
    ----------
    segment, offset
        Where the array lies, if the plan works on it in a segment; of one of the pool, other ranks'
        may lie elsewhere.
    device
        Where the plan works: a GPU, or None for the host.
    """

    memory: Memory
    op: str
    choice: Choice
    segment: Segment | None
    offset: int
    device: int | None

    @property
    def in_place(self) -> bool:
        """The plan works on all ranks' arrays where they lie."""
        elsewhere = self.segment is None and self.memory.device is not None
        return PLANS[self.choice.plan].works_on == "mapped" and not elsewhere

    @property
    def anywhere(self) -> bool:
        """The plan works on the array wherever it lies."""
        return PLANS[self.choice.plan].works_on in ("private", "readable") and not self.copied

    @property
    def copied(self) -> bool:
        """The array is on a GPU, and the plan works on a copy on the host."""
        return self.memory.device is not None and self.device is None

    @property
    def room(self) -> int | None:
        """The workspace that it needs."""
        return _COPIES if self.copied else self.device

    def describe(self) -> str:
        """Name the call, for messages."""
        memory, name = self.memory, self.choice.plan
        return f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {self.op}, {name}"


class Workspace:
    """A group's memory for arrays that lie elsewhere, on the host or on a GPU.

    ``copied`` : bytes of one execution whose array is copied from a GPU and back; 0: of others

    Making it is collective. It has inboxes of plans that work on arrays wherever they lie, room for
    a copy and an inbox for plans that need the array in a segment, and the rank's entry in the
    group's directory. Its pages are touched once, here; a temporary per call would fault in each
    call.
    """

    def __init__(
        self,
        segments: SegmentTable,
        group: Group,
        device: int | None,
        notifications: int,
        timeout: float,
        copied: int = 0,
    ) -> None:
        self.piece_bytes = max(piece_bytes(group.topology, device), copied // 4)
        # Plans that work on arrays wherever they lie have inboxes of their own: peers may still
        # read them when an execution is over.
        self.inboxes: dict[str, int] = {}
        self.copy = 0
        for name, spec in PLANS.items() if device is None and not copied else ():
            private = spec.works_on == "private" and spec.mapped == group.mapped
            if private and works_anywhere(name, group.members):
                self.inboxes[name] = self.copy
                self.copy += spec.inbox_pieces * self.piece_bytes
        # A plan without an inbox, as in a GPU's memory, has no other limit than that of the copy.
        self.inbox_bytes = 4 * self.piece_bytes
        self.copy_bytes = 4 * self.piece_bytes if device is None else 8 * self.piece_bytes
        self.inbox = self.copy + self.copy_bytes
        self.entry = self.inbox + self.inbox_bytes  # of a directory
        nbytes = self.entry + ALIGNMENT
        self.segment = segments.make(group, nbytes, notifications, timeout, device)
        self.segment.prefault()


class Sequence:
    """The allreduces of one group, one after another.

    Every execution has a number: the generation that its notifications carry. Their tag says what
    is executed. Each plan has its own region of notifications. A call that waits looks at all
    regions, so it notices at once a rank that executes something else under the same number.

    The notifications are those of the workspace on the host, whatever a plan works on.
    """

    REGION = 1 << 12
    REGIONS = 16
    MOST_BOUND = 1024  # with some 7 KB for two ranks, 27 KB for four

    def __init__(self, resources: Resources, group: Group, timeout: float) -> None:
        self.group = group
        self._resources = resources
        notifications = self.REGION * self.REGIONS
        on_host = Workspace(resources.segments, group, None, notifications + group.size, timeout)
        self._workspaces: dict[int | None, Workspace] = {None: on_host}
        self._numbers = _native.Numbering(on_host.segment, 0, notifications, exclusive=True)
        # Runs again what the same call ran before, without Python in between, if nothing has
        # changed since and nothing is unfinished.
        self.calls = _native.AllreduceCalls(self._numbers)
        # By the ids of the pool's segments; of none: of arrays anywhere.
        self._directories: dict[tuple[int, ...], _native.Directory] = {}
        self._regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], _native.Execution] = {}
        # The segments of what is bound to one of their arrays.
        self._homes: dict[tuple[Any, ...], weakref.ref[Segment]] = {}
        self._longests: dict[tuple[Any, ...], int] = {}
        self._unfinished: tuple[tuple[Any, ...], int] | None = None  # the call, elements done
        # What some rank had outside the pool, the same on all ranks.
        self._outside: set[tuple[int, int, int]] = set()
        self._streamed: _native.Execution | None = None  # the last one, if a stream has its result

    def has_room(self, wanted: Reduction) -> bool:
        """Whether the workspace that it needs is there."""
        return wanted.room in self._workspaces

    def _make_room(self, wanted: Reduction, limit: float) -> None:
        """Make the workspace for arrays on GPUs, in the first call that needs it. Collective.

        An execution comes before it, by which a rank is noticed that has its array on the host.
        """
        self._end_streamed(None, limit)
        group = self.group
        with Steps(self._resources.unfinished, group, wanted.describe(), limit) as steps:
            what = "making room for copies" if wanted.copied else "making room on a GPU"
            steps(lambda: self._agree(what, steps.left))
            # Several pieces, of which one is copied while another travels.
            copied = _COPIED_AT_ONCE * self._resources.gpu_piece if wanted.copied else 0
            room = steps(
                lambda: Workspace(
                    self._resources.segments, group, wanted.device, 0, steps.left, aligned(copied)
                )
            )
            if wanted.copied:
                room.segment.pin()
            self._workspaces[wanted.room] = room

    def _agree(self, what: str, limit: float) -> None:
        """Run an execution of our own, by which ranks notice that others do not do ``what``."""
        scratch = np.zeros(1, np.float32)
        agreed = Reduction(memory_of(scratch), "sum", Choice("gdraa"), None, 0, None)
        options = options_for(self.group, "gdraa", "float32")
        execution = self._execution(agreed, 1, options, what)
        execution.run_on(scratch, agreed.memory.address, scratch.nbytes, timeout=limit)

    def run(
        self,
        array: Any,
        wanted: Reduction,
        plan: str | None,
        limit: float,
        stream: int | None,
    ) -> bool:
        """Run a new call, or the rest of one that a Timeout or Ctrl-C interrupted.

        False: some rank has its array outside the pool, so nothing was done; it is then to be
        reduced as one outside by all ranks, and so are those like it (:meth:`in_pool`).

        ``stream`` : handle of the stream that orders it, of an array on a GPU
        """
        memory, name = wanted.memory, wanted.choice.plan
        call = (memory.address, memory.nbytes, wanted.op, name, memory.count)
        self._numbers.enter("ctx.allreduce")
        try:
            if not self.has_room(wanted):
                self._make_room(wanted, limit)
            progress = 0
            if self.calls.take_interrupted():
                self._unfinished = self.calls.last, 0
            if self._unfinished is not None:
                if self._unfinished[0] == call:
                    progress = self._unfinished[1]
                elif self._unfinished[1] < self._unfinished[0][-1]:
                    raise MismatchError(
                        "an allreduce of this group timed out: call it again with the same array "
                        "first"
                    )
            here = options_for(self.group, name, memory.native_dtype, device=wanted.device)
            options = {**here, **dict(wanted.choice.options)}
            longest = self._longest(wanted, options)
            deadline = time.monotonic() + limit
            left = limit
            while progress < memory.count:
                count = min(longest, memory.count - progress)
                execution = self._execution(wanted, count, options)
                begun = self.calls.number
                try:
                    item = memory.dtype.itemsize
                    where = memory.address + progress * item
                    self._end_streamed(execution, left)
                    if stream is None:
                        execution.run_on(array, where, count * item, timeout=left)
                    elif execution.run_after(stream, array, where, count * item, timeout=left):
                        self._streamed = execution
                    if execution.declined:
                        self.decline(call)
                        return False
                except BaseException:
                    self._left(execution, call, progress, count, begun)
                    raise
                progress += count
                left = max(0.0, deadline - time.monotonic())
            self._unfinished = None
            if 0 < memory.count <= longest and stream is None:  # of nothing, none is counted
                execution = self._execution(wanted, memory.count, options)
                self.calls.remember(array, memory.nbytes, wanted.op, plan, execution, call)
            return True
        finally:
            self._numbers.leave()

    def in_pool(self, memory: Memory, segment: Segment | None) -> bool:
        """Whether such an array is reduced in the pool, though a rank may have it elsewhere.

        On the host all ranks decide alike: there is a pool, and what was like it lay there on all.
        Each reduces a block, so that each sees where all lie. On a GPU nobody waits to see it.
        """
        if memory.nbytes < _LEAST_IN_POOL:
            return False
        if memory.device is not None:
            return segment is not None
        pool = self._resources.segments.pooled()
        return (
            any(part.device == "cpu" for part in pool)
            and memory.count >= ALIGN * self.group.size
            and (len(pool), memory.nbytes, memory.count) not in self._outside
        )

    def decline(self, call: tuple[Any, ...]) -> None:
        """Look in the pool no more for arrays like that of a call, until the pool grows."""
        self._unfinished = None
        self.calls.forget()
        if len(self._outside) >= self.MOST_BOUND:
            self._outside.clear()
        self._outside.add((len(self._resources.segments.pooled()), call[1], call[-1]))

    def _end_streamed(self, following: _native.Execution | None, limit: float) -> None:
        """Wait for what a stream was given: one at a time. Only its own execution may follow."""
        if self._streamed is not None and self._streamed is not following:
            self._streamed.wait(timeout=limit)
        self._streamed = None

    def _left(
        self,
        execution: _native.Execution,
        call: tuple[Any, ...],
        progress: int,
        count: int,
        begun: int,
    ) -> None:
        """Note how far a call came before an exception: the same call continues from there."""
        if self._numbers.under_way:
            # It may be another's, which this call was refused for.
            if self._unfinished is not None or self.calls.number > begun:
                self._unfinished = call, progress
        elif self._numbers.failed:
            self._unfinished = None
        elif self.calls.number > begun:  # it came after the part had ended
            if execution.declined:
                self.decline(call)
            else:
                self._unfinished = call, progress + count
        elif progress:
            self._unfinished = call, progress
        if self._unfinished is not None:
            self.calls.forget()  # nothing repeats until it is finished

    def _longest(self, wanted: Reduction, options: dict[str, Any]) -> int:
        """Return the elements of one execution: all if in place, else what ids or memory admit."""
        memory, spec = wanted.memory, PLANS[wanted.choice.plan]
        workspace = self._workspaces[wanted.room]
        if wanted.in_place:
            return max(1, memory.count)
        if spec.longest is not None and wanted.anywhere:
            return spec.longest(int(options["piece"]), self.group.size, self.REGION)
        key = wanted.room, spec.name, memory.dtype.itemsize, *options.items()
        if key not in self._longests:
            # Reduce the count until the plan's inbox fits into its part of the workspace.
            count = workspace.copy_bytes // memory.dtype.itemsize // 64 * 64
            limit = workspace.inbox_bytes // memory.dtype.itemsize // 64 * 64
            while (needed := self._inbox(wanted, count, options)) > limit and count > 64:
                count = max(64, count * limit // needed // 64 * 64)
            self._longests[key] = count
        return self._longests[key]

    def _inbox(self, wanted: Reduction, count: int, options: dict[str, Any]) -> int:
        """Return the elements of a plan's inbox, for ``count`` elements of an array."""
        return self._build(wanted, count, options).first.buffers.get("inbox", 0)

    def _build(self, wanted: Reduction, count: int, options: dict[str, Any]) -> ArrayPlan:
        """Build the plan for ``count`` elements, in the pieces in which they are copied.

        They stay whole where pieces would take more notifications than a plan has here.
        """
        name, kind = wanted.choice.plan, kind_of(wanted.op)
        pieces: tuple[int, ...] = (count,)
        if wanted.copied:
            piece = self._resources.gpu_piece // wanted.memory.dtype.itemsize
            pieces = pieces_of(spec_of(name), kind, count, piece)
        for each in (pieces, (count,)):
            plan = build_array(name, self.group.rank, self.group.size, each, kind=kind, **options)
            needed = plan.first.notifications
            if needed <= self.REGION:
                return plan
        raise PlanError(f"plan {name} needs {needed} notifications; use a handle")

    def _execution(
        self, wanted: Reduction, count: int, options: dict[str, Any], what: str = ""
    ) -> _native.Execution:
        """Return what runs ``count`` elements of the array, bound at its first use."""
        memory, name, dtype = wanted.memory, wanted.choice.plan, wanted.memory.native_dtype
        workspace = self._workspaces[wanted.room]
        # The key identifies an execution. It is equal on all ranks: their tags are made of it.
        key: tuple[Any, ...] = (name, dtype, count, wanted.op, memory.count, *options.items())
        if what:
            key = *key, what
        if memory.device is not None:
            key = *key, "GPU", self._resources.gpu_piece if wanted.copied else 0
        pool: list[Segment] = []
        if wanted.in_place:
            if wanted.segment is None or wanted.segment.pooled:
                pool = self._resources.segments.pooled()
                key = *key, "pool", len(pool)
            else:
                key = *key, wanted.segment.id, wanted.offset
        found = self._bound.get((memory.device, *key))
        if found is not None:
            return found
        region = self._regions.get(name, len(self._regions))
        if region >= self.REGIONS:
            raise PlanError(f"ctx.allreduce takes {self.REGIONS} different plans; use a handle")
        plan = self._build(wanted, count, options)
        inbox = workspace.inbox
        device = -1 if memory.device is None else memory.device
        access = ArrayAccess(_native.BufferAccess.COPIED, device=device)
        if wanted.in_place and not pool:
            assert wanted.segment is not None
            self._homes[memory.device, *key] = weakref.ref(wanted.segment)
            data = PlanBuffer(wanted.segment, wanted.offset, dtype)
            access = ArrayAccess(_native.BufferAccess.IN_PLACE, device=device)
        elif wanted.in_place or wanted.anywhere:
            nbytes = count * memory.dtype.itemsize
            home = _native.local_memory(self.group.context, memory.address, nbytes, device)
            if name in workspace.inboxes:
                inbox, directory = workspace.inboxes[name], None
            else:
                directory = self._directory_of(pool)
            data = PlanBuffer(home, 0, dtype, directory=directory)
            access = ArrayAccess(_native.BufferAccess.REBASED, device=device)
        else:
            data = PlanBuffer(workspace.segment, workspace.copy, dtype)
        buffers = {"data": data, "inbox": PlanBuffer(workspace.segment, inbox, dtype)}
        tags = Tags(self._numbers, region * self.REGION, str(key))
        execution = bind(self.group, plan, buffers, tags, access, reduction_of(wanted.op))
        self._regions[name] = region
        self._make_place()
        self._bound[memory.device, *key] = execution
        return execution

    def _make_place(self) -> None:
        """Give up the older half of much that is bound: ever new sizes must not fill the memory."""
        interrupted = self._numbers.under_way and self._streamed is None  # it goes on first
        if len(self._bound) < self.MOST_BOUND or interrupted:
            return
        self.calls.forget()
        for key in list(self._bound)[: self.MOST_BOUND // 2]:
            if self._bound[key] is not self._streamed:
                del self._bound[key]
                self._homes.pop(key, None)

    def forget(self) -> None:
        """Forget where arrays lie, and give up what is bound to arrays of segments that are gone.

        It would keep their memory.
        """
        self.calls.forget()
        if self._numbers.under_way:
            return
        for key, home in list(self._homes.items()):
            segment = home()
            if segment is None or segment.deleted:
                self._homes.pop(key, None)
                self._bound.pop(key, None)

    def close(self) -> None:
        """Give up the executions and, if none is under way, the workspaces: else peers write."""
        self.calls.forget()
        under_way = self._numbers.under_way
        self._bound.clear()
        self._directories.clear()
        if not under_way:
            for workspace in self._workspaces.values():
                workspace.segment.close()

    def _directory_of(self, pool: list[Segment]) -> _native.Directory:
        """Return where members tell where their arrays are: in the pool, or, without, anywhere."""
        homes = tuple(segment.id for segment in pool)
        if homes not in self._directories:
            workspace = self._workspaces[None]
            made = _native.Directory(workspace.segment, workspace.entry, pool)
            self._directories[homes] = made
        return self._directories[homes]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of its workspaces, on the host and on GPUs."""
        return sum(workspace.segment.nbytes for workspace in self._workspaces.values())

    def describe(self) -> str:
        """One line."""
        plans = ", ".join(self._regions) or "none"
        read = self.group.unreadable
        elsewhere = f"peers cannot read them ({read})" if read else "peers can read them"
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{len(self._bound)} signatures, plans {plans}; "
            f"workspace {self.workspace_bytes} bytes; arrays outside segments: {elsewhere}"
        )
