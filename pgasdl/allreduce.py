"""Allreduce of one array: persistent handles, and what stands behind ``ctx.allreduce``.

Three ways, by where the array lies:

- in a segment that every rank maps: reduced in place by ``gdraa-direct``;
- elsewhere: ``staged``, which passes pieces through a workspace that is mapped and writes
  the result straight into the array;
- any other plan, and on transports that map nothing: copied into the workspace, and out again.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import Memory, memory_of
from pgasdl.collective import Place, bind_phases, options_for, piece_bytes
from pgasdl.errors import BufferRefused, MismatchError, PlanError, Timeout
from pgasdl.plans import PLANS, build

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group
    from pgasdl.segment import Segment

KINDS = {"mean": "average", "sum": "sum"}


def _checked(array: Any, op: str) -> Memory:
    memory = memory_of(array)
    if op not in KINDS:
        raise BufferRefused(f'operator {op!r}: an allreduce takes "mean" or "sum"')
    if op == "mean" and memory.native_dtype.startswith("int"):
        raise BufferRefused("the mean of integers is not an integer: sum, then divide")
    return memory


def _raw(memory: Memory) -> npt.NDArray[np.uint8]:
    """A byte view of described memory."""
    bytes_there = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    return np.frombuffer(memoryview(bytes_there), np.uint8)


def choose(context: Context, in_place: bool) -> str:
    """The plan for an array, when the caller names none."""
    if not context.mapped:
        return "gdraa"
    return "gdraa-direct" if in_place else "staged"


class Allreduce:
    """A persistent allreduce of one piece of memory, made by :meth:`Context.allreduce_handle`.

    ``handle()`` runs it. ``handle.start()`` and ``handle.wait()`` overlap it with computation;
    several handles may be under way at once, in any order, also different ones on different ranks.

    Attributes
    ----------
    plan : name of the algorithm
    inbox_bytes : memory it needs on this rank besides the array
    """

    def __init__(
        self,
        context: Context,
        array: Any,
        op: str,
        group: Group,
        plan: str | None,
        timeout: float | None,
    ) -> None:
        self.context = context
        self.op = op
        self._memory = memory = _checked(array, op)
        dtype = memory.native_dtype
        segment, offset = context.segments.at(memory)
        place = "none" if segment is None else f"segment {segment.id} at {offset}"
        signature = f"{dtype} x {memory.count} {op} {plan or 'auto'}"
        places_of = set(group.allgather(f"allreduce {signature}", place.encode(), timeout))
        in_place = len(places_of) == 1 and segment is not None and context.mapped
        self.plan = choose(context, in_place) if plan is None else plan
        if self.plan == "gdraa-direct" and not in_place:
            raise PlanError(
                "plan gdraa-direct needs the array at one place of one segment on every rank, and "
                f"a transport that maps it; here: {sorted(p.decode() for p in places_of)}"
            )
        workspace = context.workspace(group, timeout)
        self._copy: npt.NDArray[np.uint8] | None = None
        if in_place:
            assert segment is not None
            data = Place(segment, offset, dtype)
        elif self.plan == "staged":
            data = Place(_native.local_memory(context, memory.address, memory.nbytes), 0, dtype)
        else:
            home = context.segment(memory.nbytes, notifications=0, group=group, timeout=timeout)
            self._copy = home.numpy()
            self._private = _raw(memory)
            data = Place(home, 0, dtype)
        options = options_for(context, self.plan, dtype, memory.count)
        shape = build(self.plan, group.rank, group.size, memory.count, kind=KINDS[op], **options)
        places = {"data": data}
        self.inbox_bytes = 0 if self._copy is None else memory.nbytes
        inbox = sum(n for name, n in shape.buffers.items() if name != "data")
        if inbox:
            own = context.segment(
                inbox * memory.dtype.itemsize, notifications=0, group=group, timeout=timeout
            )
            own.prefault()
            self.inbox_bytes += own.nbytes
            places["inbox"] = Place(own, 0, dtype)
        self._bound = bind_phases(
            context, group, self.plan, memory.count, KINDS[op], places, workspace.segment,
            workspace.take_notifications(shape.notifications), signature, **options,
        )  # fmt: skip
        self._phase = 0
        if len(self._bound) == 1 and self._copy is None:
            # The shortest way from Python to the core.
            self.run = self._bound[0].run  # type: ignore[method-assign]

    def run(self, timeout: float | None = None) -> Any:
        """Reduce the array; :meth:`start` and :meth:`wait` in one call."""
        if self._copy is None:
            bound = self._bound[self._phase]
            bound.run(timeout)
            self._phase = (self._phase + 1) % len(self._bound)
        else:
            self.start()
            self.wait(timeout)

    def __call__(self, timeout: float | None = None) -> None:
        """Reduce the array; see :meth:`Context.allreduce` for what it raises."""
        self.run(timeout)

    def start(self) -> None:
        """Begin; the array belongs to the exchange until :meth:`wait` returns."""
        if self._copy is not None:
            self._copy[: self._private.size] = self._private
        self._bound[self._phase].start()

    def wait(self, timeout: float | None = None) -> None:
        """Until the array holds the result. After a Timeout it can be waited for again."""
        self._bound[self._phase].wait(timeout)
        if self._copy is not None:
            self._private[:] = self._copy[: self._private.size]
        self._phase = (self._phase + 1) % len(self._bound)

    def __repr__(self) -> str:
        memory = self._memory
        return f"<Allreduce {self.op} of {memory.native_dtype} x {memory.count}, plan {self.plan}>"


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
        memory = _checked(array, op)
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

    REGION = 1 << 14
    REGIONS = 4

    def __init__(self, context: Context, group: Group, timeout: float | None) -> None:
        self.context = context
        self.group = group
        self.workspace = context.workspace(group, timeout)
        self.calls = _native.AllreduceCalls()
        self._first = self.workspace.take_notifications(self.REGION * self.REGIONS)
        self._regions: dict[str, int] = {}
        self._bound: dict[tuple[Any, ...], list[_native.BoundPlan]] = {}
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
        in_place = segment is not None and self.context.mapped
        name = choose(self.context, in_place) if plan is None else plan
        if name not in PLANS:
            raise PlanError(f"no plan named {name!r}; there are {', '.join(sorted(PLANS))}")
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
        if memory.count <= longest and name in ("staged", "gdraa-direct"):
            key = self._key(memory, memory.count, op, name, segment, offset)
            if key in self._bound:
                self.calls.remember(
                    array, op, plan, self._bound[key], self._regions[name], name == "staged", call
                )

    def _key(
        self, memory: Memory, count: int, op: str, name: str, segment: Segment | None, offset: int
    ) -> tuple[Any, ...]:
        """What tells plans apart; equal on all ranks, since their tags are made of it."""
        key = name, memory.native_dtype, count, op, memory.count
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
        # Small enough that every plan's inbox fits in as much memory again.
        rounds = max(1, (self.group.size - 1).bit_length())
        return self.workspace.copy_bytes // rounds // memory.dtype.itemsize // 64 * 64

    def _part(
        self, memory: Memory, op: str, name: str, count: int, where: int,
        segment: Segment | None, offset: int, resumed: bool, call: tuple[Any, ...],
        progress: int, timeout: float,
    ) -> None:  # fmt: skip
        dtype = memory.native_dtype
        key = self._key(memory, count, op, name, segment, offset)
        copies = name not in ("staged", "gdraa-direct")
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
        private = _raw(Memory(where, nbytes, memory.dtype, (count,), None)) if copies else None
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
        options = options_for(self.context, name, dtype)
        shape = build(name, self.group.rank, self.group.size, count, kind=KINDS[op], **options)
        if shape.notifications > self.REGION:
            raise PlanError(f"plan {name} needs {shape.notifications} notifications; use a handle")
        work = self.workspace
        start = 0 if name == "staged" else work.staged_bytes + work.copy_bytes
        places = {"data": data, "inbox": Place(self.workspace.segment, start, dtype)}
        phases = bind_phases(
            self.context, self.group, name, count, KINDS[op], places, self.workspace.segment,
            self._first + region * self.REGION, str(key), **options,
        )  # fmt: skip
        for bound in phases:
            bound.watch(self._first, self.REGION * self.REGIONS)
        self._bound[key] = phases
        return phases

    def describe(self) -> str:
        return (
            f"allreduce in {self.group}: {self.calls.number} executions, "
            f"{len(self._bound)} signatures, workspace {self.workspace.segment.nbytes} bytes"
        )
