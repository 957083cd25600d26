"""Persistent collectives: one piece of memory, one kind of result, run any number of times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from pgasdl import _native
from pgasdl.buffers import ALIGNMENT, Memory, aligned, memory_of
from pgasdl.collectives.binding import ArrayAccess, PlanBuffer, Tags, bind, options_for
from pgasdl.collectives.policy import Choice
from pgasdl.collectives.reading import agree_on_reading
from pgasdl.collectives.resources import Resources, Steps
from pgasdl.collectives.selection import select, works_anywhere
from pgasdl.device.names import name_of
from pgasdl.device.streams import stream_handle
from pgasdl.errors import BufferRefused, PlanError
from pgasdl.group import Group
from pgasdl.plans import KINDS, spec_of
from pgasdl.plans.pieces import ArrayPlan, build_array, pieces_of
from pgasdl.plans.plan import ROOTED
from pgasdl.segment import Segment

# The kind of plan for each operator of an allreduce; the last three change what reductions do.
KIND_OF_OPERATOR = {"mean": "average", "sum": "sum", "min": "sum", "max": "sum", "prod": "sum"}


def kind_of(op: str) -> str:
    """Return the kind of plan for an operator of an allreduce."""
    if op not in KIND_OF_OPERATOR:
        known = ", ".join(KIND_OF_OPERATOR)
        raise BufferRefused(f"operator {op!r}: an allreduce takes {known}")
    return KIND_OF_OPERATOR[op]


def reduction_of(op: str) -> str:
    """Return what the reductions of its plan do to several arrays."""
    return "sum" if op == "mean" else op


def checked(array: Any, kind: str, reduction: str = "sum") -> Memory:
    """Describe an array; refuse it if collectives of this kind cannot work on it."""
    memory = memory_of(array, device=True)
    integers = memory.native_dtype.startswith("int")  # raises if the core cannot reduce the dtype
    if kind == "average" and integers:
        raise BufferRefused("the mean of integers is not an integer: sum, then divide")
    if reduction != "sum" and memory.device is not None:
        raise BufferRefused(f"{reduction} on {name_of(memory.device)}: a GPU does sums and means")
    return memory


def _memories(kind: str, array: Any, out: Any, reduction: str) -> tuple[Memory, Memory]:
    """Return the memory of the result and that of the contribution."""
    if kind not in KINDS or kind == "update":
        known = ", ".join(each for each in KINDS if each != "update")
        raise PlanError(
            f"no collective {kind!r}; there are {known}, and a GradientExchange for updates"
        )
    memory = checked(array if out is None else out, kind, reduction)
    if out is None:
        return memory, memory
    given = memory_of(array, writable=False, device=True)
    if given.device != memory.device:
        raise BufferRefused(
            f"out is on {name_of(memory.device)}, but the array on {name_of(given.device)}"
        )
    if (given.dtype, given.count) != (memory.dtype, memory.count):
        raise BufferRefused(
            f"out is {memory.dtype} x {memory.count}, but the array {given.dtype} x {given.count}"
        )
    return memory, given


class Collective:
    """A persistent collective on one piece of memory.

    Made by :meth:`Context.collective_handle` and :meth:`Context.allreduce_handle`.
    ``handle()`` runs it. ``handle.start()`` and ``handle.wait()`` overlap it with computation;
    several handles may be under way at once, in any order, which may differ between ranks.
    Until it is closed, what it works on (a ``bytearray``, say) cannot be resized: BufferError.
    Close it, or use it in a ``with`` statement, to give up its memory and notifications.

    Attributes
    ----------
    kind
        Kind of result, as for :meth:`Context.collective_handle`.
    plan
        Name of the algorithm.
    inbox_bytes
        Memory that it needs on this rank besides the array.
    closed
        Whether it was closed.
    """

    def __init__(
        self,
        resources: Resources,
        kind: str,
        array: Any,
        out: Any,
        group: Group,
        plan: str | None,
        timeout: float | None,
        options: dict[str, int],
        reduction: str = "sum",
    ) -> None:
        self.context = resources.core
        self._resources = resources
        self.group = group
        self.kind = kind
        self._reduction = reduction
        self._memory, self._given = _memories(kind, array, out, reduction)
        # Where the plan works: beside the array, or on the host where no peer reaches a GPU.
        self._device = self._memory.device if resources.maps_gpus else None
        self._staged = self._memory.device is not None and self._device is None
        self.closed = False
        limit = self.context._seconds(timeout)
        # Errors are raised before the first collective step.
        if plan is not None:
            self._build(plan, options)
        elif kind in ROOTED:
            self._build(select(resources.policy, group, kind, 0, in_place=False).plan, options)
        with Steps(resources.unfinished, group, self._call(plan, options), limit) as steps:
            self._make(steps, plan, options)

    def _call(self, plan: str | None, options: dict[str, int]) -> str:
        return (
            f"the making of a {self.kind} handle, plan {plan}, options {options}, of "
            f"{self._memory.nbytes} bytes at {self._memory.address:#x}"
        )

    def _build(self, plan: str, options: dict[str, int]) -> ArrayPlan:
        group, memory = self.group, self._memory
        here = options_for(group, plan, memory.native_dtype, memory.count, device=self._device)
        pieces: tuple[int, ...] = (memory.count,)
        if self._staged:  # it is copied from a GPU in pieces, and back
            piece = self._resources.gpu_piece // memory.dtype.itemsize
            pieces = pieces_of(spec_of(plan), self.kind, memory.count, piece)
        chosen = {**here, **options}
        return build_array(plan, group.rank, group.size, pieces, kind=self.kind, **chosen)

    def _make(self, steps: Steps, plan: str | None, options: dict[str, int]) -> None:
        resources, group, memory = self._resources, self.group, self._memory
        dtype = memory.native_dtype
        staged_here = self._staged
        wanted = f"{plan or 'auto'} {sorted(options.items())}" if options else plan or "auto"
        works_on = "" if memory.device is None else "on a GPU: "
        if staged_here:
            works_on = f"copied from a GPU in pieces of {resources.gpu_piece} bytes: "
        what = self.kind if self._reduction == "sum" else self._reduction
        signature = f"{works_on}{dtype} x {memory.count} {what} {wanted}"
        homes = self._homes(steps, f"collective {signature}")
        in_place = bool(homes)
        # An array on a GPU is copied: the device does it in less time than a flag takes.
        on_gpu = memory.device is not None
        choice = self._choose(steps, plan, in_segments=in_place or on_gpu)
        self.plan = choice.plan
        built = self._build(self.plan, {**dict(choice.options), **options})
        shape = built.first
        # The handle's own segment: notifications, the plan's inbox and, if needed, a copy.
        rebased = works_anywhere(self.plan, group.members) and not in_place and not on_gpu
        reads = rebased and spec_of(self.plan).works_on == "readable"
        copied = 0 if in_place or rebased else aligned(memory.nbytes)
        inbox = sum(n for name, n in shape.buffers.items() if name != "data")
        self.inbox_bytes = copied + inbox * memory.dtype.itemsize
        entry = aligned(self.inbox_bytes)  # of a directory
        self._segment = steps(
            lambda: resources.segments.make(
                group,
                entry + ALIGNMENT if reads else self.inbox_bytes,
                shape.notifications + group.size,
                steps.left,
                self._device,
            )
        )
        self._segment.prefault()
        if staged_here:
            self._segment.pin()
        self._pooled = in_place and homes[group.rank][0].pooled
        if in_place:
            data = PlanBuffer(*homes[group.rank], dtype, homes)
            how = _native.BufferAccess.IN_PLACE
        elif rebased:
            home = _native.local_memory(self.context, memory.address, memory.nbytes, -1)
            directory = _native.Directory(self._segment, entry, []) if reads else None
            data = PlanBuffer(home, 0, dtype, directory=directory)
            how = _native.BufferAccess.REBASED
        else:
            data, how = PlanBuffer(self._segment, 0, dtype), _native.BufferAccess.COPIED
        source = self._given.address
        if source != memory.address:
            how = _native.BufferAccess.COPIED
        self._execution = bind(
            group,
            built,
            {"data": data, "inbox": PlanBuffer(self._segment, copied, dtype)},
            Tags(
                _native.Numbering(self._segment, 0, shape.notifications),
                0,
                f"{signature} {self.plan}",
            ),
            ArrayAccess(
                how,
                source,
                memory.address,
                memory.nbytes,
                -1 if memory.device is None else memory.device,
            ),
            self._reduction,
        )
        if memory.device is None:
            self.run = self._execution.run  # type: ignore[assignment]  # the shortest way

    def _choose(self, steps: Steps, plan: str | None, *, in_segments: bool) -> Choice:
        """Return the named or the selected plan; refuse one that cannot reach the arrays."""
        group, memory = self.group, self._memory
        readable = False
        may_read = plan is None or spec_of(plan).works_on == "readable"
        if memory.device is None and not in_segments and may_read:
            agree_on_reading(group, steps)
            readable = group.unreadable == ""
        if plan:
            choice = Choice(plan)
        else:
            choice = select(
                self._resources.policy,
                group,
                self.kind,
                memory.nbytes,
                in_place=in_segments,
                readable=readable,
            )
        works_on = spec_of(choice.plan).works_on
        if works_on == "mapped" and not (in_segments and group.mapped):
            raise PlanError(
                f"plan {choice.plan} needs the array in a segment on every rank, known to all of "
                "them, and a transport that maps it"
            )
        if works_on == "readable" and not (in_segments or readable):
            why = group.unreadable or "they are on a GPU"
            raise PlanError(f"plan {choice.plan} reads peers' arrays where they lie: {why}")
        return choice

    def _homes(self, steps: Steps, what: str) -> tuple[tuple[Segment, int], ...]:
        """Return where each member's array lies, if all lie in segments that all members know."""
        group, segments = self.group, self._resources.segments
        segment, offset = (None, 0) if self._staged else segments.at(self._memory)
        mine = b"" if segment is None else f"{segment.id} {offset}".encode()
        segment, places = steps(lambda: (segment, group.allgather(what, mine, steps.left)))
        if segment is None or not all(places):
            return ()
        ids, offsets = zip(*(map(int, place.split()) for place in places), strict=True)
        if set(ids) == {segment.id}:
            return tuple((segment, at) for at in offsets)

        def agree() -> tuple[tuple[Segment, int], ...]:
            found = tuple((segments.of(id_), at) for id_, at in zip(ids, offsets, strict=True))
            known = tuple((home, at) for home, at in found if home is not None)
            verdict = b"known" if len(known) == group.size else b""
            verdicts = group.allgather(f"{what}, places", verdict, steps.left)
            return known if all(verdicts) else ()

        return steps(agree)

    def run(self, *, timeout: float | None = None, stream: object = None) -> None:
        """Run it: :meth:`start` and :meth:`wait` in one call.

        After a Timeout, Ctrl-C or an exception in an update, the same call continues. On a GPU a
        stream makes it, and the call does not wait, as in :meth:`Context.allreduce`.
        """
        handle = self._stream(stream)
        if handle is None:
            self._execution.run(timeout=timeout)
        else:
            self._execution.run_after(handle, None, timeout=timeout)

    def __call__(self, *, timeout: float | None = None, stream: object = None) -> None:
        """Run it; see :meth:`Context.allreduce` for what it raises."""
        if stream is not None:
            self.run(timeout=timeout, stream=stream)
        elif timeout is None:  # a named argument costs a fifth of the whole call
            self.run()
        else:
            self.run(timeout=timeout)

    def _stream(self, stream: object) -> int | None:
        """Return the handle of the stream that orders it; None: it is on the host."""
        if self._memory.device is not None:
            return stream_handle(stream, self._memory.device)
        if stream is not None:
            raise BufferRefused(
                "a stream orders collectives on memory of a GPU; this is the host's"
            )
        return None

    def start(self, *, stream: object = None) -> None:
        """Start it. The memory belongs to the collective until :meth:`wait` returns.

        Parameters
        ----------
        stream : object, optional
            Of memory on a GPU: it starts when this stream has done what was enqueued on it before;
            None: PyTorch's or CuPy's current one.

        Raises
        ------
        PlanError
            It is under way.
        ClosedError
            It was closed.
        PeerLost, MismatchError
            An earlier execution failed in this way: make another handle.
        """
        handle = self._stream(stream)
        if handle is None:
            self._execution.start()
        else:
            self._execution.start_after(handle)

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait for the result. After a Timeout, the next call continues.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.
        """
        self._execution.wait(timeout=timeout)

    def close(self) -> None:
        """Give up its notifications and memory. Idempotent, not collective.

        An execution under way is abandoned: this rank no longer advances it, and the other
        ranks' waits for it end in a Timeout; but one that a stream makes is
        finished first. A ``with`` statement closes it, too.
        """
        if self.closed:
            return
        self.closed = True
        idle = self._execution.idle
        self._keep_array()
        self._execution.close()
        self._memory = replace(self._memory, owner=None)
        self._given = replace(self._given, owner=None)
        # Peers that write by address may still write here: the memory then stays until the end.
        if not self.context.closed and (idle or self.group.mapped):
            self._segment.delete()

    def _keep_array(self) -> None:
        """Keep an array of the pool that others may write to: no other one may get its memory."""
        if self._pooled and not self._execution.idle and not self.context.closed:
            self._resources.abandoned.append(self._memory.owner)

    def __del__(self) -> None:
        if hasattr(self, "_execution") and not self.closed:
            self._keep_array()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        memory = self._memory
        return (
            f"<Collective {self.kind} of {memory.native_dtype} x {memory.count}, plan {self.plan}>"
        )
