"""Plans of an array in pieces: each piece is exchanged by itself, and all in one execution.

So a piece can be copied from a GPU, or back, while another travels. The plan of the whole array has
the lanes of all pieces, and their buffers lie one after the other. Proofs of the pieces prove the
whole, because no step of one piece touches another's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pgasdl.errors import PlanError
from pgasdl.plans.algorithms.blocks import equal_pieces
from pgasdl.plans.plan import (
    EXCHANGES,
    ROOTED,
    Call,
    Copy,
    Flush,
    Members,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Span,
    Step,
    Wait,
)
from pgasdl.plans.registry import build, spec_of

# A plan in the core's form.
CoreSpan = tuple[int, int, int]
CoreStep = tuple[
    str, list[CoreSpan], list[CoreSpan], int, int, int, float, str, tuple[int, int, int]
]
Lowered = tuple[str, int, int, int, list[tuple[str, int]], list[list[CoreStep]]]
# Every piece needs notifications of its own.
MOST_PIECES = 16
# Kinds that treat each element alike, wherever it lies.
_KINDS = (*EXCHANGES, *ROOTED)


def pieces_of(spec: PlanSpec, kind: str, count: int, piece: int) -> tuple[int, ...]:
    """Return the elements of each piece of an array: about ``piece``, and 16 pieces at most.

    Where the order of additions depends on the place in the array, it stays whole: in pieces it
    would have other bits.

    >>> from pgasdl.plans import PLANS
    >>> pieces_of(PLANS["gdraa"], "average", 100, 48)
    (48, 48, 4)
    >>> pieces_of(PLANS["ring"], "average", 100, 48)
    (100,)
    """
    if kind not in _KINDS or not spec.by_element or count <= piece:
        return (count,)
    longest = max(piece, -(-count // MOST_PIECES))
    return tuple(n for _, n in equal_pieces(count, longest)[1])


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One rank's plan of an array, as it is bound to memory."""

    phases: tuple[Plan, ...]  # the plan of each phase; executions take them in turn
    pieces: tuple[int, ...]  # elements of each piece of the array
    lanes: tuple[tuple[int, ...], ...]  # for each phase how many lanes each piece has

    @property
    def first(self) -> Plan:
        """The plan of the first phase. All have the same buffers and notifications."""
        return self.phases[0]


def build_array(
    name: str,
    rank: int,
    members: Members,
    pieces: Sequence[int],
    *,
    kind: str = "average",
    **options: Any,
) -> ArrayPlan:
    """Build one rank's plan of an array, in every phase, numbered as ``members`` are ordered.

    Kinds that give each rank a block of its own keep the order of ranks, unless the plan can tell
    whose block is whose. An array that stays whole is one piece.
    """
    order = members.order
    if order and kind not in _KINDS:
        if "order" in spec_of(name).options:
            options["order"] = order
        else:
            order = ()
    if order:
        rank = order.index(rank)
        if options.get("root") in order:
            options["root"] = order.index(options["root"])
    number = spec_of(name).phases
    each: list[dict[str, Any]] = [{"phase": phase} for phase in range(number)]
    phases = each if number > 1 else [{}]
    built = [
        [build(name, rank, members.size, count, kind=kind, **options, **phase) for count in pieces]
        for phase in phases
    ]
    lanes = tuple(tuple(len(plan.lanes) for plan in plans) for plans in built)
    joined = [renumbered(join(plans), order) for plans in built]
    return ArrayPlan(tuple(joined), tuple(pieces), lanes)


def inbox_of(
    name: str, members: Members, pieces: Sequence[int], *, kind: str = "average", **options: Any
) -> int:
    """Return the elements of ``inbox`` in an exchange; without the plan, if its row says them."""
    if (inbox := spec_of(name).inbox) is None:
        plan = build_array(name, 0, members, pieces, kind=kind, **options).first
        return plan.buffers.get("inbox", 0)
    if options.get("root") in members.order:
        options["root"] = members.order.index(options["root"])
    return sum(inbox(members.size, n, **options) for n in pieces if n and members.size > 1)


def renumbered(plan: Plan, order: Sequence[int]) -> Plan:
    """Return the plan with rank ``order[r]`` in the place of rank r; (): the plan itself."""
    if not order:
        return plan

    def span(of: Span) -> Span:
        return of if of.rank is None else replace(of, rank=order[of.rank])

    def step(of: Step) -> Step:
        match of:
            case Put(peer=peer):
                return replace(of, peer=order[peer])
            case Wait(peer=peer):
                return of if peer is None else replace(of, peer=order[peer])
            case Reduce(dsts, srcs):
                return replace(of, dsts=tuple(map(span, dsts)), srcs=tuple(map(span, srcs)))
            case Copy(dst, src):
                return replace(of, dst=span(dst), src=span(src))
        return of

    lanes = tuple(tuple(map(step, lane)) for lane in plan.lanes)
    return replace(plan, rank=order[plan.rank], lanes=lanes)


def join(plans: Sequence[Plan]) -> Plan:
    """Return the plan of one rank that runs the plans of all pieces at once."""
    first = plans[0]
    if len({(plan.name, plan.rank, plan.size, tuple(plan.buffers)) for plan in plans}) > 1:
        raise PlanError(f"plan {first.name}: pieces by different plans, or of different ranks")
    if len(plans) == 1:
        return first
    shifts = {
        name: [0, *accumulate(plan.buffers[name] for plan in plans)] for name in first.buffers
    }
    flags = [0, *accumulate(plan.notifications for plan in plans)]
    lanes: list[tuple[Step, ...]] = []
    for number, plan in enumerate(plans):
        at = {name: places[number] for name, places in shifts.items()}
        move = _mover(at, flags[number])
        lanes.extend(tuple(map(move, lane)) for lane in plan.lanes)
    return replace(
        first,
        count=sum(plan.count for plan in plans),
        lanes=tuple(lanes),
        buffers={name: places[-1] for name, places in shifts.items()},
        notifications=flags[-1],
    )


def _mover(at: dict[str, int], flags: int) -> Callable[[Step], Step]:
    """Return a function that moves a step: its spans by ``at``, its notification by ``flags``."""

    def span(of: Span) -> Span:
        return replace(of, offset=of.offset + at[of.buffer])

    def moved(step: Step) -> Step:
        match step:
            case Put(src, n, peer, dst, notify):
                flag = None if notify is None else notify + flags
                return Put(span(src), n, peer, span(dst), flag)
            case Wait(notification, peer):
                return Wait(notification + flags, peer)
            case Reduce(dsts, srcs, n, scale):
                return Reduce(tuple(map(span, dsts)), tuple(map(span, srcs)), n, scale)
            case Copy(dst, src):
                return replace(step, dst=span(dst), src=span(src))
            case Call(hook, where, n):
                return Call(hook, span(where), n)
        return step

    return moved


def lowered(plan: Plan) -> Lowered:
    """Lower a plan to the core's form: buffers by number, -1 for "none" and "my own"."""
    numbers = {name: number for number, name in enumerate(plan.buffers)}

    def span(of: Span) -> CoreSpan:
        return numbers[of.buffer], of.offset, -1 if of.rank is None else of.rank

    def step(of: Step) -> CoreStep:
        targets: list[CoreSpan] = []
        sources: list[CoreSpan] = []
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
