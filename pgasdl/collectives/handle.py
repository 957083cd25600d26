"""Persistent collectives: one piece of memory, one kind of result, run any number of times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from pgasdl import _native
from pgasdl._native import BufferAccess
from pgasdl.buffers import Memory, aligned, memory_of
from pgasdl.collectives.bound import (
    ArrayAccess,
    Home,
    Place,
    PlanBuffer,
    Tags,
    bind,
    build,
    checked,
    choose,
    on_gpu,
    options_for,
    select,
)
from pgasdl.collectives.state import CollectiveState
from pgasdl.device.names import name_of
from pgasdl.device.streams import stream_handle
from pgasdl.errors import BufferRefusedError, PlanError
from pgasdl.group import Group, Steps
from pgasdl.plans import KINDS
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.plans.plan import ROOTED


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
        raise BufferRefusedError(
            f"out is on {name_of(memory.device)}, but the array on {name_of(given.device)}"
        )
    if (given.dtype, given.count) != (memory.dtype, memory.count):
        raise BufferRefusedError(
            f"out is {memory.dtype} x {memory.count}, but the array {given.dtype} x {given.count}"
        )
    return memory, given


class Collective:
    """A persistent collective on one piece of memory.

    Made by :meth:`Context.collective_handle` and :meth:`Context.allreduce_handle`.
    ``handle()`` runs it. ``handle.start()`` and ``handle.wait()`` overlap it with computation;
    several handles may be under way at once, in any order, which may differ between ranks.
    Until it is closed, what it works on (a ``bytearray``, say) cannot be resized: BufferError.
    Close it, or use it in a ``with`` statement, to release its memory and notifications.

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
        state: CollectiveState,
        kind: str,
        array: Any,
        out: Any,
        group: Group,
        plan: str | None,
        timeout: float | None,
        options: dict[str, int],
        reduction: str = "sum",
    ) -> None:
        self.context = state.core
        self._state = state
        self.group = group
        self.kind = kind
        self._reduction = reduction
        self._memory, self._given = _memories(kind, array, out, reduction)
        # Where the plan works: beside the array, or on the host where no peer reaches a GPU.
        self._device = state.place_on(self._memory.device)
        self._by_host = self._memory.device is not None and self._device is None
        self.closed = False
        limit = self.context._seconds(timeout)
        # Errors are raised before the first collective step.
        if plan is not None:
            self._build(plan, options, BufferAccess.COPIED)
        elif kind in ROOTED:
            usual = select(state.policy, group, kind, 0, in_place=False)
            self._build(usual.plan, options, BufferAccess.COPIED)
        with Steps(state.unfinished, group, self._call(plan, options), limit) as steps:
            self._make(steps, plan, options)

    def _call(self, plan: str | None, options: dict[str, int]) -> str:
        return (
            f"the making of a {self.kind} handle, plan {plan}, options {options}, of "
            f"{self._memory.nbytes} bytes at {self._memory.address:#x}"
        )

    def _build(self, plan: str, options: dict[str, Any], access: BufferAccess) -> ArrayPlan:
        group, memory = self.group, self._memory
        here = options_for(group, plan, memory.native_dtype, memory.count, device=self._device)
        copied = self._by_host and access == BufferAccess.COPIED  # in pieces from a GPU, and back
        piece = self._state.gpu_piece // memory.dtype.itemsize if copied else 0
        return build(group, plan, self.kind, memory.count, {**here, **options}, piece)

    def _make(self, steps: Steps, plan: str | None, options: dict[str, int]) -> None:
        state, group, memory = self._state, self.group, self._memory
        signature = self._signature(plan, options)
        place = self._place(steps, f"collective {signature}")
        choice, how = choose(state, group, self.kind, place, plan)
        self.plan = choice.plan
        built = self._build(self.plan, {**dict(choice.options), **options}, how)
        shape = built.first
        # The handle's own segment: notifications, the plan's inbox and, if needed, a copy.
        copied = aligned(memory.nbytes) if how == BufferAccess.COPIED else 0
        inbox = sum(n for name, n in shape.buffers.items() if name != "data")
        self.inbox_bytes = copied + inbox * memory.dtype.itemsize
        self._segment = segment = steps(
            lambda: state.segments.make(
                group,
                self.inbox_bytes,
                shape.notifications + group.size,
                steps.left,
                self._device,
                workspace=True,
            )
        )
        segment.prefault()
        if place.by_host:
            segment.pin(memory.device)
        self._pooled = bool(place.homes) and place.homes[group.rank][0].pooled
        data = place.data(how, group, memory.nbytes, (segment, 0))
        source = self._given.address
        if source != memory.address:
            how = BufferAccess.COPIED
        numbers = _native.Numbering(segment, 0, shape.notifications)
        self._execution = bind(
            group,
            built,
            {"data": data, "inbox": PlanBuffer(segment, copied, memory.native_dtype)},
            Tags(numbers, 0, f"{signature} {self.plan}"),
            ArrayAccess(how, source, memory.address, memory.nbytes, on_gpu(memory)),
            self._reduction,
        )
        if memory.device is None:
            self.run = self._execution.run  # type: ignore[assignment]  # the shortest way

    def _place(self, steps: Steps, what: str) -> Place:
        """Place the array; members exchange where theirs lie. Collective."""
        segments, group = self._state.segments, self.group
        memory, device = self._memory, self._device
        segment, offset = (None, 0) if self._by_host else segments.at(memory)
        mine = b"" if segment is None else f"{segment.id} {offset}".encode()
        segment, places = steps(lambda: (segment, group.allgather(what, mine, steps.left)))
        if segment is None or not all(places):
            return Place(memory, device, told=True)
        ids, offsets = zip(*(map(int, place.split()) for place in places), strict=True)
        if set(ids) == {segment.id}:
            return Place(memory, device, tuple((segment, at) for at in offsets), told=True)

        def agree() -> tuple[Home, ...]:
            found = tuple((segments.of(id_), at) for id_, at in zip(ids, offsets, strict=True))
            known = tuple((home, at) for home, at in found if home is not None)
            verdict = b"known" if len(known) == group.size else b""
            verdicts = group.allgather(f"{what}, places", verdict, steps.left)
            return known if all(verdicts) else ()

        return Place(memory, device, steps(agree), told=True)

    def _signature(self, plan: str | None, options: dict[str, int]) -> str:
        """Name what all members must make."""
        memory = self._memory
        wanted = f"{plan or 'auto'} {sorted(options.items())}" if options else plan or "auto"
        works_on = "" if memory.device is None else "on a GPU: "
        if self._by_host:
            works_on = f"copied from a GPU in pieces of {self._state.gpu_piece} bytes: "
        what = self.kind if self._reduction == "sum" else self._reduction
        return f"{works_on}{memory.native_dtype} x {memory.count} {what} {wanted}"

    def run(self, *, timeout: float | None = None, stream: object = None) -> None:
        """Run it: :meth:`start` and :meth:`wait` in one call.

        After a timeout, Ctrl-C or an exception in an update, the same call continues. On a GPU a
        stream runs it, and the call does not wait, as in :meth:`Context.allreduce`.
        """
        handle = self._stream(stream)
        if handle is None:
            self._execution.run(timeout=timeout)
        else:
            self._execution.run_after(handle, timeout=timeout)

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
            raise BufferRefusedError(
                "a stream orders collectives on memory of a GPU; this is the host's"
            )
        return None

    def start(self, *, stream: object = None) -> None:
        """Start it. The memory belongs to the collective until :meth:`wait` returns.

        Parameters
        ----------
        stream : object, optional
            On a GPU, it starts when this stream has done everything that was enqueued before;
            None: PyTorch's or CuPy's current one.

        Raises
        ------
        PlanError
            It is under way.
        ClosedError
            It was closed.
        PeerLostError, MismatchError
            An earlier execution failed in this way: make another handle.
        """
        handle = self._stream(stream)
        if handle is None:
            self._execution.start()
        else:
            self._execution.start_after(handle)

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait for the result. After a timeout, the next call continues.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.
        """
        self._execution.wait(timeout=timeout)

    def close(self) -> None:
        """Release its notifications and memory. Idempotent, not collective.

        An execution under way is abandoned: this rank no longer advances it, and the other ranks'
        waits for it end in a timeout. One that a stream runs is finished first. A ``with``
        statement closes it, too.
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
            self._state.abandoned.append(self._memory.owner)

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
