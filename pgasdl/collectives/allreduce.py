"""The implementation of ``ctx.allreduce``: calls that repeat, in any order of arrays and sizes.

There are three ways. Where the array lies decides:

- in a segment that every rank maps: ``gdraa-direct`` reduces it in place;
- elsewhere: ``staged`` passes pieces through a mapped workspace and writes the result straight
  into the array;
- any other plan, and on transports that map nothing: it is copied into the workspace and back.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from pgasdl import _native
from pgasdl.buffers import Memory
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind, options_for, piece_bytes
from pgasdl.collectives.handle import checked, kind_of
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.resources import Resources, Steps
from pgasdl.collectives.selection import select
from pgasdl.errors import MismatchError, PlanError
from pgasdl.group import Group
from pgasdl.plans import build, spec_of
from pgasdl.segment import Segment, SegmentTable


class _Reduction(NamedTuple):
    """What one call reduces, and by which plan.

    Attributes
    ----------
    segment, offset
        Where the array lies, if it lies in a segment.
    """

    memory: Memory
    op: str
    choice: Choice
    segment: Segment | None
    offset: int


class AllreduceCache:
    """For each group its sequence of calls of ``ctx.allreduce``, with their executions."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._sequences: dict[Group, _Sequence] = {}
        self._beginning: set[Group] = set()

    def run(
        self, array: Any, op: str, group: Group, plan: str | None, timeout: float | None
    ) -> None:
        """Make one call. An interrupted call is continued by the same call."""
        sequence = self._sequences.get(group)
        if sequence is not None and sequence.run_again(array, op, plan, timeout):
            return
        # A closed or fenced-off context is reported before anything else.
        core = self._resources.core
        core._require_peer(core.rank, "allreduce")
        limit = core._seconds(timeout)
        memory = checked(array, kind_of(op))
        wanted = self._reduction(memory, op, group, plan)
        if sequence is None:
            name = wanted.choice.plan
            call = f"an allreduce of {memory.nbytes} bytes at {memory.address:#x}, {op}, {name}"
            sequence = self._begin(group, call, limit)
        sequence.run(array, wanted, plan, limit)

    def _reduction(self, memory: Memory, op: str, group: Group, plan: str | None) -> _Reduction:
        """Choose the plan, and refuse one that cannot run here."""
        segment, offset = self._resources.segments.at(memory)
        in_place = segment is not None and group.mapped
        if plan is None:
            choice = select(
                self._resources.policy,
                group,
                kind_of(op),
                memory.nbytes,
                in_place=in_place,
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
        if name == "gdraa-direct" and not in_place:
            raise PlanError("plan gdraa-direct needs an array in a segment that peers can map")
        if spec.mapped and not group.mapped:
            raise PlanError(f"plan {name} loads and stores peers' memory, which is not mapped here")
        return _Reduction(memory, op, choice, segment, offset)

    def _begin(self, group: Group, call: str, limit: float) -> _Sequence:
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
                    made = steps(lambda: _Sequence(self._resources.segments, group, steps.left))
                self._sequences[group] = made
            return self._sequences[group]
        finally:
            self._beginning.discard(group)

    def forget(self) -> None:
        """Forget where arrays lie: segments were made or deleted."""
        for sequence in list(self._sequences.values()):
            sequence.calls.forget()

    def clear(self) -> None:
        """Give up all executions and their memory: the context is closed."""
        self._sequences.clear()

    def describe(self) -> list[str]:
        """One line per group."""
        return [sequence.describe() for sequence in self._sequences.values()]


class _Sequence:
    """The allreduces of one group, one after another.

    Every execution has a number: the generation that its notifications carry. Their tag says what
    is executed. Each plan has its own region of notifications. A call that waits looks at all
    regions, so it notices at once a rank that executes something else under the same number.

    The workspace has the inbox of ``staged``, and room for a copy and an inbox for plans that need
    the array in a segment. Its pages are touched once, here; a temporary per call would fault in
    each call.
    """

    REGION = 1 << 12
    REGIONS = 16

    def __init__(self, segments: SegmentTable, group: Group, timeout: float) -> None:
        self.group = group
        self._piece_bytes = piece_bytes(group.topology)
        self._staged_bytes = 8 * self._piece_bytes
        self._copy_bytes = 4 * self._piece_bytes
        self._workspace = segments.make(
            group,
            self._staged_bytes + 2 * self._copy_bytes,
            self.REGION * self.REGIONS + group.size,
            timeout,
        )
        self._workspace.prefault()
        self._numbers = _native.Numbering(
            self._workspace, 0, self.REGION * self.REGIONS, exclusive=True
        )
        self.calls = _native.AllreduceCalls(self._numbers)
        # Runs again what the same call ran before, without Python in between, if nothing has
        # changed since and nothing is unfinished.
        self.run_again = self.calls.run
        self._regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], _native.Execution] = {}
        self._longests: dict[tuple[Any, ...], int] = {}
        self._unfinished: tuple[tuple[Any, ...], int] | None = None  # the call, elements done

    def run(self, array: Any, wanted: _Reduction, plan: str | None, limit: float) -> None:
        """Run a new call, or the rest of one that a Timeout or Ctrl-C interrupted."""
        memory, name = wanted.memory, wanted.choice.plan
        call = (memory.address, memory.nbytes, wanted.op, name, memory.count)
        self._numbers.enter("ctx.allreduce")
        try:
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
            here = options_for(self.group, name, memory.native_dtype)
            options = {**here, **dict(wanted.choice.options)}
            longest = self._longest(name, memory, options)
            deadline = time.monotonic() + limit
            left = limit
            while progress < memory.count:
                count = min(longest, memory.count - progress)
                execution = self._execution(wanted, count, options)
                begun = self.calls.number
                try:
                    item = memory.dtype.itemsize
                    where = memory.address + progress * item
                    execution.run_on(array, where, count * item, timeout=left)
                except BaseException:
                    self._left(call, progress, count, begun)
                    raise
                progress += count
                left = max(0.0, deadline - time.monotonic())
            self._unfinished = None
            if memory.count <= longest:
                execution = self._execution(wanted, memory.count, options)
                self.calls.remember(array, wanted.op, plan, execution, call)
        finally:
            self._numbers.leave()

    def _left(self, call: tuple[Any, ...], progress: int, count: int, begun: int) -> None:
        """Note how far a call came before an exception: the same call continues from there."""
        if self._numbers.under_way:
            self._unfinished = call, progress
        elif self._numbers.failed:
            self._unfinished = None
        elif self.calls.number > begun:  # it came after the part had ended
            self._unfinished = call, progress + count
        elif progress:
            self._unfinished = call, progress
        if self._unfinished is not None:
            self.calls.forget()  # nothing repeats until it is finished

    def _longest(self, name: str, memory: Memory, options: dict[str, Any]) -> int:
        """Return the elements of one execution: all if in place, else what ids or memory admit."""
        if name == "gdraa-direct":
            return max(1, memory.count)
        if name == "staged":
            pieces = self.REGION // (4 * self.group.size)
            return pieces * self._piece_bytes // memory.dtype.itemsize
        key = name, memory.dtype.itemsize, *options.items()
        if key not in self._longests:
            # Reduce the count until the plan's inbox fits into its part of the workspace.
            limit = count = self._copy_bytes // memory.dtype.itemsize // 64 * 64
            while (needed := self._inbox(name, count, options)) > limit and count > 64:
                count = max(64, count * limit // needed // 64 * 64)
            self._longests[key] = count
        return self._longests[key]

    def _inbox(self, name: str, count: int, options: dict[str, Any]) -> int:
        """Return the elements of a plan's inbox, for an array of ``count`` elements."""
        shape = build(name, self.group.rank, self.group.size, count, **options)
        return shape.buffers.get("inbox", 0)

    def _execution(
        self, wanted: _Reduction, count: int, options: dict[str, Any]
    ) -> _native.Execution:
        """Return what runs ``count`` elements of the array, bound at its first use."""
        memory, name, dtype = wanted.memory, wanted.choice.plan, wanted.memory.native_dtype
        # The key identifies an execution. It is equal on all ranks: their tags are made of it.
        key: tuple[Any, ...] = (name, dtype, count, wanted.op, memory.count, *options.items())
        if name == "gdraa-direct":
            assert wanted.segment is not None
            key = *key, wanted.segment.id, wanted.offset
        found = self._bound.get(key)
        if found is not None:
            return found
        region = self._regions.get(name, len(self._regions))
        if region >= self.REGIONS:
            raise PlanError(f"ctx.allreduce takes {self.REGIONS} different plans; use a handle")
        kind = kind_of(wanted.op)
        shape = build(name, self.group.rank, self.group.size, count, kind=kind, **options)
        if shape.notifications > self.REGION:
            raise PlanError(f"plan {name} needs {shape.notifications} notifications; use a handle")
        inbox = self._staged_bytes + self._copy_bytes
        access = ArrayAccess(_native.BufferAccess.COPIED)
        if name == "gdraa-direct":
            assert wanted.segment is not None
            data = PlanBuffer(wanted.segment, wanted.offset, dtype)
            access = ArrayAccess(_native.BufferAccess.IN_PLACE)
        elif name == "staged":
            inbox = 0
            nbytes = count * memory.dtype.itemsize
            home = _native.local_memory(self.group.context, memory.address, nbytes)
            data = PlanBuffer(home, 0, dtype)
            access = ArrayAccess(_native.BufferAccess.REBASED)
        else:
            data = PlanBuffer(self._workspace, self._staged_bytes, dtype)
        buffers = {"data": data, "inbox": PlanBuffer(self._workspace, inbox, dtype)}
        tags = Tags(self._numbers, region * self.REGION, str(key))
        execution = bind(self.group, name, count, kind, buffers, tags, access, options)
        self._regions[name] = region
        self._bound[key] = execution
        return execution

    def describe(self) -> str:
        plans = ", ".join(self._regions) or "none"
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{len(self._bound)} signatures, plans {plans}; "
            f"workspace {self._workspace.nbytes} bytes"
        )
