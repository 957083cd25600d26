"""From a plan to something that runs: which memory its buffers are, and which notifications.

One :class:`Workspace` per group holds what collectives need besides the application's memory: a
board of notifications that cannot be confused with the application's, and staging space.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pgasdl import _native
from pgasdl.buffers import DTYPES
from pgasdl.errors import PlanError
from pgasdl.plans import PLANS, Call, Flush, Plan, Put, Reduce, Span, Step, Wait, build

if TYPE_CHECKING:
    from pgasdl.context import Context
    from pgasdl.group import Group
    from pgasdl.segment import Segment

_Span = tuple[int, int, int]
_Step = tuple[str, list[_Span], list[_Span], int, int, int, float, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a plan's buffer begins: the same segment and byte offset on every rank."""

    segment: _native.SegmentCore
    offset: int
    dtype: str


def lower(plan: Plan) -> list[list[_Step]]:
    """A plan's lanes as the core takes them: buffers by number, -1 for "none" and "my own"."""
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
    context: Context,
    group: Group,
    plan: Plan,
    places: dict[str, Place],
    board: Segment,
    first_notification: int,
    signature: str,
) -> _native.BoundPlan:
    """Resolve a plan's addresses; PlanError if anything would leave its memory.

    ``signature`` is what all ranks must agree on: a rank that runs something else on the same
    notifications is told so at once.
    """
    return _native.BoundPlan(
        context,
        plan.name,
        plan.rank,
        plan.size,
        plan.notifications,
        list(plan.buffers.items()),
        lower(plan),
        [(places[name].segment, places[name].offset, places[name].dtype) for name in plan.buffers],
        list(group.ranks),
        board,
        first_notification,
        zlib.crc32(signature.encode()),
    )


def bind_phases(
    context: Context,
    group: Group,
    name: str,
    count: int,
    kind: str,
    places: dict[str, Place],
    board: Segment,
    first_notification: int,
    signature: str,
    **options: int,
) -> list[_native.BoundPlan]:
    """Build and bind every phase of a plan; executions take them in turn."""
    phases = PLANS[name].phases
    bound = []
    for phase in range(phases):
        extra: dict[str, Any] = {**options, "phase": phase} if phases > 1 else {**options}
        plan = build(name, group.rank, group.size, count, kind=kind, **extra)
        bound.append(bind(context, group, plan, places, board, first_notification, signature))
    return bound


def options_for(
    group: Group, name: str, dtype: str, count: int | None = None, *, wire: bool = False
) -> dict[str, Any]:
    """Options a plan is built with here: how long a piece of a staged array is, what a node is,
    and whether its ranks load each other's memory, whatever lies between nodes.

    ``count`` : of an array with an inbox of its own, which need not be longer than that
    """
    if name not in PLANS:
        raise PlanError(f"no plan named {name!r}; there are {', '.join(sorted(PLANS))}")
    if "direct" in PLANS[name].options:
        direct = (group.mapped or group.context.mapped_inside) and not wire
        return {"group_size": group.node_size, "direct": int(direct)}
    if "piece" not in PLANS[name].options:
        return {}
    piece = piece_bytes(group.context) // DTYPES[dtype].itemsize
    return {"piece": piece if count is None else max(1, min(piece, count))}


def piece_bytes(context: Context) -> int:
    """Of a staged array: long enough to hide a latency, short enough to stay in a cache.

    Where ranks share cores every piece costs turns of the scheduler: fewer, longer ones.
    """
    return 512 << 10 if context.crowded else 128 << 10


class Workspace:
    """A group's own memory for collectives, made collectively by the first that needs it.

    A board, whose notifications cannot be confused with the application's; the inbox of ``staged``;
    and a copy's place with an inbox, for plans that need the array in a segment. The
    pages are made present once, here: a temporary allocated per call would fault per call.
    """

    NOTIFICATIONS = 1 << 20

    def __init__(self, context: Context, group: Group, timeout: float | None = None) -> None:
        self.staged_bytes = 8 * piece_bytes(context)
        self.copy_bytes = 4 * piece_bytes(context)
        self.segment = context.segment(
            self.staged_bytes + 2 * self.copy_bytes,
            notifications=self.NOTIFICATIONS,
            group=group,
            timeout=timeout,
        )
        self.copy = self.segment.numpy(np.uint8, self.staged_bytes, self.copy_bytes)
        self.segment.prefault()
        self._next_notification = 0

    def take_notifications(self, number: int) -> int:
        """The first of ``number`` ids that nobody else uses: the same on all ranks, which ask in
        the same order."""
        first = self._next_notification
        if first + number > self.NOTIFICATIONS:
            raise PlanError(
                f"more than {self.NOTIFICATIONS} notifications in use by the collectives of one "
                "group: delete handles that are not needed"
            )
        self._next_notification += number
        return first
