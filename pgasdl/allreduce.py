"""What stands behind ``ctx.allreduce``: calls that come again, in any order of arrays and sizes.

Three ways, by where the array lies:

- in a segment that every rank maps: reduced in place by ``gdraa-direct``;
- elsewhere: ``staged``, which passes pieces through a workspace that is mapped and writes
  the result straight into the array;
- any other plan, and on transports that map nothing: copied into the workspace, and out again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pgasdl import _native
from pgasdl.buffers import Memory
from pgasdl.choosing import choose
from pgasdl.collective import Place, bind_phases, options_for, piece_bytes
from pgasdl.errors import MismatchError, PlanError, Timeout
from pgasdl.handle import checked, kind_of, raw
from pgasdl.plans import PLANS, build
from pgasdl.policy import Choice

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group
    from pgasdl.segment import Segment


_REACH = {"staged": _native.Reach.REBASED, "gdraa-direct": _native.Reach.IN_PLACE}


class AllreduceCache:
    """What ``ctx.allreduce`` keeps: for each group its sequence of calls and their bound plans."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sequences: dict[Group, _Sequence] = {}

    def run(
        self, array: Any, op: str, group: Group, plan: str | None, timeout: float | None
    ) -> None:
        sequence = self._sequences.get(group)
        if sequence is not None and sequence.run_again(array, op, plan, timeout):
            return
        # Closed, or fenced off: said before anything else.
        self._context._require_peer(self._context.rank, "allreduce")
        memory = checked(array, kind_of(op))
        if sequence is None:
            sequence = _Sequence(self._context, group, timeout)
            self._sequences[group] = sequence
        sequence.run(memory, op, plan, timeout, array)

    def forget(self) -> None:
        """Segments came or went: where arrays lie has to be looked up again."""
        for sequence in self._sequences.values():
            sequence.calls.forget()

    def clear(self) -> None:
        """The context is closed: give up all plans, and the memory they hold."""
        self._sequences.clear()

    def describe(self) -> list[str]:
        """One line per group."""
        return [sequence.describe() for sequence in self._sequences.values()]


class _Sequence:
    """The allreduces of one group, one after another.

    Every execution has a number, which is the generation its notifications carry; what is executed
    is their tag. Plans have regions of notifications of their own, and while a call waits it looks
    at all of them: a rank that executes something else under the same number is told of at once.
    """

    REGION = 1 << 12
    REGIONS = 16

    def __init__(self, context: Context, group: Group, timeout: float | None) -> None:
        self.context = context
        self.group = group
        self.workspace = context.workspace(group, timeout)
        self.calls = _native.AllreduceCalls()
        self._first = self.workspace.take_notifications(self.REGION * self.REGIONS)
        self._regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], list[_native.BoundPlan]] = {}
        self._options: dict[str, int] = {}  # of the plan of the call that runs
        self._longests: dict[tuple[Any, ...], int] = {}
        self._unfinished: tuple[tuple[Any, ...], int] | None = None  # the call, elements done

    def run_again(self, array: Any, op: str, plan: str | None, timeout: float | None) -> bool:
        """Run what this very call ran before, if nothing has changed since."""
        try:
            return self.calls.run(array, op, plan, timeout)
        except (Timeout, KeyboardInterrupt):
            self._unfinished = self.calls.last, 0
            raise
        except BaseException:
            self.calls.resume()
            raise

    def _execute(
        self, bound: _native.BoundPlan, region: int, call: tuple[Any, ...], progress: int,
        timeout: float | None, *, start: bool,
    ) -> None:  # fmt: skip
        """One execution, or what a Timeout or Ctrl-C left of it."""
        try:
            if start:
                bound.run(timeout, self.calls.generation)
            else:
                bound.wait(timeout)
        except (Timeout, KeyboardInterrupt):
            self._unfinished = call, progress
            raise
        except BaseException:
            self._end()
            raise
        self.calls.executed(region)

    def _end(self) -> None:
        """The call is over, well or not."""
        self._unfinished = None
        self.calls.resume()

    def run(
        self,
        memory: Memory,
        op: str,
        plan: str | None,
        timeout: float | None,
        array: Any,
    ) -> None:
        segment, offset = self.context.segments.at(memory)
        in_place = segment is not None and self.group.mapped
        if plan is None:
            choice = choose(
                self.context, self.group, kind_of(op), memory.nbytes, in_place=in_place,
                shares=True,
            )  # fmt: skip
        else:
            choice = Choice(plan)
        name, self._options = choice.plan, dict(choice.options)
        if name not in PLANS:
            raise PlanError(f"no plan named {name!r}; there are {', '.join(sorted(PLANS))}")
        if not PLANS[name].shares:
            raise PlanError(
                f"plan {name} was not made for arrays in turns on one inbox: use a handle, "
                "ctx.allreduce_handle"
            )
        if name == "gdraa-direct" and not in_place:
            raise PlanError("plan gdraa-direct needs an array in a segment that peers can map")
        call = (memory.address, memory.nbytes, op, name)
        progress, resumed = 0, False
        if self._unfinished is not None:
            if self._unfinished[0] != call:
                raise MismatchError(
                    "an allreduce of this group timed out: call it again with the same array first"
                )
            progress, resumed = self._unfinished[1], True
        limit = self.context.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit if limit else 0.0
        longest = self._longest(name, memory)
        while progress < memory.count:
            count = min(longest, memory.count - progress)
            where = memory.address + progress * memory.dtype.itemsize
            left = limit if progress == 0 else max(0.0, deadline - time.monotonic())
            self._part(
                memory, op, name, count, where, segment, offset, resumed, call, progress, left
            )  # fmt: skip
            progress += count
            resumed = False
        self._end()
        if memory.count <= longest:
            key = self._key(memory, memory.count, op, name, segment, offset)
            if key in self._bound:
                reach = _REACH.get(name, _native.Reach.COPIED)
                self.calls.remember(
                    array, op, plan, self._bound[key], self._regions[name], reach, call
                )

    def _key(
        self, memory: Memory, count: int, op: str, name: str, segment: Segment | None, offset: int
    ) -> tuple[Any, ...]:
        """What tells plans apart; equal on all ranks, since their tags are made of it."""
        key = name, memory.native_dtype, count, op, memory.count, *self._options.items()
        if name == "gdraa-direct":
            assert segment is not None
            return *key, segment.id, offset
        return key

    def _longest(self, name: str, memory: Memory) -> int:
        """Elements of one execution: all in place, else what ids or memory admit."""
        if name == "gdraa-direct":
            return max(1, memory.count)
        if name == "staged":
            pieces = self.REGION // (4 * self.group.size)
            return pieces * piece_bytes(self.context) // memory.dtype.itemsize
        key = name, memory.dtype.itemsize, *self._options.items()
        if key not in self._longests:
            # Small enough that the plan's inbox fits in as much memory again.
            limit = count = self.workspace.copy_bytes // memory.dtype.itemsize // 64 * 64
            while (needed := self._inbox(name, count)) > limit and count > 64:
                count = max(64, count * limit // needed // 64 * 64)
            self._longests[key] = count
        return self._longests[key]

    def _inbox(self, name: str, count: int) -> int:
        """How many elements a plan's inbox has for an array of so many."""
        options = {**options_for(self.group, name, "float32"), **self._options}
        shape = build(name, self.group.rank, self.group.size, count, **options)
        return shape.buffers.get("inbox", 0)

    def _part(
        self, memory: Memory, op: str, name: str, count: int, where: int,
        segment: Segment | None, offset: int, resumed: bool, call: tuple[Any, ...],
        progress: int, timeout: float,
    ) -> None:  # fmt: skip
        dtype = memory.native_dtype
        key = self._key(memory, count, op, name, segment, offset)
        copies = name not in _REACH
        if name == "gdraa-direct":
            assert segment is not None
            data = Place(segment, offset, dtype)
        elif name == "staged":
            home = _native.local_memory(self.context, where, count * memory.dtype.itemsize)
            data = Place(home, 0, dtype)
        else:
            data = Place(self.workspace.segment, self.workspace.staged_bytes, dtype)
        phases = self._bound.get(key) or self._bind(key, name, count, op, data, dtype)
        region = self._regions[name]
        bound = phases[self.calls.turn(region) % len(phases)]
        nbytes = count * memory.dtype.itemsize
        private = raw(Memory(where, nbytes, memory.dtype, (count,), None)) if copies else None
        if not resumed:
            if name == "staged":
                bound.rebase("data", where)
            if private is not None:
                self.workspace.copy[:nbytes] = private
        self._execute(bound, region, call, progress, timeout, start=not resumed)
        if private is not None:
            private[:] = self.workspace.copy[:nbytes]

    def _bind(
        self, key: tuple[Any, ...], name: str, count: int, op: str, data: Place, dtype: str
    ) -> list[_native.BoundPlan]:
        region = self._regions.setdefault(name, len(self._regions))
        if region >= self.REGIONS:
            raise PlanError(f"ctx.allreduce takes {self.REGIONS} different plans; use a handle")
        options = {**options_for(self.group, name, dtype), **self._options}
        shape = build(name, self.group.rank, self.group.size, count, kind=kind_of(op), **options)
        if shape.notifications > self.REGION:
            raise PlanError(f"plan {name} needs {shape.notifications} notifications; use a handle")
        work = self.workspace
        start = 0 if name == "staged" else work.staged_bytes + work.copy_bytes
        places = {"data": data, "inbox": Place(self.workspace.segment, start, dtype)}
        phases = bind_phases(
            self.context, self.group, name, count, kind_of(op), places, self.workspace.segment,
            self._first + region * self.REGION, str(key), **options,
        )  # fmt: skip
        for bound in phases:
            bound.watch(self._first, self.REGION * self.REGIONS)
        self._bound[key] = phases
        return phases

    def describe(self) -> str:
        plans = ", ".join(self._regions) or "none"
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{len(self._bound)} signatures, plans {plans}; "
            f"workspace {self.workspace.segment.nbytes} bytes"
        )
