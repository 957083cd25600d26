"""From a plan to something that runs: which memory its buffers are, and which notifications."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.errors import PlanError
from pgasdl.group import Group
from pgasdl.plans import PLANS, Call, Flush, Plan, Put, Reduce, Span, Step, Wait, build, spec_of
from pgasdl.topology import Topology

_Span = tuple[int, int, int]
_Step = tuple[str, list[_Span], list[_Span], int, int, int, float, str]


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Where a plan's buffer begins: the same segment and byte offset on every rank."""

    segment: _native.SegmentCore
    offset: int
    dtype: str


def lower(plan: Plan) -> list[list[_Step]]:
    """Lower a plan's lanes to the core's form: buffers by number, -1 for "none" and "my own"."""
    numbers = {name: number for number, name in enumerate(plan.buffers)}

    def span(of: Span) -> _Span:
        return numbers[of.buffer], of.offset, -1 if of.rank is None else of.rank

    def step(of: Step) -> _Step:
        match of:
            case Put(src, n, peer, dst, notify):
                flag = -1 if notify is None else notify
                moves = n > 0
                return (
                    "put", [span(dst)] if moves else [], [span(src)] if moves else [],
                    n, peer, flag, 1.0, "",
                )  # fmt: skip
            case Wait(notification, peer):
                return "wait", [], [], 0, -1 if peer is None else peer, notification, 1.0, ""
            case Reduce(dsts, srcs, n, scale):
                return "reduce", list(map(span, dsts)), list(map(span, srcs)), n, -1, -1, scale, ""
            case Call(hook, at, n):
                return "call", [span(at)], [], n, -1, -1, 1.0, hook
            case Flush():
                return "flush", [], [], 0, -1, -1, 1.0, ""
        raise PlanError(f"plan {plan.name}: no step {of!r}")

    return [[step(of) for of in lane] for lane in plan.lanes]


def bind(
    group: Group,
    name: str,
    count: int,
    kind: str,
    buffers: dict[str, PlanBuffer],
    numbering: _native.Numbering,
    first_notification: int,
    signature: str,
    array: tuple[_native.BufferAccess, int, int, int] = (_native.BufferAccess.IN_PLACE, 0, 0, 0),
    **options: Any,
) -> _native.Execution:
    """Build every phase of a plan and resolve its addresses.

    PlanError if anything would leave its memory.

    Parameters
    ----------
    buffers : dict[str, PlanBuffer]
        Where the plan's buffers are, the same on every rank.
    numbering : Numbering
        Numbers the executions; the plan's notifications begin at ``first_notification``.
    signature : str
        What all ranks must agree on: a rank that runs something else on the same notifications is
        told so at once.
    array : tuple[BufferAccess, int, int, int], default (_native.BufferAccess.IN_PLACE, 0, 0, 0)
        How the plan gets at the caller's array, its address as a source and as a target, bytes.
    **options : object
        Of the plan.
    """
    phases = PLANS[name].phases
    extra: list[dict[str, Any]] = [{"phase": phase} for phase in range(phases)]
    plans = [
        build(name, group.rank, group.size, count, kind=kind, **options, **each)
        for each in (extra if phases > 1 else [{}])
    ]
    access, source, target, nbytes = array
    return _native.Execution(
        group.context,
        [
            (plan.name, plan.rank, plan.size, plan.notifications, list(plan.buffers.items()),
             lower(plan))
            for plan in plans
        ],
        [(buffers[of].segment, buffers[of].offset, buffers[of].dtype) for of in plans[0].buffers],
        list(group.ranks),
        numbering,
        first_notification,
        int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=8).digest(), "little"),
        access,
        source,
        target,
        nbytes,
    )  # fmt: skip


def options_for(
    group: Group, name: str, dtype: str, count: int | None = None, *, wire: bool = False
) -> dict[str, Any]:
    """Return the options a plan is built with here.

    How long a piece of a staged array is, what a node is, and whether its ranks load each other's
    memory, whatever lies between nodes.

    ``count`` : of an array with an inbox of its own, which need not be longer than that
    """
    spec = spec_of(name)
    if "direct" in spec.options:
        direct = (group.mapped or group.topology.mapped_on_host) and not wire
        return {"group_size": group.node_size, "direct": int(direct)}
    if "piece" not in spec.options:
        return {}
    piece = piece_bytes(group.topology) // DTYPES[dtype].itemsize
    return {"piece": piece if count is None else max(1, min(piece, count))}


def piece_bytes(topology: Topology) -> int:
    """Of a staged array: long enough to hide a latency, short enough to stay in a cache.

    Where ranks share cores every piece costs turns of the scheduler: fewer, longer ones.
    """
    return 512 << 10 if topology.oversubscribed else 128 << 10
