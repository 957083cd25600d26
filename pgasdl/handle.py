"""Persistent collectives: one piece of memory, one kind of result, run any number of times."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.buffers import Memory, memory_of
from pgasdl.choosing import choose
from pgasdl.collective import Place, bind_phases, options_for
from pgasdl.errors import BufferRefused, PlanError
from pgasdl.plans import KINDS, build
from pgasdl.policy import Choice

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group

# What an allreduce's operators are as kinds of plans.
OPERATORS = {"mean": "average", "sum": "sum"}


def kind_of(op: str) -> str:
    """The kind of plan that an allreduce with this operator takes."""
    if op not in OPERATORS:
        raise BufferRefused(f'operator {op!r}: an allreduce takes "mean" or "sum"')
    return OPERATORS[op]


def checked(array: Any, kind: str) -> Memory:
    """Describe an array that a collective of a kind may work on."""
    memory = memory_of(array)
    if kind == "average" and memory.native_dtype.startswith("int"):
        raise BufferRefused("the mean of integers is not an integer: sum, then divide")
    return memory


def raw(memory: Memory) -> npt.NDArray[np.uint8]:
    """A byte view of described memory."""
    bytes_there = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    return np.frombuffer(memoryview(bytes_there), np.uint8)


class Collective:
    """A persistent collective on one piece of memory, made by :meth:`Context.collective_handle`
    and :meth:`Context.allreduce_handle`.

    ``handle()`` runs it. ``handle.start()`` and ``handle.wait()`` overlap it with computation;
    several handles may be under way at once, in any order, also different ones on different ranks.

    Attributes
    ----------
    kind : what the result is
    plan : name of the algorithm
    inbox_bytes : memory it needs on this rank besides the array
    """

    def __init__(
        self,
        context: Context,
        kind: str,
        array: Any,
        out: Any,
        group: Group,
        plan: str | None,
        timeout: float | None,
        options: dict[str, int],
    ) -> None:
        if kind not in KINDS or kind == "update":
            known = ", ".join(each for each in KINDS if each != "update")
            raise PlanError(
                f"no collective {kind!r}; there are {known}, and a GradientExchange for updates"
            )
        self.context = context
        self.kind = kind
        self._memory = memory = checked(array if out is None else out, kind)
        self._target = raw(memory)
        self._source: npt.NDArray[np.uint8] | None = None
        if out is not None:
            given = memory_of(array, writable=False)
            if (given.dtype, given.count) != (memory.dtype, memory.count):
                raise BufferRefused(
                    f"out is {memory.dtype} x {memory.count}, but the array {given.dtype} x "
                    f"{given.count}"
                )
            self._given, self._source = given, raw(given)
        dtype = memory.native_dtype
        segment, offset = context.segments.at(memory)
        place = "none" if segment is None else f"segment {segment.id} at {offset}"
        wanted = f"{plan or 'auto'} {sorted(options.items())}" if options else plan or "auto"
        signature = f"{dtype} x {memory.count} {kind} {wanted}"
        places_of = set(group.allgather(f"collective {signature}", place.encode(), timeout))
        in_place = len(places_of) == 1 and segment is not None
        choice = Choice(plan) if plan else choose(
            context, group, kind, memory.nbytes, in_place=in_place
        )  # fmt: skip
        self.plan = choice.plan
        if self.plan == "gdraa-direct" and not (in_place and group.mapped):
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
            data = Place(home, 0, dtype)
        here = options_for(group, self.plan, dtype, memory.count)
        chosen = {**here, **dict(choice.options), **options}
        shape = build(self.plan, group.rank, group.size, memory.count, kind=kind, **chosen)
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
            context, group, self.plan, memory.count, kind, places, workspace.segment,
            workspace.take_notifications(shape.notifications), signature, **chosen,
        )  # fmt: skip
        self._phase = 0
        if len(self._bound) == 1 and self._copy is None and self._source is None:
            # The shortest way from Python to the core.
            self.run = self._bound[0].run  # type: ignore[method-assign]

    def run(self, timeout: float | None = None) -> Any:
        """Run it; :meth:`start` and :meth:`wait` in one call."""
        if self._copy is None and self._source is None:
            bound = self._bound[self._phase]
            bound.run(timeout)
            self._phase = (self._phase + 1) % len(self._bound)
        else:
            self.start()
            self.wait(timeout)

    def __call__(self, timeout: float | None = None) -> None:
        """Run it; see :meth:`Context.allreduce` for what it raises."""
        self.run(timeout)

    def start(self) -> None:
        """Begin; the memory belongs to the collective until :meth:`wait` returns."""
        given = self._target if self._source is None else self._source
        home = self._target if self._copy is None else self._copy
        if home is not given:
            home[: given.size] = given
        self._bound[self._phase].start()

    def wait(self, timeout: float | None = None) -> None:
        """Until the result is there. After a Timeout it can be waited for again."""
        self._bound[self._phase].wait(timeout)
        if self._copy is not None:
            self._target[:] = self._copy[: self._target.size]
        self._phase = (self._phase + 1) % len(self._bound)

    def __repr__(self) -> str:
        memory = self._memory
        return (
            f"<Collective {self.kind} of {memory.native_dtype} x {memory.count}, plan {self.plan}>"
        )
