"""Binding: gives a plan's buffers memory, and its notifications numbers, so that it can run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import Call, Copy, Flush, Plan, Put, Reduce, Span, Step, Wait, spec_of
from pgasdl.plans.pieces import ArrayPlan
from pgasdl.topology import Topology

_Span = tuple[int, int, int]
_Rows = tuple[int, int, int]
_Step = tuple[str, list[_Span], list[_Span], int, int, int, float, str, _Rows]
_Lowered = tuple[str, int, int, int, list[tuple[str, int]], list[list[_Step]]]


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Where a plan's buffer begins.

    Attributes
    ----------
    segment, offset
        This rank's copy: its segment, and the bytes before it.
    homes
        The same of each member; empty: all are as this rank's.
    directory
        Where members tell, in each execution, where their copies begin; None: they never move.
    """

    segment: _native.SegmentCore
    offset: int
    dtype: str
    homes: tuple[tuple[_native.SegmentCore, int], ...] = ()
    directory: _native.Directory | None = None


@dataclass(frozen=True, slots=True)
class ArrayAccess:
    """How a plan gets at the caller's array.

    Attributes
    ----------
    access : BufferAccess
        In place, rebased or copied.
    source, target : int
        Addresses of the contribution and of the result; 0: each run names them.
    nbytes : int
        Length of the array.
    device : int
        The GPU that it lies on; -1: the host.
    """

    access: _native.BufferAccess
    source: int = 0
    target: int = 0
    nbytes: int = 0
    device: int = -1


IN_PLACE = ArrayAccess(_native.BufferAccess.IN_PLACE)


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks that tell the notifications of an execution from those of others.

    Attributes
    ----------
    numbering : Numbering
        Numbers the executions.
    first_notification : int
        Where the plan's notifications begin.
    signature : str
        All ranks must agree on it: a rank that runs something else on the same notifications is
        told so at once.
    """

    numbering: _native.Numbering
    first_notification: int
    signature: str

    @property
    def digest(self) -> int:
        """The signature in 64 bits."""
        digest = hashlib.blake2b(self.signature.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _lowered(plan: Plan) -> _Lowered:
    """Lower a plan to the core's form: buffers by number, -1 for "none" and "my own"."""
    numbers = {name: number for number, name in enumerate(plan.buffers)}

    def span(of: Span) -> _Span:
        return numbers[of.buffer], of.offset, -1 if of.rank is None else of.rank

    def step(of: Step) -> _Step:
        targets: list[_Span] = []
        sources: list[_Span] = []
        n, peer, flag, scale, hook, rows = 0, -1, -1, 1.0, "", (1, 0, 0)
        match of:
            case Put(src, n, peer, dst, notify):
                kind, flag = "put", -1 if notify is None else notify
                targets, sources = ([span(dst)], [span(src)]) if n > 0 else ([], [])
            case Wait(flag, owing):
                kind, peer = "wait", -1 if owing is None else owing
            case Reduce(dsts, srcs, n, scale):
                kind, targets, sources = "reduce", list(map(span, dsts)), list(map(span, srcs))
            case Copy(dst, src, n, number, dst_step, src_step):
                kind, targets, sources = "copy", [span(dst)], [span(src)]
                rows = number, dst_step, src_step
                if number == 1 or dst_step == src_step == n:  # one run of elements
                    kind, n, rows = "reduce", of.total, (1, 0, 0)
            case Call(hook, at, n):
                kind, targets = "call", [span(at)]
            case Flush():
                kind = "flush"
            case _:
                raise PlanError(f"plan {plan.name}: no step {of!r}")
        return kind, targets, sources, n, peer, flag, scale, hook, rows

    lanes = [[step(of) for of in lane] for lane in plan.lanes]
    buffers = list(plan.buffers.items())
    return plan.name, plan.rank, plan.size, plan.notifications, buffers, lanes


def bind(
    group: Group,
    plan: ArrayPlan,
    buffers: dict[str, PlanBuffer],
    tags: Tags,
    array: ArrayAccess,
    op: str = "sum",
) -> _native.Execution:
    """Resolve a plan's addresses.

    Parameters
    ----------
    buffers : dict[str, PlanBuffer]
        Where the plan's buffers are.
    op : str, default "sum"
        Its reductions do this, on the host also "min", "max" or "prod".

    Raises
    ------
    PlanError
        Something would leave its memory.
    """
    places = [buffers[name] for name in plan.first.buffers]
    return _native.Execution(
        group.context,
        [_lowered(phase) for phase in plan.phases],
        [
            (place.segment, place.offset, place.dtype, list(place.homes), place.directory)
            for place in places
        ],
        list(group.ranks),
        tags.numbering,
        tags.first_notification,
        tags.digest,
        array.access,
        array.source,
        array.target,
        array.nbytes,
        array.device,
        [list(zip(plan.pieces, lanes, strict=True)) for lanes in plan.lanes],
        op,
    )


def options_for(
    group: Group,
    name: str,
    dtype: str,
    count: int | None = None,
    *,
    device: int | None = None,
) -> dict[str, Any]:
    """Return the options that depend on this job: piece length, node size, mapped memory.

    ``count`` : elements of an array with an inbox of its own; a piece is never longer
    ``device`` : the GPU that the plan works on; None: the host
    """
    piece = piece_bytes(group.topology, device) // DTYPES[dtype].itemsize
    options: dict[str, Any] = spec_of(name).options_of(group.members, piece)
    if count is not None and "piece" in options:
        options["piece"] = max(1, min(options["piece"], count))
    return options


def piece_bytes(topology: Topology, device: int | None = None) -> int:
    """Return the length of a staged array's piece: it hides a latency and fits in a cache.

    Where ranks share cores, every piece costs turns of the scheduler, so pieces are longer. On a
    GPU a piece costs a launch of a kernel, in which memory moves megabytes.
    """
    if device is not None:
        return 16 << 20
    if topology.oversubscribed:
        return 512 << 10
    # Measured with two ranks on two cores (EPYC), from 1 to 64 MB: staging takes 0.4 to 1.0 of its
    # time with 128 KiB. Memory that is not mapped was not measured with more.
    return 256 << 10 if topology.mapped_on_host else 128 << 10
